"""Ctrl-C during a call that makes steps: KeyboardInterrupt comes between two of them (chapter 2)."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from nanovllm.checks.callbacks import is_within
from nanovllm.engine import LLMEngine

Result = TypeVar("Result")


class CtrlC:
    """The handler of SIGINT while run() is on the stack. before: the one that it stands in for."""

    def __init__(self, engine: LLMEngine, before: Any) -> None:
        self.engine = engine
        self.before = before
        self.is_held = False

    def run(self, call: Callable[[], Result]) -> Result:
        signal.signal(signal.SIGINT, self)
        try:
            result = call()
        finally:
            signal.signal(signal.SIGINT, self.before)
        self.raise_held()
        return result

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Hold the first Ctrl-C back while the engine changes. A second one acts at once."""
        if not is_within(CtrlC.run, self, frame):  # an exception has kept run() from putting the other back
            signal.signal(signal.SIGINT, self.before)
            self.before(signum, frame)
        elif self.is_held or not is_within(LLMEngine._change, self.engine, frame):
            self.is_held = False
            raise KeyboardInterrupt
        else:
            self.is_held = True

    def raise_held(self) -> None:
        """Raise the KeyboardInterrupt that was held back, unless the engine still changes."""
        if self.is_held and not is_within(LLMEngine._change, self.engine, sys._getframe()):
            self.is_held = False
            raise KeyboardInterrupt


def between_steps(engine: LLMEngine, call: Callable[[], Result]) -> Result:
    """call(), which makes steps. Ctrl-C takes effect between two of them, in a notebook's cell with `await`, too.

    There the notebook's own handler cancels the cell, and a call that does not await would first run to its end. A
    handler of the program's own stays; only the main thread has any.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, CtrlC):
        if is_within(CtrlC.run, handler, sys._getframe()):  # of a call around this one
            result = call()
            handler.raise_held()
            return result
        handler = handler.before
    is_notebook = (getattr(handler, "__module__", None) or "").startswith("ipykernel.")
    if is_notebook or handler is signal.default_int_handler:
        return CtrlC(engine, handler).run(call)
    return call()
