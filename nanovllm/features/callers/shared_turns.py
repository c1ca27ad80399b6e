"""SharedTurns: an LLM that several threads use at once, Ctrl-C between two steps, and a progress bar (chapter 2)."""

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

from nanovllm.calls import Turns
from nanovllm.checks.callers import is_within
from nanovllm.checks.exits import finish_at_exit
from nanovllm.engine import LLMEngine
from nanovllm.features.callers.fair_lock import FairLock

Result = TypeVar("Result")


class SharedTurns(Turns):
    """See Turns for the methods."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.lock = FairLock()
        finish_at_exit(self.lock)

    def call(self, work: Callable[[], Result]) -> Result:
        """Ctrl-C takes effect between two turns, in a notebook's cell with `await`, too.

        There the notebook's own handler cancels the cell, and a call that does not await would first run to its end. A
        handler of the program's own stays; only the main thread has any.
        """
        if threading.current_thread() is not threading.main_thread():
            return work()
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, CtrlC):
            if is_within(CtrlC.run, handler, sys._getframe()):  # of a call around this one
                return work()
            handler = handler.before
        is_notebook = (getattr(handler, "__module__", None) or "").startswith("ipykernel.")
        if is_notebook or handler is signal.default_int_handler:
            return CtrlC(self.engine, handler).run(work)
        return work()

    def take(self, work: Callable[[], Result], *, within: bool = False) -> Result:
        result = self.lock.run(work, within=within)
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, CtrlC) and threading.current_thread() is threading.main_thread():
            handler.raise_held()
        return result

    def progress(self, total: int, show: bool) -> AbstractContextManager[Callable[[int], None]]:
        if total == 0 or not show:
            return super().progress(total, show)
        from nanovllm.features.callers.progress import progress_bar

        return progress_bar(self.engine.stats, self.engine.block_manager.stats, total)


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
