"""Grading of the exercises of chapter 6."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import nanovllm.engine
from chapters.ch06_prefill_decode.lab import Machine
from chapters.grading import PROMPTS, Bench, Task, Wrong, replaced
from nanovllm import SamplingParams
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.outputs import RequestMetrics
from nanovllm.worker.batch import Batch

OUR_SCHEDULE = Scheduler.schedule
OUR_FROM_SCHEDULER_OUTPUT = Batch.from_scheduler_output

# -- ttft_and_tpot ----------------------------------------------------------------------------------------------------

Latencies = Callable[[RequestMetrics], tuple[float | None, float | None]]


@contextmanager
def use_latencies(function: Latencies) -> Iterator[None]:
    with (
        replaced(RequestMetrics, "ttft_s", property(lambda metrics: function(metrics)[0])),
        replaced(RequestMetrics, "tpot_s", property(lambda metrics: function(metrics)[1])),
    ):
        yield


def close(a: Any, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return isinstance(a, int | float) and abs(a - b) < 1e-6


def check_pair(function: Latencies, metrics: RequestMetrics) -> Any:
    got = function(metrics)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong("return two things: the TTFT and the TPOT", expected="(ttft, tpot)", got=repr(got))
    return got


def check_ttft(function: Latencies, bench: Bench) -> None:
    """TTFT runs from the arrival to the first token"""
    got, _ = check_pair(function, RequestMetrics(100.0, 103.0, 107.0, 107.0, 1))
    if close(got, 4.0):
        raise Wrong("the user waits from the arrival on; time in the queue is waiting, too", expected=7.0, got=got)
    if not close(got, 7.0):
        raise Wrong("arrival 100.0, first token 107.0: what is the time to first token?", expected=7.0, got=got)


def check_tpot(function: Latencies, bench: Bench) -> None:
    """TPOT is the mean of the gaps between tokens"""
    _, got = check_pair(function, RequestMetrics(100.0, 103.0, 107.0, 115.0, 5))
    if close(got, 8 / 5):
        hint = "five tokens have four gaps between them: divide by n - 1"
    elif close(got, 15 / 5) or close(got, 15 / 4):
        hint = "the wait for the first token is the TTFT's; TPOT counts from the first token to the last"
    else:
        hint = "five tokens, the first at 107.0, the last at 115.0"
    if not close(got, 2.0):
        raise Wrong(hint, expected=2.0, got=got)


def check_not_yet(function: Latencies, bench: Bench) -> None:
    """None for what has not happened yet"""
    for metrics, expected, when in (
        (RequestMetrics(100.0), (None, None), "the request is waiting: there is no token yet"),
        (RequestMetrics(100.0, 101.0), (None, None), "the prompt is being computed: there is no token yet"),
        (RequestMetrics(100.0, 101.0, 102.0, 102.0, 1), (2.0, None), "one token has no gap behind it"),
        (RequestMetrics(0.0, 0.0, 0.0, 1.0, 2), (0.0, 1.0), "a clock may read 0.0: that is not None"),
    ):
        got = check_pair(function, metrics)
        if not all(close(a, b) for a, b in zip(got, expected, strict=True)):
            raise Wrong(when, expected=expected, got=got)


def check_own_clock(function: Latencies, bench: Bench) -> None:
    """The engine reports what a clock says that we turn by hand"""
    engine, now = bench.llm.engine, 10.0
    bench.llm.reset_prefix_cache()
    clock = SimpleNamespace(perf_counter=lambda: now)
    token_times: list[float] = []
    outputs: list[Any] = []
    with replaced(nanovllm.engine, "time", clock), replaced(engine.scheduler, "max_num_batched_tokens", 3):
        engine.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), stream=True)
        while engine.has_unfinished_requests():
            now += 1.0 + len(token_times) % 3  # the step takes so long
            outputs = engine.step()
            token_times += [now] * len(outputs)
    metrics = outputs[-1].metrics
    expected = token_times[0] - 10.0, (token_times[-1] - token_times[0]) / (len(token_times) - 1)
    if not all(close(a, b) for a, b in zip((metrics.ttft_s, metrics.tpot_s), expected, strict=True)):
        hint = f"a request arrives at 10.0, its tokens at {token_times}"
        raise Wrong(hint, expected=expected, got=(metrics.ttft_s, metrics.tpot_s))


# -- pack -------------------------------------------------------------------------------------------------------------

Pack = Callable[[list[ScheduledChunk]], tuple[list[int], list[int], list[int]]]
NAMES = ("cu_seqlens_q", "seqlens_k", "logits_rows")


@contextmanager
def use_pack(function: Pack) -> Iterator[None]:
    def from_scheduler_output(cls: type[Batch], output: SchedulerOutput, block_size: int) -> Batch:
        ours = OUR_FROM_SCHEDULER_OUTPUT(output, block_size)
        cu_seqlens_q, seqlens_k, logits_rows = function(output.chunks)
        # Kernels trust these numbers and would read elsewhere in memory.
        if len(cu_seqlens_q) != len(ours.cu_seqlens_q) or cu_seqlens_q != ours.cu_seqlens_q.tolist():
            raise Wrong("cu_seqlens_q of a step", expected=ours.cu_seqlens_q.tolist(), got=cu_seqlens_q)
        if len(seqlens_k) != len(ours.seqlens_k) or not all(
            1 <= ask <= most for ask, most in zip(seqlens_k, ours.seqlens_k.tolist(), strict=True)
        ):
            raise Wrong("seqlens_k of a step", expected=ours.seqlens_k.tolist(), got=seqlens_k)
        if len(logits_rows) != len(ours.logits_rows) or not all(0 <= row < len(ours.input_ids) for row in logits_rows):
            raise Wrong("logits_rows of a step", expected=ours.logits_rows.tolist(), got=logits_rows)
        return replace(
            ours,
            cu_seqlens_q=torch.tensor(cu_seqlens_q, dtype=torch.int32),
            seqlens_k=torch.tensor(seqlens_k, dtype=torch.int32),
            logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
            max_key_len=max(seqlens_k),
        )

    original = vars(Batch)["from_scheduler_output"]
    Batch.from_scheduler_output = classmethod(from_scheduler_output)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Batch.from_scheduler_output = original  # type: ignore[method-assign]


def make_chunks(*sizes: tuple[int, int, int]) -> list[ScheduledChunk]:
    """(start, end, tokens of the sequence) for each chunk."""
    return [ScheduledChunk(Sequence(list(range(num_tokens))), start, end, start) for start, end, num_tokens in sizes]


def show(chunks: list[ScheduledChunk]) -> str:
    return ", ".join(f"positions {c.start}-{c.end - 1} of {len(c.seq.tokens)}" for c in chunks)


def compare_pack(function: Pack, chunks: list[ScheduledChunk]) -> None:
    """Raises Wrong, with a hint for the mistakes that are usual."""
    lens = [chunk.end - chunk.start for chunk in chunks]
    cu_seqlens_q = [sum(lens[:i]) for i in range(len(lens) + 1)]
    seqlens_k = [chunk.end for chunk in chunks]
    last_rows = [row - 1 for row in cu_seqlens_q[1:]]
    logits_rows = [row for row, chunk in zip(last_rows, chunks, strict=True) if chunk.samples]
    got = function(chunks)
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong("return three lists: cu_seqlens_q, seqlens_k, logits_rows", got=repr(got))
    for name, expected, answer in zip(NAMES, (cu_seqlens_q, seqlens_k, logits_rows), got, strict=True):
        if list(answer) == expected:
            continue
        hint = {
            ("cu_seqlens_q", tuple(lens)): "these are lengths; cu_seqlens is their running sum, from 0 on",
            ("cu_seqlens_q", (0, *lens)): "these are lengths; cu_seqlens is their running sum, from 0 on",
            ("cu_seqlens_q", tuple(cu_seqlens_q[1:])): "it lacks the leading 0: row 0 is where the first chunk begins",
            ("seqlens_k", tuple(lens)): "the last row attends to all tokens so far, also to those of earlier steps",
            ("seqlens_k", tuple(len(c.seq.tokens) for c in chunks)): "tokens behind the chunk are not there yet",
            ("seqlens_k", tuple(end - 1 for end in seqlens_k)): "a token attends to itself, too",
            ("logits_rows", tuple(last_rows)): "a chunk that ends in the middle of a prompt does not sample",
            ("logits_rows", tuple(row + 1 for row in logits_rows)): "that row is the next chunk's first",
        }.get((name, tuple(answer)), "look at each chunk alone: where does it begin, where does it end?")
        raise Wrong(f"{name} of a step with {show(chunks)}: {hint}", expected=expected, got=answer)


def check_one_prompt(function: Pack, bench: Bench) -> None:
    """One whole prompt"""
    compare_pack(function, make_chunks((0, 5, 5)))


def check_decodes(function: Pack, bench: Bench) -> None:
    """Three decodes: a row each, and all that came before in the cache"""
    compare_pack(function, make_chunks((7, 8, 8), (0, 1, 1), (30, 31, 31)))


def check_mixed(function: Pack, bench: Bench) -> None:
    """Two decodes and the middle of a prompt"""
    compare_pack(function, make_chunks((3, 4, 4), (5, 6, 6), (6, 12, 20)))


def check_random_steps(function: Pack, bench: Bench) -> None:
    """200 random steps"""
    rng = random.Random(0)
    for _ in range(200):
        sizes = []
        for _ in range(rng.randint(1, 6)):
            start, num_tokens = rng.randint(0, 40), rng.randint(1, 9)
            sizes.append((start, start + num_tokens, start + num_tokens + rng.choice((0, 0, 5))))
        compare_pack(function, make_chunks(*sizes))


def check_pack_generates(function: Pack, bench: Bench) -> None:
    """The model gives the same tokens, whole prompts and chunks"""
    bench.same_tokens()
    with replaced(bench.llm.engine.scheduler, "max_num_batched_tokens", 5):
        bench.same_tokens()


# -- token_budget -----------------------------------------------------------------------------------------------------

Budget = Callable[[Scheduler, Machine, float], int]
MACHINE = Machine(weight_bytes=4e9, flops_per_token=4e9, bytes_per_s=1e11, flops_per_s=2e13)  # 40 ms, 0.2 ms a token


@contextmanager
def use_budget(function: Budget, limit_s: float = 0.0501) -> Iterator[None]:
    """Each step gets the budget that the function wants for it."""

    def schedule(scheduler: Scheduler) -> SchedulerOutput:
        with replaced(scheduler, "max_num_batched_tokens", ask(function, scheduler, MACHINE, limit_s)):
            return OUR_SCHEDULE(scheduler)

    with replaced(Scheduler, "schedule", schedule):
        yield


def ask(function: Budget, scheduler: Scheduler, machine: Machine, limit_s: float) -> int:
    got = function(scheduler, machine, limit_s)
    if not isinstance(got, int) or got < 1:
        raise Wrong("a budget is a whole number, at least 1: with less the engine stands still", got=repr(got))
    return got


def make_scheduler(num_decoding: int, num_prompt: int = 0, max_num_batched_tokens: int = 2048) -> Scheduler:
    """So many sequences that decode, and one in the middle of a prompt that is so long."""
    manager = BlockManager(num_blocks=1000, block_size=16)
    scheduler = Scheduler(manager, max_num_seqs=100, max_num_batched_tokens=max_num_batched_tokens, max_model_len=2000)
    for i in range(num_decoding):
        scheduler.add(Sequence([100 * i, 100 * i + 1], SamplingParams(max_tokens=100)))
    with replaced(scheduler, "max_num_batched_tokens", 1000):
        take(scheduler, OUR_SCHEDULE(scheduler))
    if num_prompt:
        scheduler.add(Sequence(list(range(num_prompt)), SamplingParams(max_tokens=100)))
        with replaced(scheduler, "max_num_batched_tokens", num_decoding + 2):
            take(scheduler, OUR_SCHEDULE(scheduler))
    return scheduler


def take(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """As if the model had computed the step."""
    scheduler.update(output, [7 for chunk in output.chunks if chunk.samples])


def check_fits(function: Budget, bench: Bench) -> None:
    """The largest step that ends in time"""
    for limit_s, expected in ((0.0501, 250), (0.0999, 499), (0.0401, 200)):
        got = ask(function, make_scheduler(0), MACHINE, limit_s)
        hint = f"reading takes 0.04 s, each token 0.0002 s of arithmetic, the step may take {limit_s} s"
        if got == int((limit_s - 0.04) / 0.0002):
            hint += "; both happen at the same time, so the slower one counts, and not their sum"
        elif got == expected + 1:
            hint += "; with that many it takes longer"
        if got != expected:
            raise Wrong(hint, expected=expected, got=got)


def check_decodes_fit(function: Budget, bench: Bench) -> None:
    """Every decode gets its token, and a prompt moves on"""
    for num_decoding, num_prompt, limit_s, expected in ((6, 0, 0.0003, 7), (6, 50, 0.03, 7), (0, 0, 0.03, 1)):
        scheduler = make_scheduler(num_decoding, num_prompt)
        got = ask(function, scheduler, MACHINE, limit_s)
        hint = f"{num_decoding} sequences decode, {1 if num_prompt else 0} is in the middle of its prompt"
        if got == int(limit_s * 5000) and got != expected:
            hint += "; the weights alone take 0.04 s to read, longer than the limit: no number of tokens fits"
        elif got == num_decoding:
            hint += "; one token more, or the prompt stands still as long as they decode"
        elif got == len(scheduler.running) + 1:
            hint += "; a sequence in the middle of its prompt does not decode"
        if got != expected:
            raise Wrong(f"{hint} (limit {limit_s} s)", expected=expected, got=got)


def check_waiting(function: Budget, bench: Bench) -> None:
    """Who waits does not decode"""
    scheduler = make_scheduler(2)
    for i in range(5):
        scheduler.add(Sequence([9000 + i]))
    got = ask(function, scheduler, MACHINE, 0.03)
    if got != 3:
        raise Wrong("2 sequences decode, 5 with prompts of one token are waiting; no T fits", expected=3, got=got)


def check_cap(function: Budget, bench: Bench) -> None:
    """Never more than max_num_batched_tokens"""
    for num_decoding, limit_s in ((0, 0.0501), (20, 0.03)):
        got = ask(function, make_scheduler(num_decoding, 0, 16), MACHINE, limit_s)
        if got != 16:
            raise Wrong("max_num_batched_tokens is 16; it has the last word", expected=16, got=got)


def check_arrival(function: Budget, bench: Bench) -> None:
    """A prompt of 1,000 tokens arrives while 10 sequences decode"""
    scheduler = make_scheduler(10)
    newcomer = Sequence(list(range(5000, 6000)))
    scheduler.add(newcomer)
    sizes: list[int] = []
    while newcomer.num_generated_tokens == 0 and len(sizes) < 50:
        output = scheduler.schedule()  # with the student's budget
        sizes.append(output.num_tokens)
        take(scheduler, output)
    expected = [250, 250, 250, 250, 50]
    if sizes != expected:
        raise Wrong("tokens of each step until its first token, limit 0.0501 s", expected=expected, got=sizes)


def check_budget_generates(function: Budget, bench: Bench) -> None:
    """The model gives the same tokens, with time enough and with far too little"""
    for limit_s in (0.0501, 0.001):
        with use_budget(function, limit_s):
            bench.same_tokens()


TASKS = [
    Task("ttft_and_tpot", "Two stopwatches", use_latencies, (check_ttft, check_tpot, check_not_yet, check_own_clock)),
    Task(
        "pack",
        "One batch for everybody",
        use_pack,
        (check_one_prompt, check_decodes, check_mixed, check_random_steps, check_pack_generates),
    ),
    Task(
        "token_budget",
        "A budget for each step",
        use_budget,
        (check_fits, check_decodes_fit, check_waiting, check_cap, check_arrival, check_budget_generates),
    ),
]
