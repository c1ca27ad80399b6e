"""Grading of the exercises of chapter 6."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from chapters.ch06_prefill_decode.lab import Machine
from chapters.grading import Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import SamplingParams
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.worker.batch import Batch

OUR_SCHEDULE = Scheduler.schedule
OUR_FROM_SCHEDULER_OUTPUT = Batch.from_scheduler_output

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

    with replaced(Batch, "from_scheduler_output", classmethod(from_scheduler_output)):
        yield


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


# -- chunked_prefill --------------------------------------------------------------------------------------------------

Schedule = Callable[[Scheduler], SchedulerOutput]
NOTATION = "A 3..5 is positions 3 and 4 of A"


def use_chunked_prefill(function: Schedule) -> AbstractContextManager[None]:
    return replaced(Scheduler, "schedule", function)


class Steps:
    """A scheduler step by step. Its sequences have names, and its pool never runs out."""

    block_size = 4

    def __init__(self, schedule: Schedule, budget: int, max_num_seqs: int = 8) -> None:
        manager = BlockManager(256, self.block_size)
        self.schedule = schedule
        self.scheduler = Scheduler(manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=100)
        self.scheduler.make_chunk = self.make_chunk  # type: ignore[method-assign]
        self.names: dict[int, str] = {}

    def add(self, name: str, prompt: int | list[int], max_tokens: int = 50) -> Sequence:
        if isinstance(prompt, int):  # of its own, so that nothing is found in the cache
            prompt = [100 * (len(self.names) + 1) + i for i in range(prompt)]
        seq = Sequence(prompt, SamplingParams(max_tokens=max_tokens))
        self.names[seq.seq_id] = name
        self.scheduler.add(seq)
        return seq

    def run(self) -> tuple[SchedulerOutput, str]:
        """Call the function that is checked, once: its answer, and the chunks in words."""
        output = self.schedule(self.scheduler)
        if not isinstance(output, SchedulerOutput):
            raise Wrong("return a SchedulerOutput", got=repr(output))
        chunks = [f"{self.names[chunk.seq.seq_id]} {chunk.start}..{chunk.end}" for chunk in output.chunks]
        return output, ", ".join(chunks) or "no chunks"

    def expect(self, expected: str, hint: str) -> None:
        """One whole step, in which these chunks must come."""
        limits = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
        line = [*self.scheduler.running, *self.scheduler.waiting]
        ran = len(self.scheduler.running)
        output, got = self.run()
        num_tokens = sum(chunk.end - chunk.start for chunk in output.chunks)
        if got != expected:
            if num_tokens > limits[0]:
                hint += f"; your chunks have {num_tokens} tokens, the budget is {limits[0]}"
            raise Wrong(f"{hint} ({NOTATION})", expected=expected, got=got)
        if output.num_tokens != num_tokens:
            hint = f"num_tokens is the sum of the chunks' tokens; chunks: {got}"
            raise Wrong(hint, expected=num_tokens, got=output.num_tokens)
        if output.preempted:
            raise Wrong("nobody is preempted here", expected=[], got=output.preempted)
        if limits != (self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs):
            raise Wrong("the scheduler's limits must stay as they are")
        self._check_queues(output, line, ran)
        take(self.scheduler, output)

    def _check_queues(self, output: SchedulerOutput, line: list[Sequence], ran: int) -> None:
        """The line is as it was, only more of it runs now than the first `ran`: those that got their first chunk."""
        served = [chunk.seq for chunk in output.chunks]
        num_running = ran + sum(seq in line[ran:] for seq in served)
        for name, expected, got in (
            ("running", line[:num_running], self.scheduler.running),
            ("waiting", line[num_running:], list(self.scheduler.waiting)),
        ):
            if got != expected:
                hint = (
                    f"{name} after the step: who is admitted leaves waiting at its head and goes to the end of running"
                )
                raise Wrong(hint, expected=self._in_words(expected), got=self._in_words(got))
        for seq in self.scheduler.running:
            status = SequenceStatus.DECODE if seq.num_generated_tokens else SequenceStatus.PREFILL
            if seq.status is not status:
                hint = (
                    f"status of {self.names[seq.seq_id]}: who is admitted gets PREFILL; the rest is update's business"
                )
                raise Wrong(hint, expected=status.name, got=seq.status.name)
        try:
            self.scheduler.check_integrity()
        except AssertionError as error:
            raise Wrong(f"the scheduler's own check_integrity() fails after this step: {error}") from error

    def _in_words(self, seqs: list[Sequence]) -> str:
        return " ".join(self.names[seq.seq_id] for seq in seqs) or "nobody"

    def make_chunk(self, seq: Sequence, num_tokens: int) -> ScheduledChunk:
        """The scheduler's own, after a look at what it is given."""
        name, call = self.names[seq.seq_id], f"make_chunk({self.names[seq.seq_id]}, {num_tokens})"
        num_computed, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        if num_tokens < 1:
            raise Wrong("that is an empty chunk; who gets no token gets no chunk", got=call)
        if end > len(seq.tokens):
            hint = f"{name} has {len(seq.tokens)} tokens, and {num_computed} of them need not be computed any more"
            if seq.num_cached_tokens == num_computed:
                hint += ": allocate_with_prefix found them in the cache"
            raise Wrong(hint, expected=f"at most {len(seq.tokens) - num_computed} tokens", got=call)
        if len(seq.block_table) * self.block_size < end:
            hint = f"{name} lacks blocks for this chunk: append_slots or allocate_with_prefix comes before make_chunk"
            raise Wrong(hint, expected=f"blocks for {end} tokens", got=f"{call} with block_table {seq.block_table}")
        return Scheduler.make_chunk(self.scheduler, seq, num_tokens)


