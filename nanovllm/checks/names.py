"""Options, which are fields of dataclasses: what they mean, what they may be, and what happens to unknown names."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, field, fields
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from nanovllm.checks.values import Bounds, check_number, reject_unknown, shorten

HAS_COMPAT = (Path(__file__).parents[1] / "compat").is_dir()  # the folder may be deleted
Class = TypeVar("Class", bound=type)


def option(default: Any, text: str, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass's field with this default. text: what it means, and what --help says of its flag.

    low, high: bounds of a number; None: what the tensors hold that it ends up in.
    """
    return field(default=default, metadata={"help": text, "low": low, "high": high})


def check_options(options: Any) -> None:
    """Check each field of a dataclass's object, and bring it into its one form. Raises ValueError."""
    for f in fields(options):
        object.__setattr__(options, f.name, check_option(f, getattr(options, f.name)))


def check_option(f: Field, value: Any) -> Any:
    """The value of an option, checked by its type if that is a number (it leaves as a plain one) or a bool."""
    kinds = kinds_of(f.type)
    if value is None and NoneType in kinds:
        return None
    if bool in kinds and not isinstance(value, bool):
        raise ValueError(f"{f.name} must be True or False, found {shorten(value)}")
    if int in kinds or float in kinds:
        return check_number(f.name, value, *bounds_of(f))
    return value


def bounds_of(f: Field) -> Bounds:
    """The bounds of an option that is a number."""
    return (Real if float in kinds_of(f.type) else Integral), f.metadata.get("low"), f.metadata.get("high")


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def known_names(given: Mapping[str, Any], known: Collection[str], what: str) -> dict[str, Any]:
    """The arguments that are given to `what`, without vLLM's at a value that changes nothing here.

    Raises ValueError for any other that is not known, with the values that are taken and a similar one that is known.
    """
    if not all(name in known for name in given):
        if HAS_COMPAT:  # it is loaded only for a script that needs it
            from nanovllm.compat.neutral import in_our_words

            given = in_our_words(given, known, what)
        reject_unknown(given, known, what, neutral_options(what))
    return dict(given)


def neutral_options(what: str) -> dict[str, list[Any]]:
    """vLLM's options that known_names() takes of `what` at some values, and these values."""
    if not HAS_COMPAT:
        return {}
    from nanovllm.compat.neutral import NEUTRAL

    return NEUTRAL.get(what, {})


def names_checked(what: str) -> Callable[[Class], Class]:
    """A dataclass whose constructor takes what known_names() takes of `what`, and raises its error for anything else.

    The constructor that dataclass() makes is called by one that looks at the names: Python's own error for an unknown
    one is a TypeError, and names no other. Nothing else in this package replaces an `__init__`, and this one says so at
    the class.
    """

    def check_names_of(cls: Class) -> Class:
        known = cls.__dataclass_fields__  # pyrefly: ignore[missing-attribute]
        with_known_names = cls.__init__

        @wraps(with_known_names)
        def __init__(self: Any, *args: Any, **given: Any) -> None:
            with_known_names(self, *args, **known_names(given, known, what))

        cls.__init__ = __init__
        return cls

    return check_names_of
