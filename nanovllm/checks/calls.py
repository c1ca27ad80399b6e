"""What the arguments of one call of an LLM may be: one for all prompts, or one for each."""

from numbers import Integral
from typing import Any

from nanovllm.checks.values import check_number


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


def check_priority(given: Any, policy: str) -> int:
    """A request's priority; None is 0. Raises ValueError for one that this order of scheduling does not know."""
    priority = check_number("priority", 0 if given is None else given, Integral)
    if priority and policy != "priority":
        reason = f"priority={priority} asks for another order than first come, first served"
        raise ValueError(f"{reason}; leave it out, or start with scheduling_policy='priority'")
    return priority
