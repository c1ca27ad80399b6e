"""What the arguments of one call of an LLM may be: one for all prompts, or one for each."""

from numbers import Integral
from typing import Any

from nanovllm.checks.vllm_names import accepted


def prompts_in(prompts: Any) -> list[Any]:
    """A list of token ids is one prompt, any other list is many."""
    if not isinstance(prompts, list | tuple):
        return [prompts]
    is_token_ids = bool(prompts) and all(isinstance(p, Integral) for p in prompts)
    return [list(prompts)] if is_token_ids else list(prompts)


def for_each(name: str, given: Any, num: int) -> list[Any]:
    """One for each prompt, of a list or of one for all. Raises ValueError."""
    if not isinstance(given, list | tuple):
        return [given] * num
    if len(given) != num:
        raise ValueError(f"{num} prompts need {num} {name} (or one for all), found {len(given)}")
    return list(given)


def check_priority(given: Any, num: int) -> None:
    """Raise a ValueError for another order than first come, first served."""
    for priority in for_each("priority", given, num) if isinstance(given, list | tuple) else [given]:
        accepted({"priority": priority}, (), "generate")
