"""Code of the caller's that is told what an engine does: what it raises harms nobody (chapter 2)."""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("nanovllm")


def told_to(observer: Callable[..., None], *news: Any) -> bool:
    """Call it. False if it raises, and the log says what. Ctrl-C and the like go on to the caller."""
    try:
        observer(*news)
    except Exception:
        name = getattr(observer, "__qualname__", None) or repr(observer)
        logger.exception("%s, which is told of every step, has failed; the step stays made", name)
        return False
    return True
