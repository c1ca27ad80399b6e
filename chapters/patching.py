"""Patching: labs and checks put other code into the engine for a while."""

import builtins
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import isfunction
from typing import Any

from chapters.expect import Wrong
from nanovllm import LLM
from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence

_OURS = [
    (owner, vars(owner).copy()) for owner in (Scheduler, BlockManager, BlockHasher, Sequence)
]  # before anybody patches


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is `value` for a while. The owner is a class, a module or an object of the engine."""
    assert hasattr(owner, name) or hasattr(builtins, name), f"{owner!r} has no {name}"
    is_own = name in vars(owner)
    ours = vars(owner).get(name)  # as it is stored: getattr() would bind a classmethod
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, ours) if is_own else delattr(owner, name)


@contextmanager
def yours_to_write(owner: type, *names: str) -> Iterator[None]:
    """These methods of ours do what a task asks for: a student's code that calls them is told so. The engine may."""

    def refusing(name: str) -> Any:
        ours = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("nanovllm."):
                raise Wrong(f"{name} does a part of this task. That part is yours to write: do it without {name}")
            return ours(*args, **kwargs)

        return method

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced(owner, name, refusing(name)))
        yield


@contextmanager
def use_manager(llm: LLM, manager: BlockManager) -> Iterator[None]:
    """The engine allocates from this manager for a while. It must not have more blocks than the KV cache."""
    with replaced(llm.engine, "block_manager", manager), replaced(llm.engine.scheduler, "block_manager", manager):
        yield


@contextmanager
def our_engine() -> Iterator[None]:
    """The core's classes have our methods for a while, whatever they are replaced by outside."""
    with ExitStack() as stack:
        for owner, ours in _OURS:
            for name, value in ours.items():
                if isfunction(value) and vars(owner)[name] is not value:
                    stack.enter_context(replaced(owner, name, value))
        yield
