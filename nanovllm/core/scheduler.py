"""Scheduler: which tokens of which sequences are computed in the next step (chapters 5 and 6).

There is no prefill step and no decode step. Each sequence has tokens and a count of those that are computed. A step
computes some more of them, within a budget of tokens, and when the count reaches the end it samples the next token. A
whole prompt, a chunk of one, the tail after a prefix hit, a sequence resumed after preemption and an ordinary decode
differ in numbers only (chunked prefill: Sarathi-Serve, arXiv:2403.02310; continuous batching: Orca, OSDI 2022).

Invariants:
- a sequence in `waiting` holds no blocks and has computed nothing;
- both queues are sorted by priority, the lowest number first. Within one priority, `waiting` has preempted sequences
  first, then the others in order of arrival; `running` is in order of admission. Without priorities every number is 0;
- admission stops when the budget cuts a prompt, so at most one running sequence is mid-prompt for that reason, and it
  is the last of its priority. long_prefill_token_threshold may cut any number of others;
- the pool can hold one sequence of max_model_len tokens, so the first running sequence always makes progress.
"""

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

from nanovllm.core import integrity
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus

Row = TypeVar("Row")

by_priority = attrgetter("priority")


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Positions [start, end) of one sequence, to be computed in this step.

        tokens of the sequence   [ computed before | known, computed now | draft tokens ]
        positions                0                 start         known_end            end
        K/V is written                             write_start ................ to end
        rows with logits                                         [x        x          x]

    write_start      the first position whose K/V is written. Usually it is start. It is end for the last token of a
                     fully cached prompt: its K/V is in a shared block already, and only its logits are wanted
    draft_token_ids  tokens that may follow the known ones (features/speculation); mostly none
    reaches_end      known_end is len(seq.tokens), before update() appends. So the row before it gives the next token,
                     and the row of each draft token the token after that. False for a chunk that ends inside a prompt.
    is_prefill       the sequence has not sampled since its admission
    """

    seq: Sequence
    start: int
    end: int
    write_start: int
    draft_token_ids: list[int] = field(default_factory=list)
    reaches_end: bool = field(init=False)
    is_prefill: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Computed now: update() appends to seq.tokens and changes seq.status.
        object.__setattr__(self, "reaches_end", self.known_end == len(self.seq.tokens))
        object.__setattr__(self, "is_prefill", self.seq.status is SequenceStatus.PREFILL)

    @property
    def known_end(self) -> int:
        return self.end - len(self.draft_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.seq.tokens[self.start : self.known_end] + self.draft_token_ids

    @property
    def num_logits(self) -> int:
        """Rows, the chunk's last ones, whose logits are needed."""
        return 1 + len(self.draft_token_ids) if self.reaches_end else 0

    def sampled_seqs(self) -> list[Sequence]:
        """One sequence for each row with logits: seq itself, then for each draft token a copy that ends with it.

        The sampler may only read the copies, for they share everything except their tokens with seq.
        """
        seqs = [self.seq] if self.reaches_end else []
        for n in range(1, self.num_logits):
            seqs.append(copy(self.seq))
            seqs[n].tokens = self.seq.tokens + self.draft_token_ids[:n]
        return seqs


