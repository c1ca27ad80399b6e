"""Grading of the exercises of chapter 6."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import nanovllm.engine
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


# -- schedule_chunks --------------------------------------------------------------------------------------------------

Schedule = Callable[[Scheduler], SchedulerOutput]


class World:
    """A scheduler with a pool that never runs out, and sequences with names, without a model."""

    def __init__(self, budget: int, max_num_seqs: int = 8) -> None:
        manager = BlockManager(num_blocks=500, block_size=4)
        self.scheduler = Scheduler(manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=200)
        self.names: dict[int, str] = {}

    def add(self, num_prompt: int, first_token: int | None = None) -> Sequence:
        first = 1000 * len(self.names) if first_token is None else first_token
        seq = Sequence(list(range(first, first + num_prompt)), SamplingParams(max_tokens=60))
        self.names[seq.seq_id] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[len(self.names) % 26]
        self.scheduler.add(seq)
        return seq

    def start(self, num_seqs: int, num_prompt: int = 3) -> None:
        """So many sequences that are decoding, by our own scheduler."""
        for _ in range(num_seqs):
            self.add(num_prompt)
        budget, self.scheduler.max_num_batched_tokens = self.scheduler.max_num_batched_tokens, 10**6
        self.take(OUR_SCHEDULE(self.scheduler))
        self.scheduler.max_num_batched_tokens = budget

    def take(self, output: SchedulerOutput) -> None:
        """As if the model had computed the step."""
        self.scheduler.update(output, [7 for chunk in output.chunks if chunk.samples])

    def shape(self, output: SchedulerOutput) -> list[tuple[str, int]]:
        return [(self.names[chunk.seq.seq_id], chunk.end - chunk.start) for chunk in output.chunks]

    def step(self, function: Schedule) -> list[tuple[str, int]]:
        """A step of the student's scheduler, examined. Returns each chunk's sequence and tokens."""
        budget = self.scheduler.max_num_batched_tokens
        try:
            output = function(self.scheduler)
        except IndexError as error:
            full = [seq for seq in self.scheduler.running if seq.num_computed_tokens >= 4 * len(seq.block_table)]
            if not full:
                raise
            hint = f"no block has room for token {full[0].num_computed_tokens} of a sequence: append_slots comes first"
            raise Wrong(hint) from error
        if not isinstance(output, SchedulerOutput):
            raise Wrong("return a SchedulerOutput(chunks, preempted, num_tokens)", got=repr(output))
        shape = self.shape(output)
        total = sum(num_tokens for _, num_tokens in shape)
        if total > budget:
            raise Wrong(f"the step exceeds its budget of {budget} tokens", expected=f"<= {budget}", got=f"{shape}")
        if any(num_tokens < 1 for _, num_tokens in shape):
            raise Wrong("a chunk without a token: stop when the budget is used up", got=shape)
        if output.num_tokens != total:
            raise Wrong("num_tokens is the sum of the chunks' tokens", expected=total, got=output.num_tokens)
        if list(output.preempted):
            raise Wrong("nobody has to be preempted here", expected=[], got=output.preempted)
        if len(self.scheduler.running) > self.scheduler.max_num_seqs:
            hint = f"more than max_num_seqs = {self.scheduler.max_num_seqs} sequences are running"
            raise Wrong(hint, expected=self.scheduler.max_num_seqs, got=len(self.scheduler.running))
        self.take(output)
        return shape

    def expect(self, function: Schedule, expected: list[tuple[str, int]], hint: str) -> None:
        got = self.step(function)
        if got != expected:
            raise Wrong(hint, expected=expected, got=got)
        try:
            self.scheduler.check_integrity()
        except AssertionError as error:
            raise Wrong(f"after the step the scheduler is not sane any more: {error}") from error


def check_prompt_in_chunks(function: Schedule, bench: Bench) -> None:
    """A prompt of 20 tokens under a budget of 8 takes three steps, then it decodes"""
    world = World(budget=8)
    world.add(20)
    for expected in (8, 8, 4):
        world.expect(function, [("A", expected)], "a prompt of 20 tokens alone, budget 8: chunks of 8, 8 and 4")
    world.expect(function, [("A", 1)], "its prompt is computed and a token is sampled: now it decodes")


def check_decodes_first(function: Schedule, bench: Bench) -> None:
    """Decodes come first, a new prompt gets what is left"""
    world = World(budget=8)
    world.start(2)
    world.add(10)
    hint = "A and B are decoding, a prompt of 10 tokens (C) arrives, budget 8: the running ones come first"
    world.expect(function, [("A", 1), ("B", 1), ("C", 6)], hint)
    world.expect(function, [("A", 1), ("B", 1), ("C", 4)], "the step after that: the 4 tokens of C that are left")


def check_one_unfinished(function: Schedule, bench: Bench) -> None:
    """The unfinished prompt goes on before anyone is admitted"""
    world = World(budget=8)
    world.start(1)
    world.add(10)
    world.add(12)
    world.expect(function, [("A", 1), ("B", 7)], "budget 8: A decodes, B gets 7 of 10 tokens, C must wait")
    hint = "B's last 3 tokens come first, then C is admitted with what is left of the budget"
    world.expect(function, [("A", 1), ("B", 3), ("C", 4)], hint)
    world.expect(function, [("A", 1), ("B", 1), ("C", 6)], "A and B decode, C goes on")


def check_small_budget(function: Schedule, bench: Bench) -> None:
    """More decodes than budget: the oldest are served, nobody is admitted"""
    world = World(budget=2)
    world.start(3)
    world.add(5)
    hint = "A, B and C are decoding, D waits, budget 2: the oldest two get a token each"
    world.expect(function, [("A", 1), ("B", 1)], hint)


def check_max_num_seqs(function: Schedule, bench: Bench) -> None:
    """Never more than max_num_seqs sequences are running"""
    world = World(budget=50, max_num_seqs=3)
    for _ in range(5):
        world.add(4)
    hint = "five prompts of 4 tokens, budget 50, max_num_seqs 3: three are admitted"
    world.expect(function, [("A", 4), ("B", 4), ("C", 4)], hint)
    world.expect(function, [("A", 1), ("B", 1), ("C", 1)], "while three are running nobody else is admitted")


def check_prefix_hit(function: Schedule, bench: Bench) -> None:
    """Tokens found in the prefix cache cost no budget"""
    world = World(budget=10)
    world.add(8, first_token=0)
    world.expect(function, [("A", 8)], "a prompt of 8 tokens, budget 10")
    world.add(14, first_token=0)
    hint = "B's first 8 tokens are in the prefix cache: after allocate_with_prefix only 6 of its 14 are left to compute"
    world.expect(function, [("A", 1), ("B", 6)], hint)


def check_like_ours(function: Schedule, bench: Bench) -> None:
    """100 random workloads, step by step the same as the engine's own scheduler"""
    rng = random.Random(1)
    for _ in range(100):
        budget, max_num_seqs = rng.randint(1, 24), rng.randint(1, 5)
        world, ours = World(budget, max_num_seqs), World(budget, max_num_seqs)
        for _ in range(25):
            if rng.random() < 0.4:
                num_prompt, first_token = rng.randint(1, 40), rng.choice((0, None))
                world.add(num_prompt, first_token)
                ours.add(num_prompt, first_token)
            expected = ours.step(OUR_SCHEDULE)
            world.expect(function, expected, f"a random workload, budget {budget}: the engine chooses other chunks")


def check_schedule_generates(function: Schedule, bench: Bench) -> None:
    """The model gives the same tokens, with a large budget and with one of 5 tokens"""
    bench.same_tokens()
    with replaced(bench.llm.engine.scheduler, "max_num_batched_tokens", 5):
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
        "schedule_chunks",
        "A budget for each step",
        lambda function: replaced(Scheduler, "schedule", function),
        (
            check_prompt_in_chunks,
            check_decodes_first,
            check_one_unfinished,
            check_small_budget,
            check_max_num_seqs,
            check_prefix_hit,
            check_like_ours,
            check_schedule_generates,
        ),
    ),
]
