"""What only the checkpoint can say about a request: tokens and parameters. sampling_params.py has checked the rest."""

from numbers import Integral
from typing import Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import check_number, check_range, shorten
from nanovllm.prompts import tokenize
from nanovllm.sampling_params import SamplingParams


def check_params(params: SamplingParams, model: ModelConfig) -> SamplingParams:
    """A copy of the parameters, in which -1 logprobs are as many as there are tokens. Raises ValueError."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be a SamplingParams, found {type(params).__name__}")
    params = params.clone()
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        check_range(f"a token id of {name}", getattr(params, name) or (), 0, model.vocab_size - 1)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) == -1:
            setattr(params, name, model.vocab_size)
        check_number(name, getattr(params, name) or 0, Integral, 0, model.vocab_size)
    _check_some_token_is_left(params, model)
    return params


def check_token_ids(token_ids: list[int], vocab_size: int, max_model_len: int) -> None:
    """Raise a ValueError for a prompt that no step could compute."""
    if not token_ids:
        raise ValueError("the prompt is empty: there is no token to continue from")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens; max_model_len is {max_model_len}, prompt and output "
            f"together, so at most {max_model_len - 1} fit"
        )
    if (at := next((i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size), None)) is not None:
        vocabulary = f"the vocabulary (0 to {vocab_size - 1})"
        raise ValueError(f"token id {shorten(token_ids[at])} at position {at} is outside {vocabulary}")


def check_request_id(request_id: Any) -> None:
    if not isinstance(request_id, str | None):
        raise ValueError(f"request_id must be a string, found {shorten(request_id)}")


def _check_some_token_is_left(params: SamplingParams, model: ModelConfig) -> None:
    if not params.min_tokens:
        return
    stop_ids = {*params.stop_token_ids, *model.eos_token_ids}  # type: ignore[misc]
    allowed = range(model.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if stop_ids.issuperset(allowed):
        raise ValueError(f"before min_tokens={params.min_tokens}, so many stop_token_ids leave no token to choose")


def bad_word_ids(tokenizer: Any, words: list[str], vocab_size: int) -> list[list[int]]:
    """The tokens of words that must not be generated, alone and behind a space. Raises ValueError."""
    found: list[list[int]] = []
    for word in words:
        alone = tokenize(tokenizer, word.lstrip(), add_special_tokens=False)
        if not alone:
            raise ValueError(f"bad_words: {word!r} has no tokens")
        found.append(alone)
        behind_space = tokenize(tokenizer, " " + word.lstrip(), add_special_tokens=False)
        # As vLLM: only if the space joins the first token. Otherwise the word alone is found, space or not.
        if behind_space and behind_space[0] != alone[0] and len(behind_space) == len(alone):
            found.append(behind_space)
    return [ids for ids in found if max(ids) < vocab_size]  # what the model has no token for it cannot say
