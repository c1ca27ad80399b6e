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

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

LOADS = {"8 requests": 8, "one stream": 1, "32 requests": 32}
NUM_PROMPT, NUM_OUTPUT = 32, 24  # tokens of a request
VOCABULARY = range(100, 30_000)
SETTLE_S = 1.0  # until the system has spread the processes over the cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory or hub id (default: the demo checkpoint)")
    parser.add_argument("--neighbours", nargs="+", choices=list(NEIGHBOURS), default=list(NEIGHBOURS))
    parser.add_argument("--counts", nargs="*", type=int, default=[1, 4], help="how many neighbours run at a time")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--runs", type=int, default=10)
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
    rates: dict[tuple[str, int], dict[str, list[float]]] = {scene: {x: [] for x in args.loads} for scene in scenes}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(scenes) * args.runs * len(args.loads))
        for kind, count in scenes:
            progress.update(task, description=f"{count} x {kind}" if count else kind)
            with neighbours(kind, count, model):
                for _ in range(args.runs):
                    for load in args.loads:
                        rates[kind, count][load].append(rate(generate, LOADS[load]))
                        progress.advance(task)
    draw(rates, args.loads)


def make_engine(model: str, dtype: str) -> Callable[[int], None]:
    """A function that serves this many requests."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=NUM_PROMPT + NUM_OUTPUT)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)

    def generate(num_requests: int) -> None:
        llm.generate([random.choices(VOCABULARY, k=NUM_PROMPT) for _ in range(num_requests)], params, use_tqdm=False)

    generate(2)  # warms up
    return generate


def rate(generate: Callable[[int], None], num_requests: int) -> float:
    """Output tokens a second."""
    started = time.perf_counter()
    generate(num_requests)
    return num_requests * NUM_OUTPUT / (time.perf_counter() - started)


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


def draw(rates: dict[tuple[str, int], dict[str, list[float]]], loads: list[str]) -> None:
    table = Table(title="output tokens/s: median, worst run (both: ratio to quiet)", title_justify="left")
    table.add_column("beside")
    for load in loads:
        table.add_column(load, justify="right")
    quiet = {load: statistics.median(values) for load, values in rates["quiet", 0].items()}
    for (kind, count), found in rates.items():
        cells = []
        for load in loads:
            median, worst = statistics.median(found[load]), min(found[load])
            cells.append(f"{median:.0f}, {worst:.0f} ({median / quiet[load]:.2f}, {worst / quiet[load]:.2f})")
        table.add_row(f"{count} x {kind}" if count else kind, *cells)
    Console().print(table)


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
