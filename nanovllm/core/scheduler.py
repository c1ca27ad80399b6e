"""Scheduler: which tokens of which sequences are computed in the next step (chapters 5 and 6).

There is no prefill step and no decode step. Each sequence has tokens and a count of those computed; a step gives
it some more, within a budget of tokens, and when the count reaches the end the step samples one. A whole prompt, a
chunk of one, the tail after a prefix hit, a sequence resumed after preemption and an ordinary decode differ in numbers
only (chunked prefill: Sarathi-Serve, arXiv:2403.02310; continuous batching: Orca, OSDI 2022).

Invariants:
- a sequence in `waiting` holds no blocks and has computed nothing; `running` is in order of admission;
- at most one running sequence is mid-prompt, the last one: admission stops as soon as the budget cuts a prompt;
- `seqs` holds the sequences of both, and nothing else: after a failure the queues are built anew from it;
- the pool can hold one sequence of max_model_len tokens, so the oldest running sequence always makes progress.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from nanovllm.core import integrity
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.features.speculation.choose import Speculation


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Positions [start, end) of one sequence, to be computed in this step.

    write_start is the first position whose K/V is written. It exceeds start only for the last token of a fully
    cached prompt: its K/V is in a shared block already, and only its logits are wanted. guesses: what may follow the
    known tokens (features/speculation); they are the last positions. samples: the chunk reaches the end of the known
    tokens, so the row there gives the next one, and the row of a guess the one behind it.
    """

    seq: Sequence
    start: int
    end: int
    write_start: int
    guesses: list[int] = field(default_factory=list)
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        # Decided once, here: update() appends to seq.tokens, and the answer must stay what it was.
        object.__setattr__(self, "samples", self.known_end == len(self.seq.tokens))

    @property
    def known_end(self) -> int:
        return self.end - len(self.guesses)

    @property
    def token_ids(self) -> list[int]:
        return self.seq.tokens[self.start : self.known_end] + self.guesses

    @property
    def num_logits(self) -> int:
        """Rows, the chunk's last ones, whose logits are needed."""
        return self.samples + len(self.guesses)

    def sampled_seqs(self) -> list[Sequence]:
        """What each of those rows samples for: the sequence, then the sequence with one guess more each time."""
        return [self.seq.with_guesses(self.guesses[:n]) for n in range(self.num_logits)]


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
    speculation             guesses tokens, or None
    max_loras               adapters that the running sequences may have, None: any number
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        speculation: "Speculation | None" = None,
        max_loras: int | None = None,
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
        self.speculation, self.max_loras = speculation, max_loras
        self.seqs: dict[int, Sequence] = {}  # all that were added and have not ended, in the order of arrival
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    # -- the queue ------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Put a sequence at the end of the queue. ValueError when no step could ever sample for it."""
        if not 0 < len(seq.tokens) < self.max_model_len:
            raise ValueError(
                f"a prompt must have 1 to {self.max_model_len - 1} tokens (max_model_len={self.max_model_len} "
                f"counts prompt and output), found {len(seq.tokens)}"
            )
        self.seqs[seq.seq_id] = seq
        self.waiting.append(seq)

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
        """End a running sequence and give its blocks back. Of one that has ended already, only the reason changes."""
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
        """Choose the next step's chunks: running sequences first, oldest first, then admissions."""
        chunks: list[ScheduledChunk] = []
        preempted: list[Sequence] = []
        budget = self.max_num_batched_tokens

        while len(chunks) < len(self.running) and budget > 0:
            seq = self.running[len(chunks)]
            num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
            if not self.block_manager.append_slots(seq, num_tokens):
                # The last of running has no chunk in this step yet: chunks are made in the order of running.
                preempted.append(self.preempt_last())
                continue
            chunks.append(self.make_chunk(seq, num_tokens))
            budget -= num_tokens

        # A step that preempted admits nobody: those who were admitted before come first.
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.has_room_for_adapter(seq) or not self.block_manager.allocate_with_prefix(seq):
                break
            self.running.append(self.waiting.popleft())
            seq.status = SequenceStatus.PREFILL
            num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
            chunks.append(self.make_chunk(seq, num_tokens))
            budget -= num_tokens

        if self.speculation is not None:
            chunks = self.speculation.extend(self, chunks, budget)
        return SchedulerOutput(chunks, preempted, sum(chunk.end - chunk.start for chunk in chunks))

    def update(self, output: SchedulerOutput, token_ids: list[int]) -> list[Sequence]:
        """Append the sampled tokens, of each chunk as many as hold. Returns the sequences that ended.

        token_ids: one for each row that gave logits, in order: a chunk that samples has one, and one for each guess.
        """
        assert len(token_ids) == sum(chunk.num_logits for chunk in output.chunks), "a token for each row"
        finished, rows = [], iter(token_ids)
        for chunk in output.chunks:
            if chunk.samples and self.take_tokens(chunk, list(islice(rows, chunk.num_logits))):
                finished.append(chunk.seq)
        if self.speculation is not None:
            self.speculation.note(output)
        self.block_manager.commit()
        return finished

    def roll_back(self, output: SchedulerOutput | None) -> None:
        """The step failed, in whatever line: all sequences wait again, with the tokens that they had before it.

        output: None if schedule() did not return. The queues are built anew from `seqs`: they may be half changed.
        """
        for chunk in output.chunks if output is not None else ():
            self.seqs[chunk.seq.seq_id] = chunk.seq  # update() may have ended it
            if chunk.samples:
                del chunk.seq.tokens[chunk.known_end :]
                del chunk.seq.block_hashes[chunk.known_end // self.block_manager.block_size :]
                chunk.seq.finish_reason = chunk.seq.stop_reason = None
        self.block_manager.roll_back()
        self.running, self.waiting = [], deque(self.seqs.values())
        for seq in self.waiting:
            seq.block_table = []
            seq.num_computed_tokens = seq.num_cached_tokens = 0
            seq.status = SequenceStatus.WAITING

    def check_integrity(self) -> None:
        """Raise an AssertionError that names the broken invariant; checks the block manager too."""
        integrity.check_scheduler(self)

    # -- helpers --------------------------------------------------------------------------------------------------

    def make_chunk(self, seq: Sequence, num_tokens: int) -> ScheduledChunk:
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        write_start = end if self.block_manager.is_cached(seq, start) else start
        seq.num_computed_tokens = end
        # Registered before it is computed: within a step all K/V is written before any is read, so a sequence that is
        # admitted later in the same step can share these blocks.
        self.block_manager.register_prefix(seq)
        return ScheduledChunk(seq, start, end, write_start)

    def take_tokens(self, chunk: ScheduledChunk, token_ids: list[int]) -> bool:
        """Append what was sampled, up to the first token that is not the one guessed. Has the sequence ended?"""
        seq = chunk.seq
        seq.status = SequenceStatus.DECODE
        for token_id, guess in zip(token_ids, [*chunk.guesses, None], strict=True):
            if token_id != NO_TOKEN:
                seq.append(token_id)
            reason, stop_reason = self.finish_reason_of(seq, token_id)
            if reason is not None or token_id != guess:
                break
        if chunk.guesses:  # those that hold are computed, and may have filled a block
            seq.num_computed_tokens = len(seq.tokens) - 1
            self.block_manager.register_prefix(seq)
        if reason is not None:
            self.finish(seq, reason, stop_reason)
        return reason is not None

    def has_room_for_adapter(self, seq: Sequence) -> bool:
        used = {other.lora_id for other in (*self.running, seq)} - {None}
        return seq.lora_id is None or self.max_loras is None or len(used) <= self.max_loras

    def preempt_last(self) -> Sequence:
        seq = self.running.pop()
        self.return_to_waiting(seq)
        self.num_preemptions += 1
        return seq

    def return_to_waiting(self, seq: Sequence) -> None:
        """Its cached blocks stay findable; on re-admission it starts from what is left of them."""
        self.block_manager.free(seq)
        seq.num_computed_tokens = seq.num_cached_tokens = 0
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)

    def finish_reason_of(self, seq: Sequence, token_id: int) -> tuple[str | None, int | None]:
        params = seq.sampling_params
        if token_id == NO_TOKEN:
            return "error", None
        if seq.num_generated_tokens > params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token_id in params.stop_token_ids:  # type: ignore[operator]
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
