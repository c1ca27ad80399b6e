"""A program that ends while its threads compute.

Python takes daemon threads away when they next want to run its code. One that comes back from C++ or Rust then is
unwound through frames that allow no such thing, and the process ends with SIGABRT. So what a thread is doing is
finished first, and nothing new is begun.
"""

import atexit
import time
from threading import Thread
from typing import Protocol
from weakref import WeakSet

from nanovllm.checks.callers import is_forked_child

LIMIT_S = 30.0  # for all of them; one that hangs must not keep the program


class Working(Protocol):
    def finish(self, seconds: float) -> None:
        """End what is being done, and begin nothing; wait for it no longer than this."""


class Worker(Thread):
    """A daemon thread with one thing to do."""

    def finish(self, seconds: float) -> None:
        if self.is_alive():  # else it has not begun, or has ended
            self.join(seconds)


_working: WeakSet[Working] = WeakSet()


def finish_at_exit(working: Working) -> None:
    """When the program ends, finish this before everything that was registered earlier, stores and ranks among it."""
    _working.add(working)
    atexit.unregister(_finish)
    atexit.register(_finish)


def finish_with_others(working: Working) -> None:
    """The same for one of many, where something that lives as long has called finish_at_exit().

    Python keeps a place for each function that was registered, and looks through all of them to unregister one.
    """
    _working.add(working)


def _finish() -> None:
    if is_forked_child():  # those threads are the parent's
        return
    deadline = time.monotonic() + LIMIT_S
    for working in [*_working]:
        working.finish(max(deadline - time.monotonic(), 0.0))
