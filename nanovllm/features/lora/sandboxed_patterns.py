"""Which modules an adapter is for, and what its patterns say of each. See checks/sandbox.py.

The rules are those of the peft package: get_pattern_key() in its utils/other.py, check_target_module_exists() in its
tuners/tuners_utils.py. They look at the name that a module has in the model that was trained.
"""

import re
from collections.abc import Iterable
from typing import Any

Keys = tuple[str | None, str | None]  # of rank_pattern and of alpha_pattern; None: no key fits


def answer(options: dict[str, Any], modules: list[str]) -> list[Keys | None]:
    """For each module the keys that fit it; None for a module that the adapter is not for.

    options: of adapter_config.json. Raises ValueError for a pattern that is no regular expression.
    """
    found: list[Keys | None] = []
    for module in modules:
        rank_key = first_key(options.get("rank_pattern") or (), module)
        alpha_key = first_key(options.get("alpha_pattern") or (), module)
        found.append((rank_key, alpha_key) if is_target(options, module) else None)
    return found


def first_key(patterns: Iterable[str], module: str) -> str | None:
    """The first pattern that fits the whole name, or all that follows one of its dots."""
    return next((pattern for pattern in patterns if regex(pattern, r"(.*\.)?({})$").match(module)), None)


def is_target(options: dict[str, Any], module: str) -> bool:
    excluded, targets = options.get("exclude_modules"), options.get("target_modules")
    if excluded and is_named(excluded, module):
        return False
    if targets is None:  # the tensors of the file say it
        return True
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return module != "lm_head"
    return is_named(targets, module) and (
        isinstance(targets, str) or module in targets or is_in_layers(options, module)
    )


def is_named(names: str | list[str], module: str) -> bool:
    """names: a regular expression, or ends of modules' names."""
    if isinstance(names, str):
        return regex(names).fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def is_in_layers(options: dict[str, Any], module: str) -> bool:
    """By layers_to_transform. A layer's number is the first number in its name, or the one that a pattern precedes."""
    layers, patterns = options.get("layers_to_transform"), options.get("layers_pattern") or []
    if layers is None or layers == []:
        return True
    if patterns:
        listed = [patterns] if isinstance(patterns, str) else patterns
        matches = (regex(pattern, r"(?:^|.*?\.){}\.(?P<index>\d+)\.").match(module) for pattern in listed)
        found = next(filter(None, matches), None)
    else:
        found = re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", module)
    return found is not None and int(found["index"]) in ([layers] if isinstance(layers, int) else layers)


def regex(pattern: str, within: str = "{}") -> re.Pattern[str]:
    try:
        return re.compile(within.replace("{}", pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r:.80} is no regular expression: {error}") from None