def check_short_prompt(function: Schedule, bench: Bench) -> None:
    """One short prompt in one step, then a token a step"""
    steps = Steps(function, budget=8)
    steps.add("A", 5)
    steps.expect("A 0..5", "a prompt of 5 tokens, budget 8: it fits, so all of it is computed in one step")
    for at in range(5, 10):
        steps.expect(f"A {at}..{at + 1}", "A decodes: its one new token is to be computed")


def check_long_prompt(function: Schedule, bench: Bench) -> None:
    """A prompt longer than the budget, in chunks"""
    steps = Steps(function, budget=8)
    steps.add("A", 20)
    for expected in ("A 0..8", "A 8..16", "A 16..20", "A 20..21"):
        steps.expect(expected, "a prompt of 20 tokens, budget 8: chunks of 8, 8 and 4, then it decodes")


def check_decodes_first(function: Schedule, bench: Bench) -> None:
    """Decodes ride beside the chunk, and come first"""
    steps = Steps(function, budget=8)
    steps.add("A", 3)
    steps.add("B", 2)
    steps.expect("A 0..3, B 0..2", "two prompts of 3 and 2 tokens fit into a budget of 8")
    steps.add("C", 15)
    hint = "A and B decode: they come first and take 2 of the 8 tokens; C's prompt gets the 6 that are left"
    steps.expect("A 3..4, B 2..3, C 0..6", hint)
    steps.expect("A 4..5, B 3..4, C 6..12", hint)
    steps.expect("A 5..6, B 4..5, C 12..15", "C's prompt ends: 3 tokens are left of it")
    steps.expect("A 6..7, B 5..6, C 15..16", "now all three decode")


def check_next_prompt(function: Schedule, bench: Bench) -> None:
    """The next prompt begins in the step in which the one before ends"""
    steps = Steps(function, budget=8)
    for name, num_tokens in (("A", 13), ("B", 9), ("C", 4)):
        steps.add(name, num_tokens)
    steps.expect("A 0..8", "A's prompt takes the whole budget: while it is not over, no other prompt begins")
    steps.expect("A 8..13, B 0..3", "A's prompt goes on first; it ends and leaves 3 of 8 tokens, in which B begins")
    steps.expect("A 13..14, B 3..9, C 0..1", "A decodes, B's last 6 tokens, and one token is left for C to begin with")
    steps.expect("A 14..15, B 9..10, C 1..4", "A and B decode, and C's prompt ends")


