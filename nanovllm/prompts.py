"""From what a user gives to token ids: the forms of a prompt. The mirror of detokenizer.py. Chats: render.py."""

from collections.abc import Callable
from numbers import Integral
from typing import Any

from nanovllm.checks.names import known_names
from nanovllm.checks.values import shorten
from nanovllm.files.tokenizer import tokenize

Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def prompts_in(prompts: Any) -> list[Any]:
    """What a call is given: a list of token ids is one prompt, any other list is many."""
    if not isinstance(prompts, list | tuple):
        return [prompts]
    is_token_ids = bool(prompts) and all(isinstance(p, Integral) for p in prompts)
    return [list(prompts)] if is_token_ids else list(prompts)


def for_each(name: str, given: Any, num: int) -> list[Any]:
    """One of these for each prompt, of a list or of one for all. Raises ValueError."""
    if not isinstance(given, list | tuple):
        return [given] * num
    if len(given) != num:
        raise ValueError(f"{num} prompts need {num} {name} (or one for all), found {len(given)}")
    return list(given)


def parse_prompt(
    tokenizer: Any, prompt: Prompt, check: Callable[[str], None] = lambda text: None
) -> tuple[str | None, list[int], str | None]:
    """(text, token ids, cache salt) of a prompt in any of its forms. check: of a text before it is tokenized.

    Raises ValueError.
    """
    fields = prompt if isinstance(prompt, dict) else {}
    fields = known_names({str(key): value for key, value in fields.items()}, PROMPT_KEYS, "a prompt")
    salt = fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt must be a string that is not empty, found {salt!r}")
    text = prompt if isinstance(prompt, str) else fields.get("prompt")
    token_ids = prompt if isinstance(prompt, list | tuple) else fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt must be a string, found {type(text).__name__}")
    if token_ids is not None:
        types = set(map(type, token_ids)) if isinstance(token_ids, list | tuple) else {str}
        if not all(issubclass(t, Integral) and t is not bool for t in types):
            raise ValueError(f"prompt token ids must be a list of whole numbers, found {shorten(token_ids)}")
        return text, [int(t) for t in token_ids], salt
    if text is None:
        raise ValueError(
            "a prompt is a string, a list of token ids or a dict with 'prompt' or 'prompt_token_ids', "
            f"found {shorten(prompt)}"
        )
    check(text)
    return text, tokenize(tokenizer, text), salt
