"""Options by their names: an unknown one is an error that names the nearest, one of vLLM's is judged by its value."""

from collections.abc import Collection
from dataclasses import field
from functools import wraps
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def option(default: Any, text: str) -> Any:
    """A dataclass's field with this default. text: what it means, and what --help says of its flag."""
    return field(default=default, metadata={"help": text})


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
