"""Stage: the engine's Scheduler and BlockManager, with something that answers in the model's place (chapters 4 to 7).

A scheduler is told the token ids that each chunk sampled, through update(), and that is all it ever sees of a model. So
labs and checks choose the tokens themselves. The KV tensor is played, too: the stage remembers for each slot which text
its K/V was computed for, and raises Wrong when a sequence attends to a slot of another text.

Actions only, no pictures: this file needs the standard library and nanovllm/core, so that a browser can run it.
"""

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from chapters.expect import Wrong, expect, expect_sane
from chapters.patching import our_engine
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

EOS = 0
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def compute(manager: BlockManager, seq: Sequence) -> None:
    """What the scheduler notes when it has scheduled all of a sequence's tokens."""
    seq.num_computed_tokens = len(seq.tokens)
    manager.register_prefix(seq)


class Step(NamedTuple):
    chunks: list[ScheduledChunk]
    prefilling: set[int]  # seq_ids whose status was PREFILL while the step ran; update() changes it
    preempted: list[Sequence]
    finished: list[Sequence]
    num_tokens: int


class Stage:
    """A scheduler and its pool. Requests are named A, B, C in the order of arrival.

    checking=False leaves out what is checked in every step: integrity and K/V. It is for large pools.
    """

    def __init__(
        self,
        num_blocks: int = 32,
        *,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int | None = None,  # None: as long as the pool
        long_prefill_token_threshold: int = 0,  # 0: none
        checking: bool = True,
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len or num_blocks * block_size,
            eos_token_ids=frozenset([EOS]),
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        self.scheduler.make_chunk = self._make_chunk
        self.checking = checking
        self.seqs: dict[str, Sequence] = {}  # all there ever were, by name
        self.names: dict[int, str] = {}  # seq_id -> name
        self.arrived: dict[int, int] = {}  # seq_id -> number of steps before
        self.ended: dict[int, int] = {}
        self.hogs: list[Sequence] = []
        self.steps: list[Step] = []
        self._planned: dict[int, dict[int, int]] = {}  # seq_id -> number of the generated token -> token
        self._slots: dict[int, Any] = {}  # slot -> what its K/V was computed for

    # -- what one can do ------------------------------------------------------------------------------------------

    def add(
        self, tokens: int | list[int], answer: int | Iterable[int] = (), *, priority: int = 0, **params: Any
    ) -> Sequence:
        """A request: its prompt, or the length of a prompt like nobody else's. The rest goes into SamplingParams.

        answer: the first tokens to sample for it, or how many until EOS. After them come numbers that depend on all
        tokens so far, and are never EOS.
        """
        first = 1000 * (len(self.seqs) + 1)
        prompt = list(range(first, first + tokens)) if isinstance(tokens, int) else tokens
        params.setdefault("max_tokens", None)
        seq = Sequence(prompt, SamplingParams(**params))
        seq.priority = priority
        return self.enter(seq, answer)

    def enter(self, seq: Sequence, answer: int | Iterable[int] = ()) -> Sequence:
        """A request that is a Sequence already."""
        number = len(self.seqs)
        name = LETTERS[number % 26] + (str(number // 26) if number >= 26 else "")
        self.seqs[name], self.names[seq.seq_id] = seq, name
        self.arrived[seq.seq_id] = len(self.steps)
        self._planned[seq.seq_id] = {answer - 1: EOS} if isinstance(answer, int) else dict(enumerate(answer))
        self.queue(seq)
        return seq

    def queue(self, seq: Sequence) -> None:
        self.scheduler.add(seq)

    def step(self) -> Step:
        """One step of an engine: schedule, sample (the stage's part), update."""
        return self.finish(self.schedule())

    def schedule(self) -> SchedulerOutput:
        """The first half of a step. Raises Wrong when the answer makes no sense by itself."""
        output = self.scheduler.schedule()
        if not isinstance(output, SchedulerOutput):
            raise Wrong("a step must answer with a SchedulerOutput", expected="SchedulerOutput", got=repr(output))
        for chunk in output.chunks:
            if chunk.seq not in self.scheduler.running:
                who = f"{self.names[chunk.seq.seq_id]} has a chunk and is not in running"
                raise Wrong(f"{who}; if it was preempted in this step, its blocks are gone", got=self.describe(output))
        return output

    def finish(self, output: SchedulerOutput) -> Step:
        """The second half: tokens are sampled and taken in."""
        num_tokens = sum(chunk.end - chunk.start for chunk in output.chunks)
        expect(num_tokens, output.num_tokens, "num_tokens must be the number of tokens in all chunks")
        if self.checking:
            self.check()
            self._write_and_read(output)
        prefilling = {c.seq.seq_id for c in output.chunks if c.seq.status is SequenceStatus.PREFILL}
        token_ids = [[self.sample(chunk.seq)] if chunk.reaches_end else [] for chunk in output.chunks]
        finished = self.scheduler.update(output, token_ids)
        if self.checking:
            self.check()
        self.steps.append(Step(output.chunks, prefilling, output.preempted, finished, output.num_tokens))
        self.ended.update((seq.seq_id, len(self.steps)) for seq in finished)
        return self.steps[-1]

    def run(self) -> None:
        """Steps until everybody has ended and every block is back in the free queue. Raises Wrong if they don't."""
        while self.has_unfinished():
            expect(True, len(self.steps) < 10_000, "after 10,000 steps the requests have not ended: nobody gets on")
            if not self.step().chunks:
                raise Wrong(
                    "nobody can run any more, although blocks should be free: are blocks lost, because a count never "
                    "comes back to 0 or a block does not go back to the queue?",
                    expected="a free block for the oldest sequence",
                    got=f"free queue {list(self.manager.free_blocks)}",
                )
        num_left = len(self.manager.blocks) - sum(len(hog.block_table) for hog in self.hogs)
        expect(num_left, len(self.manager.free_blocks), "all have ended: their blocks must be in the free queue")

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def abort(self, seq: Sequence) -> None:
        self.scheduler.abort(seq.seq_id)
        self.ended.setdefault(seq.seq_id, len(self.steps))

    def take_blocks(self, num_blocks: int) -> None:
        """A hog: a Sequence that holds real blocks of the pool and never runs. ValueError when it may not have them."""
        num_left = len(self.manager.blocks) - sum(len(hog.block_table) for hog in self.hogs) - num_blocks
        if num_left < self.manager.num_blocks_for(self.scheduler.max_model_len):
            raise ValueError(f"Refused: one sequence of max_model_len={self.scheduler.max_model_len} must always fit.")
        hog = Sequence([EOS])
        if not self.manager.append_slots(hog, num_blocks * self.manager.block_size):
            raise ValueError(f"{num_blocks} blocks are not free now, and a hog cannot preempt. Step, then try again.")
        self.names[hog.seq_id] = "hog"
        self.hogs.append(hog)

    def give_blocks(self) -> None:
        for hog in self.hogs:
            self.manager.free(hog)
        self.hogs = []

    def check(self) -> None:
        """The engine's own checks. The scheduler's counts references, and does not know hogs."""
        expect_sane(self.manager if self.hogs else self.scheduler, "in the real scheduler ")

    def sample(self, seq: Sequence) -> int:
        """The token that stands in for the model's."""
        return self._planned[seq.seq_id].get(seq.num_generated_tokens, 1 + sum(seq.tokens) % 1000)

    # -- in words -------------------------------------------------------------------------------------------------

    def list_names(self, seqs: Iterable[Sequence]) -> str:
        return " ".join(self.names[seq.seq_id] for seq in seqs) or "nobody"

    def describe(self, step: SchedulerOutput | Step) -> str:
        """A 3..5 is positions 3 and 4 of A."""
        chunks = [f"{self.names[c.seq.seq_id]} {c.start}..{c.end}" for c in step.chunks]
        preempted = f"; preempted: {self.list_names(step.preempted)}" if step.preempted else ""
        return (", ".join(chunks) or "no chunks") + preempted

    def describe_queues(self) -> str:
        running, waiting = self.list_names(self.scheduler.running), self.list_names(self.scheduler.waiting)
        return f"running: {running}; waiting: {waiting}"

    def expect_step(self, expected: str, hint: str) -> Step:
        """One step, in which these chunks must come."""
        output = self.schedule()
        expect(expected, self.describe(output), hint)
        return self.finish(output)

    # -- watching -------------------------------------------------------------------------------------------------

    def _make_chunk(self, seq: Sequence, num_tokens: int) -> ScheduledChunk:
        """The scheduler's own, after a look at what it is given."""
        name, end = self.names[seq.seq_id], seq.num_computed_tokens + num_tokens
        if num_tokens < 1:
            call = f"make_chunk({name}, {num_tokens})"
            raise Wrong(f"{name} got an empty chunk: stop when the budget is spent", got=call)
        if end > len(seq.tokens):
            hint = f"{name} gets more tokens than it has left: what is found in the cache is computed already"
            left = len(seq.tokens) - seq.num_computed_tokens
            raise Wrong(hint, expected=f"at most {left}, len(seq.tokens) - seq.num_computed_tokens", got=num_tokens)
        if len(seq.block_table) * self.manager.block_size < end:
            hint = f"{name} gets a chunk without having the blocks for it; whoever was preempted in this step has none"
            raise Wrong(hint, expected=f"blocks for {end} tokens", got=f"block_table {seq.block_table}")
        return Scheduler.make_chunk(self.scheduler, seq, num_tokens)

    def _write_and_read(self, output: SchedulerOutput) -> None:
        """As in a model: first all chunks write their K/V, then each attends to all positions up to its end."""

        def depends_on(seq: Sequence, i: int) -> Any:
            return seq.tokens[: i + 1], seq.cache_salt, seq.lora_id, [span for span in seq.mm_spans if span.start <= i]

        size = self.manager.block_size
        places = [(c, i, c.seq.block_table[i // size] * size + i % size) for c in output.chunks for i in range(c.end)]
        for chunk, i, slot in places:
            if i >= chunk.write_start:
                self._slots[slot] = depends_on(chunk.seq, i)
        for chunk, i, slot in places:
            if self._slots.get(slot) != depends_on(chunk.seq, i):
                raise Wrong(
                    f"{self.names[chunk.seq.seq_id]} finds the K/V of other tokens in slot {slot} (block "
                    f"{slot // size}), where its position {i} should be: was a block taken that somebody holds, or did "
                    "a block keep its hash when it was taken?"
                )


def compare_with_ours(theirs: Stage, ours: Stage, seed: int, num_requests: int = 10, num_priorities: int = 1) -> None:
    """Random requests, beginnings alike and twins among them, on two stages with the same limits.

    Each step of `theirs`, with what is being checked, must be what the same step of `ours` is with our engine.
    """
    rng, scheduler = random.Random(seed), theirs.scheduler
    limits = f"max_num_seqs={scheduler.max_num_seqs}, max_num_batched_tokens={scheduler.max_num_batched_tokens}"
    workload = f"workload {seed} ({len(theirs.manager.blocks)} blocks, {limits})"
    to_come, prompt = num_requests, [1, 2, 3, 4]
    while to_come or ours.has_unfinished():
        while to_come and rng.random() < 0.5:
            to_come -= 1
            if rng.random() < 0.7:  # otherwise a twin of the one before
                own = rng.choices(range(2, 50), k=rng.randint(1, scheduler.max_model_len - 12))
                prompt = [1] * rng.choice([0, 0, 4, 8]) + own
            answer = rng.randint(1, 12) if rng.random() < 0.5 else ()
            params: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "ignore_eos": rng.random() < 0.3}
            if num_priorities > 1:
                params["priority"] = rng.randrange(num_priorities)
            for stage in (theirs, ours):
                stage.add(prompt, answer, **params)
        unfinished = [name for name, seq in ours.seqs.items() if seq.status is not SequenceStatus.FINISHED]
        if unfinished and rng.random() < 0.03:
            name = rng.choice(unfinished)
            for stage in (theirs, ours):
                stage.abort(stage.seqs[name])
        where = f"{workload}, step {len(ours.steps)}, before it {ours.describe_queues()}"
        with our_engine():
            expected = ours.step()
        try:
            got = theirs.expect_step(ours.describe(expected), "another step than ours")
        except Wrong as wrong:
            raise Wrong(f"{wrong.hint}; {where}", expected=wrong.expected, got=wrong.got) from None
        ended = ours.list_names(expected.finished), theirs.list_names(got.finished)
        expect(*ended, f"others ended than with ours; {where}")
        expect(ours.describe_queues(), theirs.describe_queues(), f"after the step the queues differ; {where}")
    for name, seq in ours.seqs.items():
        expect(seq.tokens, theirs.seqs[name].tokens, f"{name} has different tokens; {workload}")
