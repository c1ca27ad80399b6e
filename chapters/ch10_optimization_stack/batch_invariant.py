"""Sums that depend on their order and sums that do not; and one question, asked of the engine in several ways."""

import random
import struct
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import xxhash

from chapters.patching import replaced
from chapters.story import one_core
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.worker.batch import cdiv

PIECE = 64  # numbers of a piece that begins at a fixed place
NUM_PROMPT, NUM_OTHER, NUM_OUTPUT = 320, 40, 8  # tokens
CHUNK = 64  # tokens of a step where the prompt is cut
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=5)


# -- sums --------------------------------------------------------------------------------------------------------------


def float32(x: float) -> float:
    """Rounded to the nearest float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def added(numbers: list[float]) -> float:
    """One after another; each sum is rounded."""
    total = 0.0
    for number in numbers:
        total = float32(total + number)
    return total


def in_equal_shares(numbers: list[float], num_workers: int) -> float:
    """Each worker adds up its share, then the totals are added."""
    size = cdiv(len(numbers), num_workers)
    return added([added(numbers[first : first + size]) for first in range(0, len(numbers), size)])


def in_fixed_pieces(numbers: list[float], num_workers: int) -> float:
    """Each worker adds up every num_workers-th piece, then the pieces' totals are added in the order of the pieces."""
    totals = dict[int, float]()
    for worker in range(num_workers):
        for first in range(worker * PIECE, len(numbers), num_workers * PIECE):
            totals[first] = added(numbers[first : first + PIECE])
    return added([totals[first] for first in sorted(totals)])


# -- one question ------------------------------------------------------------------------------------------------------


class OneQuestion:
    """An engine in float32 that is asked the same in several ways. answers(): a hash of each answer."""

    def __init__(self, load: Callable[..., LLM], optimizations: tuple[str, ...]) -> None:
        sizes = {"max_num_seqs": 8, "max_model_len": NUM_PROMPT + NUM_OUTPUT, "num_gpu_blocks_override": 64}
        options: dict[str, Any] = {"dtype": "float32", "block_size": 16, "speculative_config": NGRAM}
        self.llm, rng = load(**sizes, **options, optimizations=optimizations), random.Random(10)
        vocabulary, self.scheduler = range(self.llm.engine.model_config.vocab_size), self.llm.engine.scheduler
        self.question = 2 * rng.choices(
            vocabulary, k=NUM_PROMPT // 2
        )  # twice the same: there is something to draft from
        self.others = [rng.choices(vocabulary, k=NUM_OTHER) for _ in range(7)]

    def answers(self) -> dict[str, int]:
        ways = (
            self.alone,
            self.the_last_of_eight,
            self.in_chunks,
            self.found_cached,
            self.with_draft_tokens,
            self.on_one_core,
        )
        found = {}
        for way in ways:
            self.llm.reset_prefix_cache()
            found[way.__name__.replace("_", " ")] = digest(way())
        return found

    def alone(self) -> RequestOutput:
        return self._ask(self.question)

    def the_last_of_eight(self) -> RequestOutput:
        return self._ask(*self.others, self.question)

    def in_chunks(self) -> RequestOutput:
        with replaced(self.scheduler, "max_num_batched_tokens", CHUNK):
            return self.alone()

    def found_cached(self) -> RequestOutput:
        self.alone()
        return self.alone()

    def with_draft_tokens(self) -> RequestOutput:
        return self._ask(self.question, drafts=True)

    def on_one_core(self) -> RequestOutput:
        with one_core():
            return self.alone()

    def _ask(self, *prompts: list[int], drafts: bool = False) -> RequestOutput:
        """The output of the last one."""
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        with patch.dict(self.llm.engine.wings):
            if not drafts:
                self.llm.engine.wings.pop("speculation", None)
            return self.llm.generate(given, PARAMS, use_tqdm=False)[-1]


def digest(output: RequestOutput) -> int:
    """Of the tokens and of the bits of their log probabilities."""
    completion, hashed = output.outputs[0], xxhash.xxh32()
    for entries in completion.logprobs or ():
        for token_id, entry in entries.items():
            hashed.update(struct.pack("<qd", token_id, entry.logprob))
    return hashed.intdigest()
