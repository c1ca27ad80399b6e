"""Sequence: the tokens of one sample, and how far the engine has come with them (chapters 2 and 5).

A sequence knows nothing of schedulers or tensors; they write their progress into it.
"""

from copy import copy
from enum import Enum, auto
from itertools import count
from typing import Any

from nanovllm.core.block_hash import MMSpan
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()  # in the queue: holds no blocks
    PREFILL = auto()  # running: tokens that were known before this step are being computed
    DECODE = auto()  # running: computes the token it sampled last
    FINISHED = auto()


_next_seq_id = count()
NO_TOKEN = -1  # what is sampled where logits are NaN or infinite: the sequence ends with finish_reason "error"


class Sequence:
    """One sample of one request.

    tokens                  prompt and generated token ids
    num_computed_tokens     tokens whose K/V is in the cache once the step in flight is done
    num_cached_tokens       of those, found in the prefix cache at the last admission
    block_table             physical block ids in logical order; append-only while the sequence runs
    block_hashes            names of its full blocks, computed as they are needed and kept (see block_hash.py)
    num_registered_blocks   leading blocks that are registered already
    hash_collision          one of its names stands for other content: from that block on nothing is registered
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams = SamplingParams(),
        *,
        cache_salt: str | None = None,
        lora_id: int | None = None,
        mm_spans: tuple[MMSpan, ...] = (),
    ) -> None:
        self.seq_id = next(_next_seq_id)
        self.tokens = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.sampling_params = sampling_params
        self.cache_salt = cache_salt
        self.lora_id = lora_id
        self.mm_spans = tuple(MMSpan(*span) for span in mm_spans)
        self.has_extra_keys = bool(mm_spans) or (cache_salt, lora_id) != (None, None)

        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0
        self.hash_collision = False

        self.bad_word_ids: list[list[int]] = []  # the tokens of sampling_params.bad_words
        self.adapter: Any = None  # what lora_id stands for (features/lora/adapter.py)
        self.grammar: Any = None  # what the output has to fit (features/grammar/grammar.py)

        # The noise of a sample depends on these and on its position alone (sampler.py).
        self.seed = self.seq_id if sampling_params.seed is None else int(sampling_params.seed)
        self.sample_index = 0

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def reads_cache(self) -> bool:
        """False if the logits of the whole prompt are wanted: a cache has K/V only. Sample 0 computes them for all."""
        return self.sampling_params.prompt_logprobs is None or self.sample_index > 0

    @property
    def ended_by_token(self) -> bool:
        """Its last token ended it, and is not part of the text."""
        if self.finish_reason != "stop" or self.stop_reason is not None:
            return isinstance(self.stop_reason, int)
        return self.grammar is None or self.tokens[-1] in self.grammar.eos_token_ids

    @property
    def error(self) -> str:
        """Why it has ended with finish_reason "error"; "" if it has not."""
        if self.finish_reason != "error":
            return ""
        if self.grammar is not None and self.grammar.error:
            return f"structured outputs: llguidance has given up: {self.grammar.error}"
        return "there is no token to choose: the logits hold NaN or infinity, or no token is allowed"

    @property
    def generated_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def with_guesses(self, guesses: list[int]) -> "Sequence":
        """This sequence as it would be with these tokens, to be read only."""
        if not guesses:
            return self
        guessed = copy(self)
        guessed.tokens = self.tokens + guesses
        return guessed

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, {self.num_prompt_tokens}+{self.num_generated_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {self.num_cached_tokens} cached, blocks {self.block_table})"
        )
