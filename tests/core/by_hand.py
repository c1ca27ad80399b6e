"""Managers, schedulers and sequences by hand, and what stands in for the data plane."""

from collections.abc import Mapping

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def admit(manager: BlockManager, token_ids, **keys) -> Sequence:
    seq = Sequence(list(token_ids), **keys)
    assert manager.allocate_with_prefix(seq)
    compute(manager, seq)
    return seq


def compute(manager: BlockManager, seq: Sequence, *token_ids: int) -> None:
    """Append tokens, make room for their K/V and register what is full. Without tokens: compute the prompt."""
    seq.tokens += token_ids
    assert manager.append_slots(seq, len(seq.tokens) - seq.num_computed_tokens)
    seq.num_computed_tokens = len(seq.tokens)
    manager.register_prefix(seq)
    manager.check_integrity()


def cached(manager: BlockManager) -> set[int]:
    return {block.block_id for block in manager.blocks if block.block_hash is not None}


def make(num_blocks=64, block_size=4, **options) -> Scheduler:
    options = dict(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64) | options
    return Scheduler(BlockManager(num_blocks, block_size), **options)


def sequence(tokens, max_tokens=8, **params) -> Sequence:
    return Sequence(list(tokens), SamplingParams(max_tokens=max_tokens, **params))


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 1000


class CacheModel:
    """Stands in for the data plane: keeps what each slot holds and checks that a chunk can see all it attends to.

    Draft tokens are computed as known tokens are, and each of their rows gives a token, too.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[int, tuple] = {}

    def execute(self, output: SchedulerOutput) -> list[list[int]]:
        tokens = [chunk.seq.tokens[: chunk.known_end] + chunk.draft_token_ids for chunk in output.chunks]
        for chunk, seen in zip(output.chunks, tokens, strict=True):  # all K/V is written first
            for position in range(chunk.write_start, chunk.end):
                self.slots[self._slot(chunk.seq, position)] = tuple(seen[: position + 1])
        for chunk, seen in zip(output.chunks, tokens, strict=True):
            for position in range(chunk.end):
                held = self.slots.get(self._slot(chunk.seq, position))
                assert held == tuple(seen[: position + 1]), f"{chunk}: wrong K/V at {position}"
        return [[next_token(seq.tokens) for seq in chunk.sampled_seqs()] for chunk in output.chunks]

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self.block_size] * self.block_size + position % self.block_size


def run(scheduler: Scheduler, model: CacheModel, drafts: Mapping[int, list[int]] = {}) -> SchedulerOutput:
    output = scheduler.schedule(drafts)
    scheduler.check_integrity()
    assert output.num_tokens == sum(c.end - c.start for c in output.chunks) <= scheduler.max_num_batched_tokens
    scheduler.update(output, model.execute(output))
    scheduler.check_integrity()
    return output


def fail_step(scheduler: Scheduler, output: SchedulerOutput | None = None) -> None:
    """What LLMEngine.restart does to the scheduler: all wait, with the tokens from before the step.

    output: None if schedule() has not returned.
    """
    chunks = [] if output is None else output.chunks
    seqs = dict(scheduler.seqs) | {chunk.seq.seq_id: chunk.seq for chunk in chunks}  # update() may have ended some
    for chunk in chunks:
        if chunk.reaches_end:
            chunk.seq.truncate(chunk.known_end)
    scheduler.restart(seqs.values())
    scheduler.check_integrity()
