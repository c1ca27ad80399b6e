"""Options, which are fields of dataclasses: what they mean, what they may be, and what happens to unknown names."""

from collections.abc import Collection
from dataclasses import Field, field, fields
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from nanovllm.checks.values import Bounds, check_number, shorten

Class = TypeVar("Class", bound=type)


def option(default: Any, text: str, low: float | None = None, high: float | None = None, **more: Any) -> Any:
    """A dataclass's field with this default. text: what it means, and what --help says of its flag.

    low, high: bounds of a number; None: what the tensors hold that it ends up in. more: of dataclasses.field().
    """
    return field(default=default, metadata={"help": text, "low": low, "high": high}, **more)


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
    """Of an option that is a number."""
    return (Real if float in kinds_of(f.type) else Integral), f.metadata.get("low"), f.metadata.get("high")


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def known_names(given: dict[str, Any], known: Collection[str], what: str) -> dict[str, Any]:
    """What is given to `what` (a key of compat.names.TABLES), without vLLM's options that ask for nothing.

    Raises ValueError for those that ask for something, and for an unknown name, with the nearest known one.
    """
    if given.keys() <= set(known):
        return given
    from nanovllm.compat.names import accepted

    return accepted(given, known, what)


def names_checked(cls: Class) -> Class:
    """A dataclass whose constructor raises ValueError for an unknown argument and names the nearest known one.

    It also takes vLLM's and nano-vllm's options of the same purpose where they ask for nothing beyond what this engine
    does, and raises ValueError where they do.
    """
    known = cls.__dataclass_fields__  # type: ignore[attr-defined]
    with_known_names = cls.__init__  # type: ignore[misc]

    @wraps(with_known_names)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if not given.keys() <= known.keys():
            from nanovllm.compat.names import accepted_options

            given = accepted_options(given, type(self))
        with_known_names(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls
