"""SamplingParams: how the tokens of one request are chosen and when they end (chapter 8).

Names and defaults are vLLM's, and so are meanings, except for those that examples/move_to_vllm.md lists. The control
plane imports this file, so this file imports no feature. Where only a feature can check a parameter, the feature is
imported when somebody sets that parameter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from nanovllm.checks.names import check_option, known_names, names_checked, option
from nanovllm.checks.values import HIGHEST_SEED, LOWEST_SEED, MAX_POSITIVE, MIN_POSITIVE, check_number, list_of, shorten

if TYPE_CHECKING:
    from nanovllm.features.grammar.params import StructuredOutputsParams

MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's limit; each of them is ranked in the whole vocabulary, at each position


class RequestOutputKind(Enum):
    """What the outputs of a running request hold, in AsyncLLM, LLM.stream() and LLMEngine.step().

    CUMULATIVE: each output holds all tokens and the whole text so far.
    DELTA: each output holds only what is new, and only the samples that have something new. But cumulative_logprob
    covers the whole sample, and prompt_logprobs come once.
    FINAL_ONLY: there is one output, at the end.

    generate() and chat() return whole answers, whatever it is.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@names_checked("SamplingParams")
@dataclass(kw_only=True)
class SamplingParams:
    """Parameters of one request, copied when it is made.

    They are applied in this order: structured_outputs, allowed_token_ids, bad_words (and, before min_tokens, EOS and
    stop tokens), logit_bias, logits_processors, penalties, temperature, min_p, top_k, top_p. Logprobs are computed
    after structured_outputs and before the others.

    The constructor, and the assignment of a field, raise ValueError for an unknown name, a wrong type or a value out of
    range.
    """

    n: int = option(1, "samples per prompt; they share the prompt's K/V through the prefix cache", low=1, high=16_384)
    temperature: float = option(1.0, "0 is greedy (the most likely token, always); less than 1e-5 counts as 0", low=0.0)
    top_p: float = option(
        1.0, "keep the most likely tokens until their probabilities add up to this", low=MIN_POSITIVE, high=1.0
    )
    top_k: int = option(0, "number of tokens to keep; 0 or -1 keeps all", low=-1)
    min_p: float = option(0.0, "keep tokens with at least this share of the largest probability", low=0.0, high=1.0)
    seed: int | None = option(
        None,
        "same seed, same random numbers, whatever else is in the batch; -1: the engine chooses",
        low=LOWEST_SEED,
        high=HIGHEST_SEED,
    )
    max_tokens: int | None = option(
        16, "most tokens to generate; None: as many as fit in max_model_len; 0, with prompt_logprobs: none", low=0
    )
    min_tokens: int = option(0, "neither EOS nor a stop ends the sequence before it has this many tokens", low=0)
    stop: list[str] = option(None, "strings that end the text (they are not part of it)")
    stop_token_ids: list[int] = option(None, "token ids that end the sequence, beside the checkpoint's EOS")
    include_stop_str_in_output: bool = option(False, "a stop string, or a stop token's text, is part of the text")
    ignore_eos: bool = option(False, "generate on past EOS")
    logprobs: int | None = option(None, "top tokens to report beside the chosen one, at each position; -1: all", low=-1)
    logprob_token_ids: list[int] | None = option(None, "tokens whose logprobs to report, instead of the top ones")
    prompt_logprobs: int | None = option(
        None, "top tokens to report at each prompt position; the prompt is then computed without the cache", low=-1
    )
    repetition_penalty: float = option(
        1.0, "> 1 discourages tokens of prompt and output (CTRL, arXiv:1909.05858)", low=MIN_POSITIVE, high=MAX_POSITIVE
    )
    presence_penalty: float = option(
        0.0, "subtracted from the logits of all tokens that are in the output", low=-2.0, high=2.0
    )
    frequency_penalty: float = option(
        0.0, "subtracted from a token's logit as many times as the token is in the output", low=-2.0, high=2.0
    )
    logit_bias: dict[int, float] | None = option(None, "{token id: number that is added to its logit}")
    allowed_token_ids: list[int] | None = option(None, "the only tokens that may be chosen")
    bad_words: list[str] = option(None, "texts to avoid: a token that would complete one is not chosen")
    logits_processors: list[Callable[..., Any]] = option(
        None, "functions (generated_token_ids, logits_row) -> logits_row"
    )
    extra_args: dict[str, Any] | None = option(None, "parameters for the classes of LLM(logits_processors=...)")
    structured_outputs: "StructuredOutputsParams | None" = option(
        None, "what the text has to fit: a JSON schema, a regex, a choice, a grammar"
    )
    detokenize: bool = option(True, "False: the output has token ids and no text")
    skip_special_tokens: bool = option(True, "special tokens are not part of the text")
    spaces_between_special_tokens: bool = option(
        True, "special tokens in the text have spaces between them, if the tokenizer itself makes it"
    )
    output_kind: RequestOutputKind = option(RequestOutputKind.CUMULATIVE, "what outputs of a running request hold")

    @property
    def generates(self) -> bool:
        """False if only the prompt's logprobs are wanted."""
        return self.max_tokens != 0

    def clone(self) -> "SamplingParams":
        """A copy that shares no list. It is checked as a whole, for fields may have been assigned one by one."""
        return replace(self)

    def __post_init__(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            scores = "with prompt_logprobs it may be 0, and the prompt is scored"
            raise ValueError(f"max_tokens must be a whole number from 1, found 0 ({scores})")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are found in the text: they need detokenize=True")
        if self.logprob_token_ids and self.logprobs not in (None, len(self.logprob_token_ids)):
            num_chosen = len(self.logprob_token_ids)
            raise ValueError(
                f"logprobs={self.logprobs} asks for the top tokens, logprob_token_ids for {num_chosen} others: leave "
                "one out"
            )
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            raise ValueError("allowed_token_ids may leave no token of structured_outputs: give one of them")

    def __setattr__(self, name: str, value: Any) -> None:
        """Check the value of a field, and store it in the form that the field's type says.

        The constructor assigns fields as well, so it checks them here.
        """
        fields = self.__dataclass_fields__
        if name not in fields:
            known_names({name: value}, fields, "SamplingParams")
            return  # an option of vLLM's, at a value that changes nothing
        if name in ("stop", "bad_words"):
            value = list_of(value, str, "strings", name)
            if "" in value:
                raise ValueError(f"{name} holds an empty string, which every text has everywhere")
        elif name == "stop_token_ids":
            value = list_of(value, Integral, "ids", name)
        elif name in ("allowed_token_ids", "logprob_token_ids") and value is not None:
            value = list_of(value, Integral, "ids", name)
            if name == "allowed_token_ids" and not value:
                raise ValueError("allowed_token_ids is empty: there is no token to choose; None allows all")
            if name == "logprob_token_ids" and len(value) > MAX_LOGPROB_TOKEN_IDS:
                raise ValueError(f"logprob_token_ids may have {MAX_LOGPROB_TOKEN_IDS} tokens, found {len(value)}")
        elif name == "logit_bias" and value is not None:
            value = _bias(value)
        elif name == "logits_processors":
            value = _functions(value)
        elif name == "extra_args" and value is not None:
            if not isinstance(value, dict):
                raise ValueError(f"extra_args must be a dict, found {shorten(value)}")
            value = dict(value)
        elif name == "structured_outputs" and value is not None:
            from nanovllm.features.grammar.params import StructuredOutputsParams

            if not isinstance(value, StructuredOutputsParams):
                raise ValueError(f"structured_outputs must be a StructuredOutputsParams, found {type(value).__name__}")
        elif name == "output_kind":
            value = _output_kind(value)
        elif name == "seed" and isinstance(value, Integral) and value == -1:
            value = None
        else:
            value = check_option(fields[name], value)
        object.__setattr__(self, name, value)


def _bias(value: Any) -> dict[int, float]:
    """logit_bias, {token id: number}. Ids may be text: JSON has no other keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must be a dict of token ids and numbers, found {shorten(value)}")
    bias = {}
    for token_id, number in value.items():
        if isinstance(token_id, str) and token_id.isdecimal() and len(token_id) <= 20:
            token_id = int(token_id)
        token_id = check_number("a token id of logit_bias", token_id, Integral, 0)
        bias[token_id] = check_number(f"logit_bias[{token_id}]", number, Real, -MAX_POSITIVE, MAX_POSITIVE)
    return bias


def _functions(value: Any) -> list[Callable[..., Any]]:
    if value is None or value == []:
        return []
    from nanovllm.features.logits_processors.functions import functions_of

    return functions_of(value)


def _output_kind(value: Any) -> RequestOutputKind:
    number = getattr(value, "value", value)  # vLLM's Enum is accepted, too
    if type(number) is not int or number not in range(len(RequestOutputKind)):
        names = ", ".join(kind.name for kind in RequestOutputKind)
        raise ValueError(f"output_kind must be a RequestOutputKind ({names}), found {value!r}")
    return RequestOutputKind(number)
