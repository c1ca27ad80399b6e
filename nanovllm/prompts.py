"""Prompts: the forms that a user may give them in, and their token ids. features/chat_template does this for chats."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from nanovllm.checks.names import known_names
from nanovllm.checks.values import shorten
from nanovllm.files.tokenizer import tokenize

Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


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
    given = prompt if isinstance(prompt, dict) else {}
    fields = known_names({str(key): value for key, value in given.items()}, PROMPT_KEYS, "a prompt")
    salt = fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt must be a string that is not empty, found {salt!r}")
    text = prompt if isinstance(prompt, str) else fields.get("prompt")
    given_ids = fields.get("prompt_token_ids", prompt)
    token_ids = items_of(given_ids)  # None of a text, and of a dict without ids
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt must be a string, found {type(text).__name__}")
    if token_ids is not None or fields.get("prompt_token_ids") is not None:
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
