"""How a step's work would divide among more cores than this machine has (chapter 10).

    python examples/simulate_cores.py [MODEL] [--threads 16] [--rows 1 32] [--keys 200] [--prompt 512]
    python examples/simulate_cores.py --shape 0.5B      random weights in the shape of Qwen2.5-0.5B

A real engine computes real steps on one thread: decodes of so many rows, each of which sees so many keys, and the
prefill of a prompt (--prompt 0: none). The pool's parallel_for() (nanovllm/worker/cpu/pool.c) is replaced by one that
cuts each job into the chunks that the pool would hand out to that many threads, computes one after another, and notes
how long each takes. Then the chunks are dealt out as the pool does it: whichever thread is free first claims the next.

For each step, one table compares numbers of threads, and one shows every kind of call with the most threads:

    barriers         jobs that several threads share: after each of them the threads wait for one another
    work             the time of all chunks together
    longest          the time of the thread that is done last, added up over all jobs: a lower bound for the step
    in C             what a step really spends in C functions, with as many threads as this machine has CPUs
    items            of a job; a thread claims a chunk of them at a time, "at least" so many if they are there
    of a thread      how many items the threads compute: the fewest - the most
    imbalance        longest, divided by what it would be if all threads had equally much to do

It is a lower bound because every thread gets the caches and the memory bandwidth of one that runs alone, and because
waking threads and waiting for them takes no time. Where a step reads its weights from memory, as a decode of few rows
does, sixteen cores that share one memory are slower than that.
"""

import ctypes
import heapq
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import arguments, console, not_negative, positive, seconds, table, timed
from profile_step import until_all_decode
from rich.console import Console
from rich.table import Table

from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import model_or_demo
from nanovllm.worker.c_calls import INT, PTR
from nanovllm.worker.cpu import c_kernels, threads

NUM_STEPS = 5  # of the times that each takes, the shortest counts: other programs may be running
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=896, intermediate_size=4864,
        num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, head_dim=64, vocab_size=151_936,
        tie_word_embeddings=True, max_position_embeddings=4096,
    ),
}  # fmt: skip

WORK = ctypes.CFUNCTYPE(None, PTR, INT, INT)  # work_function of cpu/pool.h
PARALLEL_FOR = ctypes.CFUNCTYPE(None, WORK, PTR, INT, INT)
Chunk = tuple[int, int]  # first item, end


@dataclass(frozen=True)
class Job:
    """A call of parallel_for(), cut into chunks. A C function that calls it never is a job of one item."""

    kind: str
    num_items: int
    min_chunk: int
    chunks: tuple[Chunk, ...]


Times = list[float]  # of a job's chunks, in seconds
Step = list[tuple[Job, Times]]


@dataclass
class Schedule:
    """Who computes a job: busy time and number of items of each thread."""

    seconds: list[float]
    num_items: list[int]


def chunks_of(num_items: int, min_chunk: int, num_threads: int) -> tuple[Chunk, ...]:
    """The chunks of a job as cpu/pool.c hands them out, in this order. Their sizes do not depend on who claims them."""
    if 2 * num_items < 3 * min_chunk or num_threads < 2:
        return ((0, num_items),)
    chunks = []
    first = 0
    while first < num_items:
        left = num_items - first
        half_a_share = left // (2 * num_threads)
        count = min(left, max(half_a_share, min_chunk))
        chunks.append((first, first + count))
        first += count
    return tuple(chunks)


def deal(job: Job, times: Times, num_threads: int) -> Schedule:
    """All threads begin at the same time; whichever is free first claims the next chunk."""
    schedule = Schedule([0.0] * num_threads, [0] * num_threads)
    free_at = [(0.0, thread) for thread in range(num_threads)]
    for (first, end), chunk_s in zip(job.chunks, times, strict=True):
        since, thread = heapq.heappop(free_at)
        heapq.heappush(free_at, (since + chunk_s, thread))
        schedule.seconds[thread] += chunk_s
        schedule.num_items[thread] += end - first
    return schedule


# -- what a step does -------------------------------------------------------------------------------------------------


