"""Sequences that lose their K/V and are computed again, with a model that is played (chapter 13).

The scheduler, the block manager and the check of draft tokens are the engine's. In the model's place stands a rule:
which token comes depends on the tokens before it and on a number, which is drawn as the engine's sampler draws it.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any

from chapters.ch13_guess_and_check.world import Always, Proposes
from chapters.expect import Wrong
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 4
NUM_TOKENS = 50
SMALL = 18  # blocks: the sequences do not fit
Draw = Callable[[Sequence], float]


def noise(seq: Sequence) -> float:
    """As worker/sampler.py, which needs torch, has it in uniform_noise."""
    key = f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}".encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def hat(seed: int = 0) -> Draw:
    """One generator for all: each draw takes its next number."""
    rng = random.Random(seed)
    return lambda seq: rng.random()


def next_token(tokens: list[int], u: float) -> int:
    """The tokens before it put all tokens in an order, and the number u, from 0 to 1, picks one."""
    return (7 * sum(tokens) + 3 * len(tokens) + int(u * NUM_TOKENS)) % NUM_TOKENS


def answer_alone(seq: Sequence, num_tokens: int) -> list[int]:
    """The answer that this sequence gets, without any engine."""
    alone = Sequence(seq.tokens[: seq.num_prompt_tokens])
    alone.seed, alone.sample_index = seq.seed, seq.sample_index
    for _ in range(num_tokens):
        alone.append(next_token(alone.tokens, noise(alone)))
    return alone.generated_token_ids


class Cache:
    """Notes what each slot of the KV cache holds, and complains where a step reads something else."""

    def __init__(self, sample: Callable[[Sequence], int]) -> None:
        self.sample, self.slots = sample, dict[int, tuple[int, ...]]()

    def run(self, output: SchedulerOutput) -> list[list[int]]:
        """The tokens that the model samples in a step, for each chunk."""
        texts = [(chunk, chunk.seq.tokens[: chunk.known_end] + chunk.draft_token_ids) for chunk in output.chunks]
        for chunk, tokens in texts:
            for position in range(chunk.write_start, chunk.end):
                self.slots[self.slot(chunk.seq, position)] = tuple(tokens[: position + 1])
        for chunk, tokens in texts:
            for position in range(chunk.end):
                held = self.slots.get(self.slot(chunk.seq, position))
                if held != tuple(tokens[: position + 1]):
                    hint = (
                        f"at position {position} a step reads K/V that belongs to different tokens: a rejected draft "
                        "token does not count as computed, and a block is registered once all its tokens have "
                        "been accepted"
                    )
                    raise Wrong(hint, expected=f"... {list(tokens[: position + 1][-4:])}", got=f"... {held}"[-60:])
        return [[self.sample(seq) for seq in chunk.sampled_seqs()] for chunk in output.chunks]

    def slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


class Played:
    """An engine with a pool of num_blocks blocks, and six requests for two samples each.

    num_draft_tokens: how many each step has; one in three is wrong. fails: now and then a step ends with an
    error before its tokens are taken in. draw: where the number comes from.
    """

    def __init__(
        self, num_blocks: int = 120, num_draft_tokens: int = 0, fails: bool = False, draw: Draw = noise
    ) -> None:
        self.scheduler = Scheduler(
            BlockManager(num_blocks, BLOCK_SIZE), max_num_seqs=4, max_num_batched_tokens=24, max_model_len=36
        )
        self.draw, self.fails = draw, fails
        self.cache = Cache(lambda seq: next_token(seq.tokens, draw(seq)))
        self.speculation = Always(Proposes(self._draft), num_draft_tokens, 10**6)
        self.num_steps = self.num_failures = self.num_computed_tokens = 0
        self.seqs: list[Sequence] = []
        for number in range(6):
            for sample_index in range(2):
                seq = Sequence(list(range(number, number + 7)), SamplingParams(max_tokens=20, ignore_eos=True))
                seq.seed, seq.sample_index = 100 + number, sample_index
                self.seqs.append(seq)
                self.scheduler.add(seq)

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions

    def step(self) -> None:
        drafts = self.speculation.propose(self.scheduler)
        output = self.scheduler.schedule(drafts)
        self.num_steps += 1
        self.num_computed_tokens += output.num_tokens
        sampled_token_ids = self.cache.run(output)
        if self.fails and self.num_steps % 9 == 0:
            self.num_failures += 1
            self.scheduler.restart(list(self.scheduler.seqs.values()))
        else:
            self.scheduler.update(output, sampled_token_ids)

    def answers(self, most_steps: int = 2000) -> list[list[int]]:
        """All requests to their end."""
        while self.scheduler.has_unfinished():
            if self.num_steps == most_steps:
                raise Wrong(f"after {most_steps:,} steps the requests have not ended")
            self.step()
        return [seq.generated_token_ids for seq in self.seqs]

    def _draft(self, seq: Sequence, num_draft_tokens: int) -> list[int]:
        known = len(seq.tokens)
        right = answer_alone(seq, seq.num_generated_tokens + num_draft_tokens)[seq.num_generated_tokens :]
        return [(token + ((known + i) % 3 == 0)) % NUM_TOKENS for i, token in enumerate(right)]


HAPPENS: dict[str, dict[str, Any]] = {  # what Played is given
    "room for all": {},
    "a small pool": {"num_blocks": SMALL},
    "three draft tokens": {"num_draft_tokens": 3},
    "every ninth step fails": {"fails": True},
    "all three": {"num_blocks": SMALL, "num_draft_tokens": 3, "fails": True},
}
