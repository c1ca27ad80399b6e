"""Where a caller's code meets ours at a bad moment: within a step, in a forked process, with Ctrl-C during an import.

A step calls logits processors, on_step and on_kv_events; a signal handler or a generator that is collected may run in
the middle of it, too. None of these may change what the step is working on (chapter 2).
"""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

logger = logging.getLogger("nanovllm")

WITHIN_A_STEP = (
    "this was asked for in the middle of a step, by code that the step calls (a logits processor, on_step, "
    "on_kv_events, a signal handler). There stats() and abort() are answered; whatever else changes the engine has to "
    "wait for the step's end"
)


def notify(observer: Callable[..., None], *news: Any) -> bool:
    """Call it. False if it raises, and the log says what. Ctrl-C and the like go on to the caller."""
    try:
        observer(*news)
    except Exception:
        name = getattr(observer, "__qualname__", None) or repr(observer)
        logger.exception("%s, which is told of every step, has failed; the step stays made", name)
        return False
    return True


def is_within(function: Callable[..., Any], owner: Any, frame: FrameType | None) -> bool:
    """Is this frame function(owner, ...), or has that called it, directly or not?

    The stack knows it even after an exception out of any line, when a flag may not have been taken back.
    """
    while frame is not None:
        if frame.f_code is function.__code__ and frame.f_locals.get("self") is owner:
            return True
        frame = frame.f_back
    return False


_is_child = False


@cache
def watch_forks() -> None:
    """From now on, a process that is forked from this one fails check_process()."""
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(after_in_child=_mark)


def check_process() -> None:
    """Raises RuntimeError in a child of os.fork(): it has a copy of an engine, and none of the threads that compute.

    There PyTorch would wait for ever, for threads that the parent has: with a new LLM, too.
    """
    if _is_child:
        reason = "this process was forked from one that has an LLM, and has none of the threads that compute"
        remedy = "start processes with multiprocessing.get_context('spawn') and build an LLM in each"
        raise RuntimeError(f"{reason}; {remedy}")


def is_forked_child() -> bool:
    """Was this process forked from one that has an LLM?"""
    return _is_child


def _mark() -> None:
    global _is_child
    _is_child = True


keep_imports = False  # set in a process of our own (tools/own_process.py): nobody else's garbage is there


@contextmanager
def importing() -> Iterator[None]:
    """Torch and transformers may be imported within: a Ctrl-C comes out as one, and Python collects no garbage.

    Before 3.12 Python makes a RuntimeError of what is raised in a __set_name__, and others make errors of that. And its
    garbage collector would look at half a million new objects again and again, for a quarter of the time.
    """
    handled = sys.exc_info()[1]  # outside: not what an error in here is made of
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and found is not handled:
            if isinstance(found, KeyboardInterrupt):
                raise found from None
            found = found.__cause__ or found.__context__
        raise
    finally:
        if keep_imports:
            gc.freeze()  # what is there now is never looked at again
        if collects:
            gc.enable()
