"""Follow one sampled request through the engine: which files it passes, and which of their functions, in order.

    python examples/trace_request.py            # the demo model
    python examples/trace_request.py MODEL      # a checkpoint's directory or hub id

The request is the second of two, so that things made once for the first request are not in the way. Every function
of nanovllm that it calls is listed once, below the file that it is in; the number beside it says how often it ran. The
end of the list is a summary: files in the order in which the request first enters them. chapters/one_request.md takes
the same way, with explanations.
"""

import sys
from collections import Counter
from inspect import CO_NESTED
from pathlib import Path
from types import FrameType

from measuring import arguments, console
from rich.markup import escape
from rich.tree import Tree

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import model_or_demo

PACKAGE = Path(nanovllm.__file__).parent
STAGES = {  # LLMEngine's methods that are the lines of a step
    "poll": "1. poll: blocks that have arrived from lower tiers",
    "propose_drafts": "2. draft: tokens that may come next",
    "schedule": "3. schedule: which tokens of which sequences",
    "run": "4. run: the model computes them, the sampler chooses",
    "update": "5. update: sequences grow, or end",
    "make_outputs": "6. outputs: text for the caller",
}
RUNNER = "worker/model_runner.py"  # whose run() is one of them


class Walk:
    """Functions of nanovllm in the order of their first calls, by stage: {stage: {(file, name): calls}}."""

    def __init__(self) -> None:
        self.stages: dict[str, Counter[tuple[str, str]]] = {}
        self._stage = "before the first step"

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        """For sys.setprofile."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
        name = code.co_qualname if hasattr(code, "co_qualname") else code.co_name  # not in Python 3.10
        if code.co_name in STAGES and file == (RUNNER if code.co_name == "run" else "engine.py"):
            self._stage = STAGES[code.co_name]
        # Comprehensions, lambdas and functions within functions belong to those around them.
        if "<" not in name and not code.co_flags & CO_NESTED:
            self.stages.setdefault(self._stage, Counter())[file, name] += 1

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for calls in self.stages.values() for file, _ in calls))


def follow(llm: LLM, prompt: str, params: SamplingParams) -> tuple[Walk, str]:
    """The walk of one request, and the text that came of it."""
    walk = Walk()
    sys.setprofile(walk.profile)
    try:
        [output] = llm.generate([prompt], params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    return walk, output.outputs[0].text


def draw(walk: Walk) -> Tree:
    tree = Tree("one request")
    for stage, calls in walk.stages.items():
        branch = tree.add(f"[bold]{stage}[/]")
        for file in dict.fromkeys(file for file, _ in calls):
            functions = [f"{name} x{n}" if n > 1 else name for (of, name), n in calls.items() if of == file]
            branch.add(f"[cyan]{file}[/]  {', '.join(functions)}")
    return tree


def main() -> None:
    args = arguments(__doc__).parse_args()
    llm = LLM(model_or_demo(args.model), max_model_len=256)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=2, max_tokens=4)
    llm.generate(["The capital of Spain is"], params, use_tqdm=False)
    walk, text = follow(llm, "The capital of Italy is", params)
    console().print(draw(walk))
    console().print(f"\nThe answer is {escape(repr(text))}. On its way it passed {len(walk.files)} files:")
    console().print("  ".join(walk.files))


if __name__ == "__main__":
    main()
