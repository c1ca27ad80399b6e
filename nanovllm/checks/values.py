"""Checks of what a person passes in, each with an error that says what was found and what would work.

Every number is checked against what the tensors hold that it ends up in, and leaves as a plain Python number: NumPy's
integers and floats are taken wherever Python's are. A bool is not a number.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import suppress
from numbers import Integral
from typing import Any

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
MAX_FLOAT = 3.4e38  # float32 holds a little more
# Least value of a factor or divisor that must be above 0: products and quotients with it stay in float32's range.
MIN_POSITIVE, MAX_POSITIVE = 1e-10, 1e10

MAX_LISTED_ERRORS = 20
LOWEST_SEED, HIGHEST_SEED = -(2**63), 2**64 - 1  # as torch.manual_seed: it is hashed, and enters no tensor

OPTIONS_PAGE = "examples/move_to_vllm.md"  # lists all arguments, options, flags and fields

Bounds = tuple[Any, ...]  # of a number: Integral or Real, then least and most, where they are narrower than the type


def reject_unknown(
    given: Mapping[str, Any], known: Iterable[str], what: str, neutral: Mapping[str, list[Any]] = {}
) -> None:
    """Raise a ValueError for the first argument that `what` does not take, naming a similar one that it does.

    neutral: arguments that it takes at some values only, and these values.
    """
    names = list(known)
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.7)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            problem = f"has no argument {shorten(name)}"
            if name in neutral:
                problem = f"takes {shorten(name)} only as {' or '.join(map(repr, neutral[name]))}"
            raise ValueError(f"{what} {problem} (found {shorten(value)}){hint} {OPTIONS_PAGE} lists what it takes")


def check_number(name: str, value: Any, kind: type, low: float | None = None, high: float | None = None) -> Any:
    """`value` as an int or a float. ValueError unless it is of `kind` (Integral or Real) and in [low, high].

    Without bounds: what int64 or float32 holds.
    """
    limit = MAX_INT64 if kind is Integral else MAX_FLOAT
    low, high = -limit if low is None else low, limit if high is None else high
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if is_number:
        with suppress(OverflowError):  # of an integer that no float holds
            number = int(value) if kind is Integral else float(value)
            if low <= number <= high:  # NaN is not
                return number
    noun = "a whole number" if kind is Integral else "a number"
    show_high = high < limit or (is_number and not value < low)
    bounds = f" between {low} and {high}" if show_high else f" from {low}" if low > -limit else ""
    raise ValueError(f"{name} must be {noun}{bounds}, found {shorten(value)} ({type(value).__name__})")


def check_switch(name: str, value: Any) -> bool:
    """`value`, if it is true or false. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, found {shorten(value)}")
    return value


def check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, found {shorten(value)}")
    return value


def typed(config: dict[str, Any], name: str, default: Any, path: Any) -> Any:
    """A list, an object or a bool: whatever the default is."""
    value = config.get(name, default)
    if type(value) is not type(default):
        raise ValueError(f"{path}: {name} must be a {type(default).__name__}, found {shorten(value)}")
    return value


def numbers_of(config: dict[str, Any], bounds: Mapping[str, Bounds], where: Any) -> dict[str, Any]:
    """Those of the numbers that are there, each within its bounds."""
    return {n: check_number(f"{where}: {n}", config[n], *bounds[n]) for n in bounds if n in config}


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, found {shorten(value)}")


def size_of(name: str, text: str) -> int:
    """ "8k" is 8,000 and "8K" 8,192, as vLLM reads them; k, m, g and t. An "auto" max_model_len is -1."""
    found = re.fullmatch(r"([0-9]{1,15})(\.[0-9]{1,15})?([kmgtKMGT]?)", text.strip())
    if name == "max_model_len" and text.strip().lower() in ("auto", "-1"):
        return -1
    if found is None or (found[2] and not found[3].islower()):
        known = "a whole number, or one like '8k' (8,000), '8K' (8,192) or '2.5k'"
        raise ValueError(f"{name} must be {known}, found {shorten(text)}")
    power = " kmgt".index(found[3].lower() or " ")
    return int(float(found[1] + (found[2] or "")) * 1000**power) if found[3].islower() else int(found[1]) * 1024**power


def list_of(value: Any, kind: type, noun: str, name: str) -> list:
    """A list, tuple or set of `kind` (str or Integral) as a list; a dict's keys are a set.

    None is an empty one, and a string stands for itself. Of whole numbers each stays once: they are ids.
    """
    if value is None:
        return []
    if isinstance(value, str) and kind is str:
        return [value]
    is_list = isinstance(value, list | tuple | Set)
    if not is_list or not all(issubclass(t, kind) and t is not bool for t in set(map(type, value))):
        raise ValueError(f"{name} must be a list of {noun}, found {shorten(value)}")
    if kind is str:
        return list(value)
    ids = list(dict.fromkeys(map(int, value)))
    check_range(name, ids)
    return ids


def check_range(name: str, numbers: Collection[int], low: int | None = None, high: int | None = None) -> None:
    """check_number for whole numbers, of which there may be a hundred thousand: the least and the largest will do."""
    for number in (min(numbers), max(numbers)) if numbers else ():
        check_number(name, number, Integral, low, high)


def make_all(name: str, items: list[Any], make: Callable[[Any], Any]) -> list[Any]:
    """make(item) of each item, or one ValueError that lists, by index, all that it raised."""
    made, errors = [], []
    for index, item in enumerate(items):
        try:
            made.append(make(item))
        except ValueError as error:
            errors.append(f"{name}[{index}]: {error}")
    if len(errors) > MAX_LISTED_ERRORS:
        errors = [*errors[:MAX_LISTED_ERRORS], f"and {len(errors) - MAX_LISTED_ERRORS} more"]
    if errors:
        raise ValueError("\n".join(errors))
    return made


def shorten(value: Any, limit: int = 80) -> str:
    """repr(value), to be shown in an error."""
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4,300 digits, a nesting deeper than the stack
        text = "what cannot be printed"
    return text if len(text) <= limit else text[:limit] + "..."
