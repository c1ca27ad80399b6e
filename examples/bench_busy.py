"""Speed beside other programs: on a quiet machine, beside one busy process, and beside four (chapter 10).

    python examples/bench_busy.py [MODEL] [--neighbours loop matmul engine] [--counts 1 4] [--runs 10]

Three loads: 8 requests of 24 tokens; one stream of 24 tokens; 32 requests of 24 tokens. Prompts are 32 random tokens,
greedy, EOS ignored. Three kinds of neighbours: a Python loop, a matrix product in PyTorch, another nanovllm engine.
Prints output tokens/s, the median and the worst run, and their ratios to the median of the quiet runs.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from measuring import add_some_of, arguments, console, greedy, in_turn, positive, prompt_ids, seconds, table

LOADS = {"8 requests": 8, "one stream": 1, "32 requests": 32}
NUM_PROMPT, NUM_OUTPUT = 32, 24  # tokens of a request
SETTLE_S = 1.0  # until the system has spread the processes over the cores


def main() -> None:
    parser = arguments(__doc__)
    add_some_of(parser, "--neighbours", NEIGHBOURS)
    parser.add_argument("--counts", nargs="*", type=positive, default=[1, 4], help="how many neighbours run at a time")
    add_some_of(parser, "--loads", LOADS)
    parser.add_argument("--runs", type=positive, default=10)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--be", choices=list(NEIGHBOURS), help=argparse.SUPPRESS)
    args = parser.parse_args()

    from nanovllm.tools.demo_model import model_or_demo

    model = model_or_demo(args.model)
    if args.be:
        NEIGHBOURS[args.be](model)
        return
    generate = make_engine(model, args.dtype)
    scenes = [("quiet", 0)] + [(kind, count) for count in args.counts for kind in args.neighbours] + [("quiet", 0)]
    loads = {load: partial(rate, generate, LOADS[load]) for load in args.loads}
    found = []  # (neighbours, load -> the rate of each run)
    for kind, count in scenes:
        beside = f"{count} x {kind}" if count else kind
        with neighbours(kind, count, model):
            found.append((beside, in_turn(loads, args.runs, beside)))
    draw(found)


def make_engine(model: str, dtype: str) -> Callable[[int], None]:
    """A function that serves this many requests."""
    from nanovllm import LLM

    llm = LLM(model, dtype=dtype, max_model_len=NUM_PROMPT + NUM_OUTPUT)
    params, token_ids = greedy(NUM_OUTPUT), prompt_ids(llm.engine.model_config.vocab_size)

    def generate(num_requests: int) -> None:
        llm.generate([random.choices(token_ids, k=NUM_PROMPT) for _ in range(num_requests)], params, use_tqdm=False)

    generate(2)  # warms up
    return generate


def rate(generate: Callable[[int], None], num_requests: int) -> float:
    """Output tokens a second."""
    return num_requests * NUM_OUTPUT / seconds(generate, num_requests)


@contextmanager
def neighbours(kind: str, count: int, model: str) -> Iterator[None]:
    """This many busy processes; returns when all of them are at work."""
    command = [sys.executable, __file__, model, "--be", kind]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit(f"the neighbour {' '.join(command)} has ended, exit code {process.wait()}")
        time.sleep(SETTLE_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def draw(found: list[tuple[str, dict[str, list[float]]]]) -> None:
    """The quiet runs, before the neighbours and after them, are one row."""
    rates: dict[str, dict[str, list[float]]] = {}
    for beside, of in found:
        for load, values in of.items():
            rates.setdefault(beside, {}).setdefault(load, []).extend(values)
    quiet = {load: statistics.median(values) for load, values in rates["quiet"].items()}
    rows = table("output tokens/s: median, worst run (both: ratio to quiet)", "beside", *quiet)
    for beside, of in rates.items():
        cells = []
        for load, values in of.items():
            median, worst = statistics.median(values), min(values)
            cells.append(f"{median:.0f}, {worst:.0f} ({median / quiet[load]:.2f}, {worst / quiet[load]:.2f})")
        rows.add_row(beside, *cells)
    console().print(rows)


# -- neighbours: each says that it is at work, then never ends ---------------------------------------------------------


def loop(model: str) -> None:
    print("busy", flush=True)
    while True:
        pass


def matmul(model: str) -> None:
    import torch

    matrix = torch.randn(1024, 1024)
    print("busy", flush=True)
    while True:
        matrix @ matrix


def engine(model: str) -> None:
    generate = make_engine(model, "auto")
    print("busy", flush=True)
    while True:
        generate(8)


NEIGHBOURS: dict[str, Callable[[str], None]] = {"loop": loop, "matmul": matmul, "engine": engine}

if __name__ == "__main__":
    main()
