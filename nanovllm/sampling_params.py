"""SamplingParams: how the tokens of one request are chosen and when they end (chapter 8).

Names, defaults and meanings are vLLM's. Standard library only: the control plane imports this file.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from nanovllm.validation import MAX_POSITIVE, MIN_POSITIVE, SEED, Bounds, check_fields, reject_unknown, tuple_of

NUMBERS: dict[str, Bounds] = {
    "n": (Integral, 1, 16_384),  # vLLM's limit
    "temperature": (Real, 0.0),
    "top_p": (Real, MIN_POSITIVE, 1.0),
    "top_k": (Integral, -1),
    "min_p": (Real, 0.0, 1.0),
    "seed": SEED,
    "max_tokens": (Integral, 1),
    "min_tokens": (Integral, 0),
    "logprobs": (Integral, 0),
    "repetition_penalty": (Real, MIN_POSITIVE, MAX_POSITIVE),
    "presence_penalty": (Real, -2.0, 2.0),
    "frequency_penalty": (Real, -2.0, 2.0),
}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Applied in this order: penalties, temperature, min_p, top_k, top_p.

    n:                   samples per prompt; they share the prompt's K/V through the prefix cache
    temperature:         0 is greedy (the most likely token, always); less than 1e-5 counts as 0
    top_p:               probability mass to keep
    min_p:               least probability to keep, as a share of the largest
    top_k:               number of tokens to keep; 0 or -1 keeps all
    seed:                same seed, same tokens, whatever else is in the batch; None: the engine chooses
    max_tokens:          most tokens to generate; None: as many as fit in max_model_len
    min_tokens:          before this many, nothing stops the sequence
    stop:                strings that end the text (they are not part of it)
    stop_token_ids:      token ids that end the sequence, beside the checkpoint's EOS
    ignore_eos:          generate on past EOS
    logprobs:            how many top tokens to report a position, of the raw logits; 0: the chosen one alone
    repetition_penalty:  > 1 discourages tokens of prompt and output (CTRL, arXiv:1909.05858)
    presence_penalty:    subtracted from the logits of tokens that the output has
    frequency_penalty:   subtracted from them once for each time

    Raises ValueError for an unknown name, a wrong type or a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __new__(cls, *args: Any, **kwargs: Any) -> "SamplingParams":
        reject_unknown(kwargs, (f.name for f in fields(cls)), "SamplingParams")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self, NUMBERS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        # Kept as tuples, so that the scheduler and the detokenizer never look at None or at a bare string.
        object.__setattr__(self, "stop", tuple_of(self.stop, str, "stop", "strings"))
        object.__setattr__(self, "stop_token_ids", tuple_of(self.stop_token_ids, Integral, "stop_token_ids", "ids"))
        if "" in self.stop:  # type: ignore[operator]
            raise ValueError("stop holds an empty string, which would end every text at once")
