"""How long a new process takes to its first token, beside what its imports alone take (chapter 10).

    python examples/bench_start.py [MODEL] [--rounds 7] [--importtime]

Each row is a process of its own, from its start to its end, with everything cached: the imports of torch, and of
transformers' AutoTokenizer and the class of this model's configuration; a script with an LLM that generates one token;
the `nanovllm` command that does. Prints the median and the fastest of the rounds, in seconds.

--importtime   also lists the ten modules whose imports take longest, each without what it imports
"""

import re
import statistics
import subprocess
import sys
from functools import partial

from measuring import arguments, console, in_turn, positive, seconds, table

IMPORTS = """
import sys, torch
from transformers import AutoConfig, AutoTokenizer
AutoConfig.from_pretrained(sys.argv[1])
"""
SCRIPT = """
import sys
from nanovllm import LLM, SamplingParams
print(LLM(sys.argv[1]).generate("Once upon a time", SamplingParams(max_tokens=1), use_tqdm=False))
"""
PYTHON = sys.executable
COMMANDS = {
    "import torch": [PYTHON, "-c", "import torch"],
    "these, and transformers' classes": [PYTHON, "-c", IMPORTS],
    'a script: LLM(MODEL).generate("Once upon a time")': [PYTHON, "-c", SCRIPT],
}
GENERATE = ["generate", "Once upon a time", "--max-tokens", "1", "--model"]
SELF_US = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--importtime", action="store_true", help="what the imports of the command consist of")
    args = parser.parse_args()

    from nanovllm.tools.demo_model import model_or_demo

    model = model_or_demo(args.model)
    commands = {name: [*command, model] for name, command in COMMANDS.items()}
    commands["nanovllm generate"] = [PYTHON, "-m", "nanovllm", *GENERATE, model]
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = in_turn({name: partial(seconds, run, command) for name, command in commands.items()}, args.rounds)
    made = table("A new process, everything cached, seconds", "from its start to its end", "median", "fastest")
    for name, times in found.items():
        made.add_row(name, f"{statistics.median(times):.2f}", f"{min(times):.2f}")
    console().print(made)
    if args.importtime:
        show_imports(["-m", "nanovllm", *GENERATE, model])


def show_imports(command: list[str]) -> None:
    ended = subprocess.run([PYTHON, "-X", "importtime", *command], check=True, capture_output=True, text=True)
    modules = sorted(((int(us), name) for us, name in SELF_US.findall(ended.stderr)), reverse=True)
    made = table(f"{len(modules)} modules, {sum(us for us, _ in modules) / 1e6:.2f} s", "module", "ms")
    for us, name in modules[:10]:
        made.add_row(name, f"{us / 1e3:.0f}")
    console().print(made)


if __name__ == "__main__":
    main()
