"""What only the engine can say about a request: tokens and parameters. SamplingParams has checked the rest."""

from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from nanovllm import wings
from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import check_number, check_range, shorten
from nanovllm.core.block_hash import MMSpan
from nanovllm.core.sequence import SequencePart
from nanovllm.prompts import parse_prompt
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

IMAGE_KEYS = frozenset(("multi_modal_data", "mm_processor_kwargs"))  # of a prompt


@dataclass
class Asked:
    """A request while it is being checked: what the caller asks for, in the engine's terms.

    prompt, lora_request   as the caller has given them
    image_keys             keys of the prompt that only prompts with images have
    text                   the prompt's, if it was one
    lora_id, mm_spans, parts   of its sequences; wings add them (wings.read_request)
    """

    prompt: Any
    params: SamplingParams
    lora_request: Any
    image_keys: frozenset[str]
    text: str | None
    token_ids: list[int]
    cache_salt: str | None
    priority: int = 0
    lora_id: int | None = None
    mm_spans: tuple[MMSpan, ...] = ()
    parts: dict[str, SequencePart] = field(default_factory=dict)


def check_request(
    engine: "LLMEngine", prompt: Any, params: SamplingParams, lora_request: Any, priority: Any, request_id: Any
) -> Asked:
    """Everything that a caller can get wrong, and the prompt tokenized. Raises ValueError."""
    if not isinstance(request_id, str | None):
        raise ValueError(f"request_id must be a string, found {shorten(request_id)}")
    check_generates(engine)
    image_keys = IMAGE_KEYS.intersection(prompt) if isinstance(prompt, dict) else frozenset[str]()
    text_prompt = {key: value for key, value in prompt.items() if key not in image_keys} if image_keys else prompt
    text, token_ids, cache_salt = parse_prompt(engine.tokenizer, text_prompt, engine.check_length)
    params = check_params(params, engine.model_config)
    asked = Asked(
        prompt=prompt,
        params=params,
        lora_request=lora_request,
        image_keys=image_keys,
        text=text,
        token_ids=token_ids,
        cache_salt=cache_salt,
    )
    check_token_ids(engine, asked)
    asked.priority = check_priority(priority, engine.config.scheduling_policy)
    wings.read_request(engine, asked)
    return asked


def check_priority(given: Any, policy: str) -> int:
    """A request's priority; None is 0. Raises ValueError for one that this order of scheduling does not know."""
    priority = check_number("priority", 0 if given is None else given, Integral)
    if priority and policy != "priority":
        reason = f"priority={priority} asks for another order than first come, first served"
        raise ValueError(f"{reason}; leave it out, or start with scheduling_policy='priority'")
    return priority


def check_generates(engine: "LLMEngine") -> None:
    """Raises ValueError for an engine that gives embeddings or scores."""
    if (pooling := engine.model_config.pooling) is not None:
        works = "score() and classify() (POST /score, /rerank, /pooling)"
        if pooling.task == "embed":
            works = "embed() and score() (POST /v1/embeddings, /score, /rerank)"
        raise ValueError(f"runner='pooling', with which this model was loaded, samples no tokens: ask it by {works}")


def check_params(params: SamplingParams, model: ModelConfig) -> SamplingParams:
    """A copy of the parameters, in which -1 logprobs are as many as there are tokens. Raises ValueError.

    logprob_token_ids sets logprobs as well: outputs have logprobs where that is set.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be a SamplingParams, found {type(params).__name__}")
    params = params.clone()
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        check_range(f"a token id of {name}", getattr(params, name) or (), 0, model.vocab_size - 1)
    if params.logprob_token_ids:
        params.logprobs = len(params.logprob_token_ids)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) == -1:
            setattr(params, name, model.vocab_size)
        check_number(name, getattr(params, name) or 0, Integral, 0, model.vocab_size)
    _check_some_token_is_left(params, model)
    return params


def check_token_ids(engine: "LLMEngine", asked: Asked) -> None:
    """Raise a ValueError for a prompt that no step could compute."""
    token_ids, vocab_size = asked.token_ids, engine.model_config.vocab_size
    if not token_ids:
        raise ValueError("the prompt is empty: there is no token to continue from")
    max_tokens = most_prompt_tokens(engine, asked)
    if len(token_ids) > max_tokens:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens; max_model_len is {engine.scheduler.max_model_len}, prompt and "
            f"output together, so at most {max_tokens} fit"
        )
    if (at := next((i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size), None)) is not None:
        vocabulary = f"the vocabulary (0 to {vocab_size - 1})"
        raise ValueError(f"token id {shorten(token_ids[at])} at position {at} is outside {vocabulary}")


def most_prompt_tokens(engine: "LLMEngine", asked: Asked) -> int:
    """max_model_len, less a place for the first token if one is generated."""
    return engine.scheduler.max_model_len - (1 if asked.params.generates else 0)


def _check_some_token_is_left(params: SamplingParams, model: ModelConfig) -> None:
    if not params.min_tokens:
        return
    stop_ids = {*params.stop_token_ids, *model.eos_token_ids}
    allowed = range(model.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if stop_ids.issuperset(allowed):
        raise ValueError(f"before min_tokens={params.min_tokens}, so many stop_token_ids leave no token to choose")
