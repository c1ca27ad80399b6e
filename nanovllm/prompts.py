"""Prompts: the forms that a user may give them in, and their token ids. features/chat_template does this for chats."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from nanovllm.checks.names import known_names
from nanovllm.checks.values import shorten
from nanovllm.files.tokenizer import tokenize

Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def split_prompts(prompts: Any) -> list[Any]:
    """The prompts of a call as a list. A list of token ids is one prompt; any other list holds one prompt per item."""
    if not isinstance(prompts, list | tuple):
        return [prompts]
    is_token_ids = bool(prompts) and all(isinstance(p, Integral) for p in prompts)
    return [list(prompts)] if is_token_ids else list(prompts)


def one_per_prompt(name: str, given: Any, num_prompts: int) -> list[Any]:
    """An argument's value for each prompt: `given` is a list of them, or one value for all prompts.

    Raises ValueError for a list of another length.
    """
    if not isinstance(given, list | tuple):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise ValueError(f"{num_prompts} prompts need {num_prompts} {name} (or one for all), found {len(given)}")
    return list(given)


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
    token_ids = prompt if isinstance(prompt, list | tuple) else fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt must be a string, found {type(text).__name__}")
    if token_ids is not None:
        if not isinstance(token_ids, list | tuple) or not _are_whole_numbers(token_ids):
            raise ValueError(f"prompt token ids must be a list of whole numbers, found {shorten(token_ids)}")
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
