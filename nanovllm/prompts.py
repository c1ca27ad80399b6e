"""What a user gives -> checked token ids: the forms of a prompt, and what only the engine can say about a request.

SamplingParams has checked the rest of the parameters itself. features/chat_template makes prompts of chats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from nanovllm import wings
from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.names import known_names
from nanovllm.checks.values import check_number, check_range, shorten
from nanovllm.core.block_hash import MMSpan
from nanovllm.core.sequence import SequencePart
from nanovllm.files.prompt_length import PromptTooLong
from nanovllm.files.tokenizer import is_panic
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
IMAGE_KEYS = frozenset(("multi_modal_data", "mm_processor_kwargs"))
LIST_MAKERS = ("tolist", "to_list", "to_pylist")  # methods of NumPy, PyTorch and pandas; of Polars; of Arrow


def items_of(value: Any) -> list[Any] | None:
    """The items of a sequence of any library: a tuple, a deque, a column, a series, an array. None if it is none.

    A text is a value, not a sequence.
    """
    if isinstance(value, str | bytes | bytearray | memoryview):
        return None
    for name in LIST_MAKERS:
        if callable(method := getattr(value, name, None)):
            items = method()
            return items if isinstance(items, list) else None  # of an array without dimensions, a number
    return list(value) if isinstance(value, Sequence) else None


def split_prompts(prompts: Any) -> list[Any]:
    """The prompts of a call as a list. Token ids are one prompt; any other sequence holds one prompt per item."""
    items = items_of(prompts)
    if items is None:
        return [prompts]
    is_token_ids = bool(items) and all(isinstance(item, Integral) for item in items)
    return [items] if is_token_ids else items


def one_per_prompt(name: str, given: Any, num_prompts: int) -> list[Any]:
    """An argument's value for each prompt: `given` is a sequence of them, or one value for all prompts.

    Raises ValueError for a sequence of another length.
    """
    items = items_of(given)
    if items is None:
        return [given] * num_prompts
    if len(items) != num_prompts:
        raise ValueError(f"{num_prompts} prompts need {num_prompts} {name} (or one for all), found {len(items)}")
    return items


def parse_prompt(
    tokenizer: Any, prompt: Prompt, check: Callable[[str], None] = lambda text: None
) -> tuple[str | None, list[int], str | None]:
    """Returns (text, token ids, cache salt) of a prompt in any of its forms. Raises ValueError.

    check: called with a text before it is tokenized. It raises ValueError for a text that is too long.
    """
    if isinstance(prompt, dict):
        given: dict[str, Any] = {str(key): value for key, value in prompt.items()}
    elif isinstance(prompt, str):
        given = {"prompt": prompt}
    else:
        given = {"prompt_token_ids": items_of(prompt)}
    given = known_names(given, PROMPT_KEYS, "a prompt")
    text = given.get("prompt")
    given_ids = given.get("prompt_token_ids")
    salt = given.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt must be a string that is not empty, found {salt!r}")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt must be a string, found {type(text).__name__}")
    if given_ids is not None:
        token_ids = items_of(given_ids)
        if token_ids is None or not _are_whole_numbers(token_ids):
            raise ValueError(f"prompt token ids must be a list of whole numbers, found {shorten(given_ids)}")
        return text, [int(t) for t in token_ids], salt
    if text is None:
        raise ValueError(
            "a prompt is a string, a list of token ids or a dict with 'prompt' or 'prompt_token_ids', "
            f"found {shorten(prompt)}"
        )
    check(text)
    return text, tokenize(tokenizer, text), salt


def _are_whole_numbers(token_ids: Sequence[Any]) -> bool:
    types = set(map(type, token_ids))  # a long prompt has many numbers and few types
    return all(issubclass(t, Integral) and t is not bool for t in types)


def tokenize(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Raises ValueError for text that is not valid Unicode, or that the tokenizer fails at."""
    try:
        return tokenizer(text, **options).input_ids
    except BaseException as error:  # a panic in Rust is no Exception; what a signal handler raises goes on
        if isinstance(error, TypeError | LookupError | UnicodeError) or type(error) is Exception or is_panic(error):
            is_text = text.encode("utf-8", "replace") == text.encode("utf-8", "surrogatepass")
            what = "the tokenizer fails at the prompt" if is_text else "the prompt is not valid Unicode text"
            raise ValueError(f"{what} ({type(error).__name__}: {error}): {shorten(text)}") from error
        raise


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
    engine: "LLMEngine", prompt: Any, params: SamplingParams, *, lora_request: Any, priority: Any, request_id: Any
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
    longest = most_prompt_tokens(engine, asked)
    if len(token_ids) > longest:
        max_model_len = engine.scheduler.max_model_len
        what = f"the prompt has {len(token_ids)} tokens; max_model_len is {max_model_len}, prompt and output together"
        raise PromptTooLong(f"{what}, so at most {longest} fit", max_model_len)
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
