"""A child of os.fork() has a copy of an engine's memory, but none of the threads that compute (chapter 10)."""

import os
from functools import cache

_is_child = False


@cache
def watch() -> None:
    """From now on, a process that is forked from this one fails check_process()."""
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(after_in_child=_mark)


def check_process() -> None:
    """Raises RuntimeError where PyTorch would wait for ever, for threads that the parent has: with a new LLM, too."""
    if _is_child:
        reason = "this process was forked from one that has an LLM, and has none of the threads that compute"
        remedy = "start processes with multiprocessing.get_context('spawn') and build an LLM in each"
        raise RuntimeError(f"{reason}; {remedy}")


def is_child() -> bool:
    """Was this process forked from one that has an LLM?"""
    return _is_child


def _mark() -> None:
    global _is_child
    _is_child = True