class Engine:
    """An engine whose steps can be watched."""

    def __init__(self, model: str, **options: Any) -> None:
        self.libraries: list[ctypes.CDLL] = []  # of the C kernels; each has a pointer to parallel_for()
        compile_library = c_kernels.compile_library

        def remembering(source: str | Path, defines: list[str]) -> Path:
            path = compile_library(source, defines)
            self.libraries.append(ctypes.CDLL(str(path)))
            return path

        with mock.patch.object(c_kernels, "compile_library", remembering):
            self.llm = LLM(model, **options)
        self.runner = self.llm.engine.model_runner
        if self.runner.kernels.library is None or self.runner.device.type != "cpu":
            sys.exit("simulate_cores.py: this takes a CPU and the C kernels, which need a C compiler")

    def request(self, num_prompt: int, num_output: int) -> str:
        prompt = random.choices(range(100, self.llm.engine.model_config.vocab_size), k=num_prompt)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_output)
        return self.llm.engine.add_request(None, prompt, params, stream=False)

    @contextmanager
    def decoding(self, num_rows: int, num_keys: int) -> Iterator[Callable[[], object]]:
        """A function that makes a step with so many rows, each of which sees num_keys keys or a few more."""
        engine = self.llm.engine
        endless = engine.kv_pool.max_model_len - num_keys
        ids = [self.request(num_keys - 1, endless) for _ in range(num_rows)]
        until_all_decode(self.llm)
        yield engine.step
        engine.abort_request(ids)

    @contextmanager
    def prefilling(self, num_prompt: int) -> Iterator[Callable[[], object]]:
        """A function that makes a step: the prefill of a prompt, whose only token ends the request."""

        def step() -> None:
            self.request(num_prompt, 1)
            self.llm.engine.step()

        yield step

    def observe(self, step: Callable[[], object], num_threads: int) -> Step:
        """The jobs of a step for so many threads, and the shortest times of their chunks on one."""
        observer = Observer(self, num_threads)
        steps: list[Step] = []
        with observer.watching():
            for _ in range(NUM_STEPS):
                observer.step = []
                step()
                if steps and [job for job, _ in steps[0]] != [job for job, _ in observer.step]:
                    steps.clear()  # sequences grow: their keys have one part more
                steps.append(observer.step)
        return [
            (job, [min(times) for times in zip(*(s[i][1] for s in steps), strict=True)])
            for i, (job, _) in enumerate(steps[0])
        ]

    def time_in_c(self, step: Callable[[], object], num_threads: int) -> float:
        """Seconds that a real step spends in C functions: the shortest of some."""
        library, recorder = self.runner.kernels.library, self.runner.kernels.recorder
        spent: dict[str, float] = {}
        found, before = [], torch.get_num_threads()
        torch.set_num_threads(num_threads)
        with (
            mock.patch.object(library, "replay", timed(spent, "C", library.replay)),
            mock.patch.object(recorder, "call", timed(spent, "C", recorder.call)),
        ):
            for _ in range(NUM_STEPS):
                spent.clear()
                step()
                found.append(spent.get("C", 0.0))
        torch.set_num_threads(before)
        return min(found)


class Observer:
    """Stands between a step and the pool: computes for num_threads threads what a step computes, on one."""

    def __init__(self, engine: Engine, num_threads: int) -> None:
        self.engine, self.num_threads = engine, num_threads
        self.step: Step = []
        self.kind = "other"

    @contextmanager
    def watching(self) -> Iterator[None]:
        kernels = self.engine.runner.kernels
        stand_in = PARALLEL_FOR(self.parallel_for)
        pool = ctypes.cast(threads.load_pool().parallel_for, PTR).value
        pointers = [PTR.in_dll(library, "parallel_for") for library in self.engine.libraries]
        with (
            mock.patch.object(c_kernels, "num_pool_threads", lambda: self.num_threads),
            mock.patch.object(kernels.library, "replay", self.replay),
            mock.patch.object(kernels.recorder, "call", self.call),
        ):
            for pointer in pointers:
                pointer.value = ctypes.cast(stand_in, PTR).value
            try:
                yield
            finally:
                for pointer in pointers:
                    pointer.value = pool

    def replay(self, calls: Any, num_calls: int, num_rows: int) -> None:
        """As cpu/replay.c does it."""
        recorded_steps = self.engine.runner.recorded_steps
        calls_at = {ctypes.addressof(args): (function, args) for function, args in recorded_steps.recorded}
        for i in range(num_calls):
            function, args = calls_at[calls[i].args]
            args.num_rows = num_rows
            self.call(function, args)

    def call(self, function: Callable, args: Any) -> None:
        num_jobs = len(self.step)
        self.kind = "gated " * getattr(args, "gated", 0) + function.__name__
        if hasattr(args, "n") and hasattr(args, "k"):
            self.kind += f" {args.k:,} to {args.n:,}"
        call_s = seconds(function, ctypes.byref(args))
        if len(self.step) == num_jobs:
            self.step.append((Job(self.kind, 1, 1, ((0, 1),)), [call_s]))
        self.kind = "other"

    def parallel_for(self, work: Callable, args: int, num_items: int, min_chunk: int) -> None:
        chunks = chunks_of(num_items, min_chunk, self.num_threads)
        call_s = min(seconds(work, args, 0, 0) for _ in range(3))  # no items: what a call from Python takes
        times = [max(seconds(work, args, first, end) - call_s, 0.0) for first, end in chunks]
        self.step.append((Job(self.kind, num_items, min_chunk, chunks), times))
        self.kind += ", then"  # another job of the same call


