"""What each parameter of a request may be: the checks in front of SamplingParams, as far as no checkpoint is asked."""

from functools import wraps
from numbers import Integral, Real
from typing import Any

from nanovllm.checks.values import MAX_POSITIVE, MIN_POSITIVE, SEED, Bounds, bias_of, check_field, list_of, shorten
from nanovllm.checks.vllm_names import accepted
from nanovllm.features.callers.output_kind import RequestOutputKind
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.features.logits_processors.functions import functions_of
from nanovllm.sampling_params import SamplingParams

PARAMETER_BOUNDS: dict[str, Bounds] = {
    "n": (Integral, 1, 16_384),  # vLLM's limit
    "temperature": (Real, 0.0),
    "top_p": (Real, MIN_POSITIVE, 1.0),
    "top_k": (Integral, -1),
    "min_p": (Real, 0.0, 1.0),
    "seed": SEED,
    "max_tokens": (Integral, 1),
    "min_tokens": (Integral, 0),
    "logprobs": (Integral, -1),
    "prompt_logprobs": (Integral, -1),
    "repetition_penalty": (Real, MIN_POSITIVE, MAX_POSITIVE),
    "presence_penalty": (Real, -2.0, 2.0),
    "frequency_penalty": (Real, -2.0, 2.0),
}
MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's limit; each is ranked among all words, at each position
LISTS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("stop", "bad_words"), (str, "strings")),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logprob_token_ids"), (Integral, "ids")),
}


def check_parameter(name: str, value: Any, kind: Any) -> Any:
    """A SamplingParams' field in its one form. kind: its type. Raises ValueError."""
    if name in LISTS and (value is not None or name not in ("allowed_token_ids", "logprob_token_ids")):
        value = list_of(value, *LISTS[name], name=name)
        if "" in value:
            raise ValueError(f"{name} holds an empty string, which every text has everywhere")
        if name == "allowed_token_ids" and not value:
            raise ValueError("allowed_token_ids is empty: there is no token to choose; None allows all")
        if name == "logprob_token_ids" and len(value) > MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(f"logprob_token_ids may have {MAX_LOGPROB_TOKEN_IDS} tokens, found {len(value)}")
    if name == "logit_bias" and value is not None:
        return bias_of(value)
    if name == "logits_processors":
        return functions_of(value)
    if name == "extra_args" and value is not None:
        if not isinstance(value, dict):
            raise ValueError(f"extra_args must be a dict, found {shorten(value)}")
        return dict(value)
    if name == "structured_outputs" and not isinstance(value, StructuredOutputsParams | None):
        raise ValueError(f"structured_outputs must be a StructuredOutputsParams, found {type(value).__name__}")
    if name == "seed" and isinstance(value, Integral) and value == -1:
        return None
    if name == "output_kind":
        number = getattr(value, "value", value)  # of anybody's Enum
        if type(number) is not int or number not in range(len(RequestOutputKind)):
            names = ", ".join(kind.name for kind in RequestOutputKind)
            raise ValueError(f"output_kind must be a RequestOutputKind ({names}), found {value!r}")
        return RequestOutputKind(number)
    return check_field(name, value, kind, PARAMETER_BOUNDS)


def check_together(params: SamplingParams) -> None:
    """Parameters that exclude each other. Raises ValueError."""
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens ({params.min_tokens}) is larger than max_tokens ({params.max_tokens})")
    if params.stop and not params.detokenize:
        raise ValueError("stop strings are found in the text: they need detokenize=True")
    if params.logprob_token_ids and params.logprobs not in (None, len(params.logprob_token_ids)):
        num, which = params.logprobs, len(params.logprob_token_ids)
        raise ValueError(f"logprobs={num} asks for the top tokens, logprob_token_ids for {which} others: leave one out")
    if params.structured_outputs is not None and params.allowed_token_ids is not None:
        raise ValueError("allowed_token_ids may leave no token of structured_outputs: give one of them")


_plain_init = SamplingParams.__init__


@wraps(_plain_init)
def _init(self: SamplingParams, *args: Any, **given: Any) -> None:
    """Raises ValueError for an unknown name, a wrong type or a value out of range."""
    _plain_init(self, *args, **accepted(given, self.__dataclass_fields__, "SamplingParams"))
    check_together(self)


def _setattr(self: SamplingParams, name: str, value: Any) -> None:
    fields = self.__dataclass_fields__
    if name in fields or accepted({name: value}, fields, "SamplingParams"):
        object.__setattr__(self, name, check_parameter(name, value, fields[name].type))


SamplingParams.__init__, SamplingParams.__setattr__ = _init, _setattr  # type: ignore[method-assign, assignment]