def next_chunk(seq: Sequence, num_tokens: int, block_manager: BlockManager) -> ScheduledChunk:
    """Advance a sequence by its next num_tokens tokens, which have blocks. They count as computed from here on."""
    start = seq.num_computed_tokens
    end = start + num_tokens
    is_cached = block_manager.is_cached(seq, start)  # only the last token of a fully cached prompt
    chunk = ScheduledChunk(seq, start, end, write_start=end if is_cached else start)
    seq.num_computed_tokens = end
    for part in seq.parts.values():
        part.advance(end)
    return chunk


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. Its chunks refer to the scheduler's own sequences, so it is packed before update() changes them.

    preempted    sequences that lost their blocks in this step
    num_tokens   rows of all chunks, draft tokens included (vLLM: total_num_scheduled_tokens)
    """

    chunks: list[ScheduledChunk]
    preempted: list[Sequence]
    num_tokens: int

    def per_chunk(self, rows: list[Row]) -> list[list[Row]]:
        """Split a flat list, which has an entry for each row with logits, into one list for each chunk: for update().

        It is for code that stands in for a model runner. ModelRunner uses SamplingBatch.per_chunk.
        """
        return split_rows(rows, [chunk.num_logits for chunk in self.chunks])


def split_rows(rows: list[Row], counts: list[int]) -> list[list[Row]]:
    """Split a flat list into consecutive lists of these lengths. A rank without logits has none: it gets empty ones."""
    ends = accumulate(counts)
    return [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]


class Scheduler:
    """Decides each step's chunks and keeps the sequences' states.

    max_num_seqs            sequences that may run at a time
    max_num_batched_tokens  tokens computed in one step, over all sequences
    max_model_len           tokens of one sequence, prompt and output together
    eos_token_ids           end a sequence unless it ignores EOS
    long_prefill_token_threshold    tokens of one prompt in a step, so that shorter ones get in beside it; 0: no limit
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
        may_run: Callable[[Sequence, list[Sequence]], bool] | None = None,
    ) -> None:
        num_needed = block_manager.num_blocks_for(max_model_len)
        if num_needed > len(block_manager.blocks):
            raise ValueError(
                f"one sequence of max_model_len={max_model_len} tokens needs {num_needed} blocks of "
                f"{block_manager.block_size}, and the pool has {len(block_manager.blocks)}; "
                "enlarge the pool or lower max_model_len"
            )
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.long_prefill_token_threshold = long_prefill_token_threshold or max_model_len
        self.may_run = may_run or (lambda seq, running: True)
        self.seqs: dict[int, Sequence] = {}  # seq_id -> every sequence that was added and has not ended
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.only: frozenset[int] | None = None  # seq_ids of those that may be admitted; None: all (see isolate)
        # Those of `waiting` that may be admitted in this step, where core/tiers says so; None: all.
        self.candidates: list[Sequence] | None = None

    # -- the queue ------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind the others of its priority. Raises ValueError if it is empty or too long."""
        generates = not seq.is_pooling and seq.sampling_params.generates
        longest = self.max_model_len - 1 if generates else self.max_model_len  # one place is for the first token
        if not 1 <= len(seq.tokens) <= longest:
            bounds = f"1 to {longest} tokens (max_model_len={self.max_model_len}, prompt and output)"
            raise ValueError(f"a prompt must have {bounds}, found {len(seq.tokens)}")
        self.seqs[seq.seq_id] = seq
        insort_right(self.waiting, seq, key=by_priority)

    def abort(self, *seq_ids: int) -> None:
        """Drop sequences, waiting or running, in one pass. Ids that are unknown or have finished are ignored."""
        dropped = [self.seqs.pop(seq_id) for seq_id in seq_ids if seq_id in self.seqs]
        if not dropped:
            return
        for seq in dropped:
            seq.status = SequenceStatus.FINISHED
            seq.finish_reason = "abort"
        self.running = [seq for seq in self.running if seq.status is not SequenceStatus.FINISHED]
        self.waiting = deque(seq for seq in self.waiting if seq.status is not SequenceStatus.FINISHED)
        for seq in dropped:
            self.block_manager.free(seq)

    def restart(self, seqs: Iterable[Sequence]) -> None:
        """Empty the pool and queue these sequences again. Within a priority they keep the order given.

        It follows a failed step: the queues, the pool and the sequences' blocks may be in any state.
        """
        self.block_manager.clear()
        self.seqs = {seq.seq_id: seq for seq in seqs}
        for seq in self.seqs.values():
            seq.reset()
        self.running = []
        self.waiting = deque(sorted(self.seqs.values(), key=by_priority))

    def isolate(self, seq_ids: Iterable[int] | None) -> None:
        """Preempt everybody, and admit only these sequences from now on; the others wait. None: admit all again."""
        self.only = None if seq_ids is None else frozenset(seq_ids)
        while self.running and self.only is not None:
            self.preempt_last()

    def may_start(self, seq: Sequence) -> bool:
        """False for a sequence that lets others pass (its blocks are on their way, or others are isolated), and for a
        candidate that was admitted earlier in this step and so no longer waits.
        """
        return seq.status is SequenceStatus.WAITING and not seq.awaits_blocks and self.may_be_admitted(seq)

    def may_be_admitted(self, seq: Sequence) -> bool:
        """False while others are isolated."""
        return self.only is None or seq.seq_id in self.only

    def next_waiting(self) -> Sequence | None:
        """The first waiting sequence that may start; None if there is none, or all of them let others pass."""
        candidates = self.waiting if self.candidates is None else self.candidates
        return next(filter(self.may_start, candidates), None)

    def can_admit(self) -> bool:
        """Could the first sequence that may start be admitted now, if the token budget allowed it?

        Speculation asks this: beside a prompt, draft tokens gain little.
        """
        if len(self.running) == self.max_num_seqs:
            return False
        seq = self.next_waiting()
        return seq is not None and self.may_run(seq, self.running) and self.block_manager.can_allocate(seq)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step -------------------------------------------------------------------------------------------------

    def schedule(self, drafts: Mapping[int, list[int]] = {}) -> SchedulerOutput:
        """Choose the next step's chunks: running sequences first, in their order, then admissions.

        drafts: {seq_id: draft tokens of a running sequence}. They share the budget that all other tokens leave.
        """
        chunks: list[ScheduledChunk] = []
        preempted: list[Sequence] = []
        budget = self.max_num_batched_tokens

        for seq in tuple(self.running):
            if budget == 0:
                break
            if seq in preempted:  # an earlier sequence took its blocks, and those of all after it
                break
            num_tokens = self.num_new_tokens(seq, budget)
            if not self.make_room(seq, num_tokens, preempted):
                break
            chunks.append(self.make_chunk(seq, num_tokens))
            budget -= num_tokens

        # After a preemption nobody is admitted: the preempted sequence comes next, and what is free is for it.
        while not preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            first = self.next_waiting()
            if first is None or not self.admit(first):  # nobody passes a sequence that lacks blocks or an adapter
                break
            num_tokens = self.num_new_tokens(first, budget)
            chunks.append(self.make_chunk(first, num_tokens))
            budget -= num_tokens

        if drafts:
            budget = self.add_drafts(chunks, drafts, budget)
        return SchedulerOutput(chunks, preempted, num_tokens=self.max_num_batched_tokens - budget)

    def update(self, output: SchedulerOutput, sampled_token_ids: list[list[int]]) -> list[Sequence]:
        """Append a step's sampled tokens to their sequences. Returns the sequences that have ended.

        sampled_token_ids: for each chunk, a token for each row with logits; a chunk that ends inside a prompt has none.
        No sequence may be aborted between schedule() and update(): the engine aborts it after the step.
        """
        finished = []
        for chunk, token_ids in zip(output.chunks, sampled_token_ids, strict=True):
            if not chunk.reaches_end:
                continue
            if chunk.seq.is_pooling:
                self.finish(chunk.seq, "stop", None)
            elif not chunk.seq.sampling_params.generates:
                self.finish(chunk.seq, "error" if token_ids[0] == NO_TOKEN else "length", None)
            else:
                self.accept_tokens(chunk, token_ids)
            if chunk.seq.status is SequenceStatus.FINISHED:
                finished.append(chunk.seq)
        self.block_manager.step_done()
        return finished

    def check_integrity(self) -> None:
        """Raise an AssertionError that names the broken invariant; checks the block manager too."""
        integrity.check_scheduler(self)

    # -- schedule(), in parts -------------------------------------------------------------------------------------

    def num_new_tokens(self, seq: Sequence, budget: int) -> int:
        """How many of a sequence's tokens this step computes."""
        return min(len(seq.tokens) - seq.num_computed_tokens, self.long_prefill_token_threshold, budget)

    def make_room(self, seq: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Get a running sequence slots for its next tokens. False if it had to be preempted itself.

        While there is no block, the last of `running` loses its own and is appended to `preempted`. Chunks are made
        front to back and victims taken from the back, so a victim never has a chunk in this step.
        """
        while not self.block_manager.append_slots(seq, num_tokens):
            preempted.append(self.preempt_last())
            if preempted[-1] is seq:
                return False
        return True

    def admit(self, seq: Sequence) -> bool:
        """Move a sequence from waiting to running, with blocks for all its tokens. False if it has to wait."""
        if not self.may_run(seq, self.running):
            return False
        if not self.block_manager.allocate_with_prefix(seq):
            return False
        self.waiting.remove(seq)
        insort_right(self.running, seq, key=by_priority)
        seq.status = SequenceStatus.PREFILL
        return True

    def make_chunk(self, seq: Sequence, num_tokens: int) -> ScheduledChunk:
        """Give a running sequence its next num_tokens tokens, and register the blocks that they fill.

        Blocks are registered *before* they are computed, so that a sequence admitted later in the same step shares
        them. It never reads K/V that is missing: every layer writes all K/V of the step before any attention reads.

            schedule:  A gets tokens 0..31, registers blocks 0 and 1     B finds 0 and 1, gets tokens 32..39
            layer 1:   write K/V of A 0..31 and B 32..39   then   attention of A and B        layer 2: the same ...
        """
        chunk = next_chunk(seq, num_tokens, self.block_manager)
        self.block_manager.register_prefix(seq)
        return chunk

    def add_drafts(self, chunks: list[ScheduledChunk], drafts: Mapping[int, list[int]], budget: int) -> int:
        """Replace chunks by longer ones with draft tokens, where there are slots. Returns the budget that is left."""
        for i, chunk in enumerate(chunks):
            draft = drafts.get(chunk.seq.seq_id)
            if draft and chunk.reaches_end:
                num_wanted = min(budget, self.num_tokens_left(chunk.seq) - 1)
                draft = draft[: max(num_wanted, 0)]  # a sequence that is only scored has no token left
                draft = draft[: self.num_draft_slots(chunk.seq, len(draft))]
                # make_chunk has moved num_computed_tokens to the end of the known tokens; these slots follow it.
                has_slots = self.block_manager.append_slots(chunk.seq, len(draft))
                assert has_slots, "num_draft_slots has counted them"
                chunks[i] = replace(chunk, end=chunk.end + len(draft), draft_token_ids=draft)
                budget -= len(draft)
        return budget

    def num_draft_slots(self, seq: Sequence, num_tokens: int) -> int:
        """How many of num_tokens draft tokens get a slot. They may always use what is left of the last block.

        They get fresh blocks only if no sequence waits and each running one could still have another block after that.
        """
        manager = self.block_manager
        num_slots_left = len(seq.block_table) * manager.block_size - seq.num_computed_tokens
        if num_tokens <= num_slots_left:
            return num_tokens
        if self.waiting:
            return num_slots_left
        num_fresh_blocks = manager.num_blocks_for(num_tokens - num_slots_left)
        num_spare_blocks = len(manager.free_blocks) - len(self.running)
        return num_tokens if num_fresh_blocks <= num_spare_blocks else num_slots_left

    def preempt_last(self) -> Sequence:
        """Preempt the last running sequence, the one that was admitted last among the least important. Returns it.

        It waits before all others of its priority, for it was admitted before them. Its blocks stay cached until
        they are taken. When it is admitted again, it starts from what is left of them.
        """
        seq = self.running.pop()
        self.block_manager.free(seq)
        seq.reset()
        insort_left(self.waiting, seq, key=by_priority)
        self.num_preemptions += 1
        return seq

    # -- update(), in parts ---------------------------------------------------------------------------------------

    def accept_tokens(self, chunk: ScheduledChunk, token_ids: list[int]) -> None:
        """Append the sampled tokens, up to the first that differs from its draft token or ends the sequence.

        token_ids: what each row with logits sampled. A draft token is accepted if it is the token sampled in its place.
        The token sampled after the last accepted one is appended, too. The rest were computed for nothing.
        """
        seq = chunk.seq
        seq.status = SequenceStatus.DECODE
        drafts = [*chunk.draft_token_ids, None]  # the last row's token has no draft token to be compared with
        for token_id, draft_token_id in zip(token_ids, drafts, strict=True):
            if token_id != NO_TOKEN:
                seq.append(token_id)
            reason, stop_reason = self.check_stop(seq, token_id)
            if reason is not None or token_id != draft_token_id:
                break
        if chunk.draft_token_ids:  # the K/V of the accepted ones was computed in this step, and may fill a block
            seq.num_computed_tokens = len(seq.tokens) - 1
            self.block_manager.register_prefix(seq)
        if reason is not None:
            self.finish(seq, reason, stop_reason)

    def check_stop(self, seq: Sequence, token_id: int) -> tuple[str | None, int | str | None]:
        """Returns (finish_reason, stop_reason) after token_id; (None, None) if the sequence goes on.

        Call it once for each new token: the stop checker and the sequence's parts, such as a grammar, take the token
        in, unless it is the EOS or stop token that ends the sequence.
        """
        params = seq.sampling_params
        if token_id == NO_TOKEN:
            return "error", None
        if seq.num_generated_tokens > params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        if seq.stop_checker is not None:
            stop_string = seq.stop_checker.append([token_id])
            if stop_string is not None:
                return "stop", stop_string
        for part in seq.parts.values():
            if (reason := part.check_stop(seq)) is not None:
                return reason, None
        if self.num_tokens_left(seq) <= 0:
            return "length", None
        return None, None

    def num_tokens_left(self, seq: Sequence) -> int:
        """How many tokens it may still generate."""
        left = self.max_model_len - len(seq.tokens)
        if seq.sampling_params.max_tokens is None:
            return left
        return min(left, seq.sampling_params.max_tokens - seq.num_generated_tokens)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None) -> None:
        """End a running sequence and free its blocks."""
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        is_eos = seq.num_generated_tokens > 0 and stop_reason is None and seq.tokens[-1] in self.eos_token_ids
        seq.ended_by_token = reason == "stop" and (is_eos or isinstance(stop_reason, int))
        self.running.remove(seq)
        self.block_manager.free(seq)
        del self.seqs[seq.seq_id]
