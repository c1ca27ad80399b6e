"""Where a caller's code runs inside ours: what it raises, and what it may ask for (chapter 2).

A step calls logits processors, on_step and on_kv_events; a signal handler or a generator that is collected may run in
the middle of it, too. None of these may change what the step is working on.
"""

import logging
from collections.abc import Callable
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