def check_small_budget(function: Schedule, bench: Bench) -> None:
    """A budget smaller than the number of running sequences"""
    steps = Steps(function, budget=8)
    for name, num_tokens in (("A", 1), ("B", 1), ("C", 9), ("D", 2)):
        steps.add(name, num_tokens)
    steps.expect("A 0..1, B 0..1, C 0..6", "A and B fit, C's prompt gets the 6 tokens that are left")
    steps.scheduler.max_num_batched_tokens = 2
    steps.expect("A 1..2, B 1..2", "budget 2, and A and B decode: nothing is left for C, which stays where it is")
    steps.scheduler.max_num_batched_tokens = 1
    steps.expect("A 2..3", "budget 1: the oldest decode has it")
    steps.scheduler.max_num_batched_tokens = 6
    hint = "budget 6: B has not had its turn and still has one token to compute; C's last 3 and D's first fill the rest"
    steps.expect("A 3..4, B 2..3, C 6..9, D 0..1", hint)


def check_cached_prefix(function: Schedule, bench: Bench) -> None:
    """A cached prefix shortens the first chunk"""
    steps, prefix = Steps(function, budget=8), list(range(1, 9))
    steps.add("A", prefix)
    steps.expect("A 0..8", "a prompt of 8 tokens, budget 8")
    steps.add("B", [*prefix, 51, 52, 53, 54])
    steps.add("C", 7)
    hint = "B's first 8 tokens are in the cache, so 4 are computed, from position 8 on, and only those 4 cost budget"
    steps.expect("A 8..9, B 8..12, C 0..3", hint)
    steps.add("D", prefix)
    steps.expect("A 9..10, B 12..13, C 3..7, D 7..8", "D is cached but for its last token, which is needed for logits")


def check_seats(function: Schedule, bench: Bench) -> None:
    """At most max_num_seqs sequences run"""
    steps = Steps(function, budget=8, max_num_seqs=2)
    for name, max_tokens in (("A", 2), ("B", 9), ("C", 9)):
        steps.add(name, 3, max_tokens)
    hint = "max_num_seqs is 2: C waits, although there is budget for it"
    steps.expect("A 0..3, B 0..3", hint)
    steps.expect("A 3..4, B 3..4", hint)
    steps.expect("B 4..5, C 0..3", "A has ended, so there is a seat for C")


def check_random_workloads(function: Schedule, bench: Bench) -> None:
    """50 random workloads: each step is the same as ours"""
    for seed in range(50):
        rng = random.Random(seed)
        budget, max_num_seqs = rng.choice((1, 2, 3, 5, 8, 13, 21)), rng.randint(1, 6)
        theirs, ours = Steps(function, budget, max_num_seqs), Steps(OUR_SCHEDULE, budget, max_num_seqs)
        to_come = list("ABCDEFGHIJKL")
        while to_come or ours.scheduler.has_unfinished():
            while to_come and rng.random() < 0.4:
                name, max_tokens = to_come.pop(0), rng.randint(1, 12)
                prompt = [1] * rng.choice((0, 4, 8)) + rng.choices(range(2, 50), k=rng.randint(1, 25))
                for steps in (theirs, ours):
                    steps.add(name, prompt, max_tokens)
            state = ", ".join(
                f"{ours.names[seq.seq_id]} ({seq.num_computed_tokens} of {len(seq.tokens)} tokens computed)"
                for seq in [*ours.scheduler.running, *ours.scheduler.waiting]
            )
            hint = f"budget {budget}, {len(ours.scheduler.running)} of at most {max_num_seqs} run; in line: {state}"
            output, expected = ours.run()
            take(ours.scheduler, output)
            theirs.expect(expected, hint)


def check_tiny_budget_generates(function: Schedule, bench: Bench) -> None:
    """The model gives the same tokens, also in steps of 5"""
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
    Task(
        "pack",
        "One batch for everybody",
        use_pack,
        (check_one_prompt, check_decodes, check_mixed, check_random_steps, check_pack_generates),
    ),
    Task(
        "chunked_prefill",
        "A budget for each step",
        use_chunked_prefill,
        (
            check_short_prompt,
            check_long_prompt,
            check_decodes_first,
            check_next_prompt,
            check_small_budget,
            check_cached_prefix,
            check_seats,
            check_random_workloads,
            check_tiny_budget_generates,
        ),
    ),
    Task(
        "token_budget",
        "A budget for each step",
        use_budget,
        (check_fits, check_decodes_fit, check_waiting, check_cap, check_arrival, check_budget_generates),
    ),
]
