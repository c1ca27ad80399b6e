"""Scheduler: which tokens of which sequences are computed in the next step (chapters 5 and 6).

There is no prefill step and no decode step. Each sequence has tokens and a count of those computed; a step gives
it some more, within a budget of tokens, and when the count reaches the end the step samples one. A whole prompt, a
chunk of one, the tail after a prefix hit, a sequence resumed after preemption and an ordinary decode differ in numbers
only (chunked prefill: Sarathi-Serve, arXiv:2403.02310; continuous batching: Orca, OSDI 2022).

Invariants:
- a sequence in `waiting` holds no blocks and has computed nothing;
- both queues are in order of priority (the lowest number first); who has the same waits in order of arrival and runs in
  order of admission. Without priorities all have 0;
- at most one running sequence is mid-prompt, the last of its priority: admission stops as soon as the budget cuts a
  prompt. Those with more than long_prefill_token_threshold tokens to compute are cut before that, in any number;
- `seqs` holds the sequences of both, and nothing else: after a failure the queues are built anew from it;
- the pool can hold one sequence of max_model_len tokens, so the first running sequence always makes progress.
"""

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from nanovllm.core import integrity
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.features.speculation.choose import Speculation

by_priority = attrgetter("priority")


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Positions [start, end) of one sequence, to be computed in this step.

        tokens of the sequence   [ computed before | known, computed now | guesses ]
        positions                0                 start         known_end         end
        K/V is written                             write_start ............. to end
        rows with logits                                         [x        x       x]

    write_start   exceeds start only for the last token of a fully cached prompt: its K/V is in a shared block already,
                  and the row is computed for its logits
    guesses       tokens that may come after the known ones (features/speculation); mostly none
    reaches_end   known_end is the end of the known tokens. So the row before it gives the next token, and the row of
                  each guess the token after that guess. False for a chunk that ends inside a prompt.
    """

    seq: Sequence
    start: int
    end: int
    write_start: int
    guesses: list[int] = field(default_factory=list)
    reaches_end: bool = field(init=False)

    def __post_init__(self) -> None:
        # Computed once: the chunk is asked again after update(), which has made seq.tokens longer.
        object.__setattr__(self, "reaches_end", self.known_end == len(self.seq.tokens))

    @classmethod
    def advance(cls, seq: Sequence, num_tokens: int, block_manager: BlockManager) -> "ScheduledChunk":
        """Let the next num_tokens tokens of a sequence, which has blocks for them, count as computed. Their chunk."""
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        seq.num_computed_tokens = end
        if seq.state is not None:
            seq.state.advance(end)
        return cls(seq, start, end, write_start=end if block_manager.is_cached(seq, start) else start)

    @property
    def known_end(self) -> int:
        return self.end - len(self.guesses)

    @property
    def token_ids(self) -> list[int]:
        return self.seq.tokens[self.start : self.known_end] + self.guesses

    @property
    def num_logits(self) -> int:
        """Rows, the chunk's last ones, whose logits are needed."""
        return self.reaches_end + len(self.guesses)

    def sampled_seqs(self) -> list[Sequence]:
        """What each of those rows samples for: the sequence, then copies of it, each with one guess more."""
        seqs = [self.seq] * self.reaches_end
        for n in range(1, self.num_logits):
            seqs.append(copy(self.seq))
            seqs[n].tokens = self.seq.tokens + self.guesses[:n]
        return seqs


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work: all that the data plane is told."""

    chunks: list[ScheduledChunk]
    preempted: list[Sequence]
    num_tokens: int


class Scheduler:
    """Decides each step's chunks and keeps the sequences' states.

    max_num_seqs            sequences that may run at a time
    max_num_batched_tokens  tokens computed in one step, over all sequences
    max_model_len           tokens of one sequence, prompt and output together
    eos_token_ids           end a sequence unless it ignores EOS
    long_prefill_token_threshold    tokens of one prompt in a step, so that shorter ones get in beside it; 0: no limit
    speculation             guesses tokens, or None
    may_run                 may this sequence run beside those that do? (features/lora: adapters take memory)
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        long_prefill_token_threshold: int = 0,
        speculation: "Speculation | None" = None,
        may_run: Callable[[Sequence, list[Sequence]], bool] = lambda seq, running: True,
    ) -> None:
        needed, found = block_manager.num_blocks_for(max_model_len), len(block_manager.blocks)
        if needed > found:
            blocks = f"{needed} blocks of {block_manager.block_size}, and the pool has {found}"
            what = f"one sequence of max_model_len={max_model_len} tokens needs {blocks}"
            raise ValueError(f"{what}; enlarge the pool or lower max_model_len")
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.long_prefill_token_threshold = long_prefill_token_threshold or max_model_len
        self.speculation, self.may_run = speculation, may_run
        self.seqs: dict[int, Sequence] = {}  # all that were added and have not ended, in the order of arrival
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    # -- the queue ------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Put a sequence in the queue, behind all of its priority. ValueError when no step could ever sample for it."""
        if not 0 < len(seq.tokens) < self.max_model_len + seq.pools:
            bounds = f"1 to {self.max_model_len - 1} tokens (max_model_len={self.max_model_len}, prompt and output)"
            raise ValueError(f"a prompt must have {bounds}, found {len(seq.tokens)}")
        self.seqs[seq.seq_id] = seq
        insort_right(self.waiting, seq, key=by_priority)

    def abort(self, *seq_ids: int) -> None:
        """Drop sequences, waiting or running, in one pass. Ids that are unknown or have finished are ignored."""
        dropped = [self.seqs.pop(seq_id) for seq_id in seq_ids if seq_id in self.seqs]
        if not dropped:
            return
        for seq in dropped:
            seq.status, seq.finish_reason = SequenceStatus.FINISHED, "abort"
        self.running = [seq for seq in self.running if seq.status is not SequenceStatus.FINISHED]
        self.waiting = deque(seq for seq in self.waiting if seq.status is not SequenceStatus.FINISHED)
        for seq in dropped:
            self.block_manager.free(seq)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a running sequence and free its blocks. If update() has ended it already, only the reason changes."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.status is not SequenceStatus.FINISHED:
            seq.status = SequenceStatus.FINISHED
            self.running.remove(seq)
            self.block_manager.free(seq)
            del self.seqs[seq.seq_id]

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's chunks: running sequences first, in their order, then admissions."""
        chunks: list[ScheduledChunk] = []
        preempted: list[Sequence] = []
        budget = self.max_num_batched_tokens

        while len(chunks) < len(self.running) and budget > 0:
            seq = self.running[len(chunks)]
            num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, self.long_prefill_token_threshold, budget)
            if not self.block_manager.append_slots(seq, num_tokens):
                # The last of running may lose its blocks: it has no chunk yet, as chunks are made in this order.
                preempted.append(self.preempt_last())
                continue
            chunks.append(self.make_chunk(seq, num_tokens))
            budget -= num_tokens

        # A step that preempted admits nobody: the preempted sequence comes next, and wants that room.
        ready = (seq for seq in ([] if preempted else [*self.waiting]) if not seq.awaits_blocks)
        while budget > 0 and len(self.running) < self.max_num_seqs and (new := next(ready, None)) is not None:
            if not self.may_run(new, self.running) or not self.block_manager.allocate_with_prefix(new):
                break
            self.waiting.remove(new)
            insort_right(self.running, new, key=by_priority)
            new.status = SequenceStatus.PREFILL
            num_tokens = min(len(new.tokens) - new.num_computed_tokens, self.long_prefill_token_threshold, budget)
            chunks.append(self.make_chunk(new, num_tokens))
            budget -= num_tokens

        if self.speculation is not None:
            chunks = self.speculation.add_guesses(self, chunks, budget)
        return SchedulerOutput(chunks, preempted, sum(chunk.end - chunk.start for chunk in chunks))

    def update(self, output: SchedulerOutput, token_ids: list[int]) -> list[Sequence]:
        """Append the sampled tokens. Returns the sequences that ended.

        token_ids: num_logits for each chunk, in order: none for a chunk inside a prompt, otherwise 1 and its guesses;
        none at all if the model pools.
        """
        finished = []
        sampling = [chunk for chunk in output.chunks if chunk.reaches_end and not chunk.seq.pools]
        assert len(token_ids) == sum(chunk.num_logits for chunk in sampling), "a token for each row"
        rows = iter(token_ids)
        for chunk in sampling:
            if self.accept_tokens(chunk, list(islice(rows, chunk.num_logits))):
                finished.append(chunk.seq)
        for chunk in output.chunks:
            if chunk.reaches_end and chunk.seq.pools:
                self.finish(chunk.seq, "stop")
                finished.append(chunk.seq)
        if self.speculation is not None:
            self.speculation.learn_from(output)
        self.block_manager.step_done()
        return finished

    def roll_back(self, output: SchedulerOutput | None) -> None:
        """Undo a step that an exception has ended, in whatever line: all sequences wait, with the tokens from before.

        output: what schedule() returned; None if it did not. Both queues may be half changed, so they are built anew
        from `seqs`, and the block manager forgets everything.
        """
        for chunk in output.chunks if output is not None else ():
            self.seqs[chunk.seq.seq_id] = chunk.seq  # update() may have ended it
            if chunk.reaches_end:
                chunk.seq.cut(chunk.known_end, self.block_manager.block_size)
        self.block_manager.clear()
        self.running, self.waiting = [], deque(sorted(self.seqs.values(), key=by_priority))
        for seq in self.waiting:
            seq.reset()

    def check_integrity(self) -> None:
        """Raise an AssertionError that names the broken invariant; checks the block manager too."""
        integrity.check_scheduler(self)

    # -- helpers --------------------------------------------------------------------------------------------------

    def make_chunk(self, seq: Sequence, num_tokens: int) -> ScheduledChunk:
        """Give a running sequence its next num_tokens tokens, and register the blocks that they fill.

        Registered *before* they are computed, so that a sequence admitted later in the same step shares them. It reads
        nothing that is not there: in every layer all K/V of the step is written before any attention reads.

            schedule:  A gets tokens 0..31, registers blocks 0 and 1     B finds 0 and 1, gets tokens 32..39
            layer 1:   write K/V of A 0..31 and B 32..39   then   attention of A and B        layer 2: the same ...
        """
        chunk = ScheduledChunk.advance(seq, num_tokens, self.block_manager)
        self.block_manager.register_prefix(seq)
        return chunk

    def accept_tokens(self, chunk: ScheduledChunk, token_ids: list[int]) -> bool:
        """Append the sampled tokens, up to the first that differs from its guess. True if the sequence has ended.

        token_ids: what each row with logits sampled. A guess is accepted if it is the token sampled in its place; the
        token after the last accepted guess is appended, too, and those after it were computed for nothing.
        """
        seq = chunk.seq
        seq.status = SequenceStatus.DECODE
        for token_id, guess in zip(token_ids, [*chunk.guesses, None], strict=True):
            if token_id != NO_TOKEN:
                seq.append(token_id)
            reason, stop_reason = self.finish_reason_of(seq, token_id)
            if reason is not None or token_id != guess:
                break
        if chunk.guesses:  # the K/V of the accepted ones was computed in this step, and may fill a block
            seq.num_computed_tokens = len(seq.tokens) - 1
            self.block_manager.register_prefix(seq)
        if reason is not None:
            self.finish(seq, reason, stop_reason)
        return reason is not None

    def preempt_last(self) -> Sequence:
        """Of the least important running sequences the youngest. It waits before all of its priority, who came later.

        Its blocks stay cached; admitted again, it starts from what is still cached of them.
        """
        seq = self.running.pop()
        self.block_manager.free(seq)
        seq.reset()
        insort_left(self.waiting, seq, key=by_priority)
        self.num_preemptions += 1
        return seq

    def finish_reason_of(self, seq: Sequence, token_id: int) -> tuple[str | None, int | None]:
        params = seq.sampling_params
        if token_id == NO_TOKEN:
            return "error", None
        if seq.num_generated_tokens > params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        if seq.grammar is not None and seq.grammar.is_complete(seq.generated_token_ids):
            return "error" if seq.grammar.error else "stop", None
        if self.num_tokens_left(seq) <= 0:
            return "length", None
        return None, None

    def num_tokens_left(self, seq: Sequence) -> int:
        """How many tokens it may still generate."""
        left, limit = self.max_model_len - len(seq.tokens), seq.sampling_params.max_tokens
        return left if limit is None else min(left, limit - seq.num_generated_tokens)