# -- tables -----------------------------------------------------------------------------------------------------------


def compare_threads(title: str, steps: dict[int, Step], in_c: dict[int, float]) -> Table:
    columns = ("jobs", "barriers", "work, ms", "longest, ms", "speed-up at most", "imbalance", "in C, ms")
    rows = table(title, "threads", *columns)
    rows.columns[0].justify = "right"
    for num_threads, step in steps.items():
        work = sum(sum(times) for _, times in step)
        longest = sum(max(deal(job, times, num_threads).seconds) for job, times in step)
        rows.add_row(
            str(num_threads),
            str(len(step)),
            str(sum(len(job.chunks) > 1 for job, _ in step)),
            f"{work * 1e3:.2f}",
            f"{longest * 1e3:.2f}",
            f"{work / longest:.2f}",
            f"{longest * num_threads / work:.2f}",
            f"{in_c[num_threads] * 1e3:.2f}" if num_threads in in_c else "",
        )
    return rows


def show_kinds(title: str, step: Step, num_threads: int) -> Table:
    columns = ("jobs", "items", "at least", "chunks", "of a thread", "imbalance", "work, ms", "longest, ms")
    rows = table(title, "job", *columns)
    schedules: dict[Job, list[Schedule]] = defaultdict(list)
    for job, times in step:
        schedules[job].append(deal(job, times, num_threads))
    longest = {job: sum(max(one.seconds) for one in found) for job, found in schedules.items()}
    for job, found in sorted(schedules.items(), key=lambda entry: -longest[entry[0]]):
        work = sum(sum(one.seconds) for one in found)
        fewest, most = (choose(n for one in found for n in one.num_items) for choose in (min, max))
        rows.add_row(
            job.kind,
            str(len(found)),
            f"{job.num_items:,}",
            str(job.min_chunk),
            str(len(job.chunks)),
            f"{fewest:,} - {most:,}" if fewest < most else f"{most:,}",
            f"{longest[job] * num_threads / work:.2f}" if work else "-",  # less than reading the clock takes
            f"{work * 1e3:.2f}",
            f"{longest[job] * 1e3:.2f}",
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights in this shape")
    parser.add_argument("--threads", type=positive, default=16, help="the most")
    parser.add_argument("--rows", type=positive, nargs="*", default=[1, 32])
    parser.add_argument("--keys", type=positive, default=200)
    parser.add_argument("--prompt", type=not_negative, default=512, help="tokens; 0: none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    args = parser.parse_args()
    if args.keys < 2:
        parser.error("--keys must be 2 or more: those of a prompt, and of the token that follows it")
    counts = sorted({num for num in (1, 2, 4, 8, 16, 32, 64) if num < args.threads} | {args.threads})
    real = [num for num in counts if num <= threads.num_cpus()]
    options: dict[str, Any] = {"load_format": "dummy", "hf_overrides": SHAPES[args.shape]} if args.shape else {}
    most_rows = max(args.rows, default=0)
    progress = Console(stderr=True)
    with progress.status("an engine"):
        engine = Engine(
            model_or_demo(args.model),
            dtype=args.dtype,
            quantization=args.quantization,
            enable_prefix_caching=False,
            max_num_batched_tokens=max(args.prompt, 2 * most_rows, 2048),  # decodes leave room for prompts
            max_num_seqs=max(most_rows, 256),
            **options,
        )
    longest = engine.llm.engine.kv_pool.max_model_len
    num_steps = 2 * NUM_STEPS * (len(counts) + 1)  # of a decode, those included until all decode
    if max(args.prompt, args.keys + num_steps) >= longest:
        needed = f"--prompt and one more, and --keys and {num_steps} more"
        parser.error(f"a sequence of this model has {longest:,} tokens at most, and must have room for {needed}")
    loads = {}
    for num_rows in args.rows:
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        loads[f"Decode, {rows} of {args.keys} keys"] = engine.decoding(num_rows, args.keys)
    if args.prompt > 0:
        loads[f"Prefill, {args.prompt} tokens"] = engine.prefilling(args.prompt)
    for name, load in loads.items():
        with progress.status(name) as status, load as step:
            step()  # warms up
            in_c, steps = {}, {}
            for num_threads in counts:
                status.update(f"{name}: {num_threads} threads")
                if num_threads in real:
                    in_c[num_threads] = engine.time_in_c(step, num_threads)
                steps[num_threads] = engine.observe(step, num_threads)
        console().print(compare_threads(name, steps, in_c), "")
        console().print(show_kinds(f"{name}, {counts[-1]} threads", steps[counts[-1]], counts[-1]), "")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
