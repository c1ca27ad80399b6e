"""What a beam search is asked for, and what it gives. Shaped like vLLM's classes of the same names."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.checks.names import check_options, names_checked, option
from nanovllm.checks.values import MAX_INT32
from nanovllm.outputs import Logprob

if TYPE_CHECKING:
    from nanovllm.features.lora.lora_request import LoRARequest


@names_checked("BeamSearchParams")
@dataclass
class BeamSearchParams:
    """Raises ValueError for an unknown name, a wrong type or a value out of range."""

    beam_width: int = option(None, "continuations that are kept at a time, and given back", low=1, high=16_384)
    max_tokens: int = option(None, "most tokens to generate", low=1, high=MAX_INT32)
    ignore_eos: bool = option(False, "go on past EOS")
    temperature: float = option(
        0.0, "above 0 one sampled token is a candidate beside the most likely ones, as in vLLM", low=0.0
    )
    length_penalty: float = option(
        1.0, "a beam's score: its log probability / (prompt and output tokens ** this)", low=-30.0, high=30.0
    )
    skip_special_tokens: bool = option(True, "special tokens are not part of the text")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass
class BeamSearchSequence:
    """A prompt and one continuation of it.

    orig_prompt  the prompt as token ids; a prompt for generate() that needs no image to be opened again
    tokens       of both
    logprobs     for each generated token, those that were candidates in its place
    cum_logprob  sum of the log probabilities of the generated tokens, under the raw logits
    text         of all tokens; None while the search runs
    """

    orig_prompt: dict[str, Any]
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    lora_request: "LoRARequest | None" = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # "error" or "abort" if that ended it, otherwise None, as in vLLM
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best continuations of one prompt, the best first: beam_width of them, fewer if there are no more."""

    sequences: list[BeamSearchSequence]
