"""Checks of what a person passes in, each with an error that says what was found and what would work."""

import difflib
import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any


def reject_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise a ValueError for the first name in `given` that `what` does not know, naming the nearest it does."""
    names = list(known)
    for name in given:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
            raise ValueError(f"{what} has no argument {name!r}; did you mean {nearest!r}? It takes: {', '.join(names)}")


def check_number(name: str, value: Any, kind: type, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise a ValueError unless `value` is a finite number of `kind` (Integral or Real) in [low, high]."""
    right_type = isinstance(value, kind) and not isinstance(value, bool)
    if right_type and math.isfinite(value) and low <= value <= high:
        return
    noun = "a whole number" if kind is Integral else "a number"
    bounds = "" if low == -math.inf else f" from {low}" if high == math.inf else f" between {low} and {high}"
    raise ValueError(f"{name} must be {noun}{bounds}, found {value!r} ({type(value).__name__})")
