"""Checks of what a person passes in, each with an error that says what was found and what would work.

Every number is checked against what the tensors hold that it ends up in, and leaves as a plain Python number: NumPy's
integers and floats are taken wherever Python's are. A bool is not a number.
"""

import difflib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from numbers import Integral
from typing import Any

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
MAX_FLOAT = 3.4e38  # float32 holds a little more
# Least value of a factor or divisor that must be above 0: products and quotients with it stay in float32's range.
MIN_POSITIVE, MAX_POSITIVE = 1e-10, 1e10

Bounds = tuple[Any, ...]  # of a number: Integral or Real, then least and most, where they are narrower than the type
SEED: Bounds = (Integral, -(2**63), 2**64 - 1)  # as torch.manual_seed: it is hashed, and enters no tensor


def reject_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise a ValueError for the first name in `given` that `what` does not know, naming the nearest it does."""
    names = list(known)
    for name in given:
        if name not in names:
            nearest = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.0)[0]
            found = f"{what} has no argument {shorten(name)}"
            raise ValueError(f"{found}; did you mean {nearest!r}? It takes: {', '.join(names)}")


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


def check_fields(instance: Any, numbers: Mapping[str, Bounds]) -> None:
    """Check the numbers and bools of a frozen dataclass, and make the numbers plain."""
    for f in fields(instance):
        value: Any = getattr(instance, f.name)
        if f.name in numbers and not (value is None and isinstance(None, f.type)):  # type: ignore[arg-type]
            object.__setattr__(instance, f.name, check_number(f.name, value, *numbers[f.name]))
        if f.type is bool and not isinstance(value, bool):
            raise ValueError(f"{f.name} must be True or False, found {shorten(value)}")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, found {shorten(value)}")


def tuple_of(value: Any, kind: type, name: str, noun: str) -> tuple:
    """A list, tuple or set of `kind` (str or Integral) as a tuple; None is an empty one, a string stands for itself."""
    if value is None:
        return ()
    if isinstance(value, str) and kind is str:
        return (value,)
    items = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (None,)
    if any(not isinstance(item, kind) or isinstance(item, bool) for item in items):
        raise ValueError(f"{name} must be a list of {noun}, found {shorten(value)}")
    return items if kind is str else tuple(check_number(name, item, kind) for item in items)


def shorten(value: Any, limit: int = 80) -> str:
    """repr(value), to be shown in an error."""
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4,300 digits, a nesting deeper than the stack
        text = "what cannot be printed"
    return text if len(text) <= limit else text[:limit] + "..."
