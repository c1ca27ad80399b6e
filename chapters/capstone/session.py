"""Session: the engine's scheduler and block manager with a memory that is a dictionary, and a model that is a checksum.

A token's K/V is the token and the adapter that computed it. The next token is a checksum of all K/V that the block
table leads to. So whoever reads a slot that somebody else has written gets a different text than alone, as from a real
model.
"""

import random
from typing import Any
from zlib import crc32

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def next_token(kv: list[tuple[int, int | None]]) -> int:
    return 1000 + crc32(repr(kv).encode()) % 9000


def text_alone(seq: Sequence) -> list[int]:
    """What this request has to get, whoever else is there."""
    kv = [(token, seq.lora_id) for token in seq.tokens[: seq.num_prompt_tokens]]
    for _ in range(seq.sampling_params.max_tokens or 0):
        kv.append((next_token(kv), seq.lora_id))
    return [token for token, _ in kv[seq.num_prompt_tokens :]]


class Session:
    """seqs: all that were sent. outputs: of the steps so far."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 16, budget: int = 64) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        most = num_blocks * block_size
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=most
        )
        self.memory: dict[int, tuple[int, int | None]] = {}  # slot -> what was written there last
        self.seqs: list[Sequence] = []
        self.outputs: list[SchedulerOutput] = []

    def send(self, prompt: list[int], num_output: int, **keys: Any) -> Sequence:
        seq = Sequence(prompt, SamplingParams(max_tokens=num_output, ignore_eos=True), **keys)
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def leave(self, seq: Sequence) -> None:
        self.scheduler.abort(seq.seq_id)

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.outputs.append(output)
        for chunk in output.chunks:
            for position in range(chunk.write_start, chunk.end):
                self.memory[self._slot(chunk.seq, position)] = chunk.seq.tokens[position], chunk.seq.lora_id
        tokens = []
        for chunk in output.chunks:
            if chunk.reaches_end:
                kv = [self.memory.get(self._slot(chunk.seq, i), (0, None)) for i in range(chunk.end)]
                tokens.append(next_token(kv))
        self.scheduler.update(output, output.per_chunk(tokens))
        return output

    def run(self, num_steps: int = 2000) -> "Session":
        """Until all have ended, or so many steps, or one in which nothing happened."""
        while self.scheduler.has_unfinished() and len(self.outputs) < num_steps:
            if not self.step().chunks:
                break
        return self

    @property
    def num_held(self) -> int:
        """Blocks that somebody uses."""
        return len(self.manager.blocks) - len(self.manager.free_blocks)

    def _slot(self, seq: Sequence, position: int) -> int:
        size = self.manager.block_size
        return seq.block_table[position // size] * size + position % size


def crowd(session: Session, seed: int, num: int = 30, *, leaving: bool = False) -> None:
    """Requests that share beginnings, a few at a time; with `leaving` some clients go."""
    rng = random.Random(seed)
    for i in range(num):
        prompt = [*range(4 * rng.randrange(1, 5)), 100 + rng.randrange(50), 200 + i]
        session.send(prompt, rng.randrange(2, 12))
        for _ in range(rng.randrange(3)):
            session.step()
        if leaving and rng.random() < 0.3:
            session.leave(rng.choice(session.seqs))
