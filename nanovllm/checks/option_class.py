"""Classes of options: dataclasses whose constructor names an argument that it does not know."""

from dataclasses import field
from functools import wraps
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def option(default: Any, text: str) -> Any:
    """A dataclass's field with this default. text: what it means, and what --help says of its flag."""
    return field(default=default, metadata={"help": text})


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
