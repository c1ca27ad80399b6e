"""FairLock: several threads share one LLM. One steps at a time, for all of them (chapter 2 has the step).

A turn is data: a place in a queue, which holds as long as the call that took it is on its thread's stack. An exception
out of any line (Ctrl-C, a signal handler, a timeout) can keep a thread from giving its turn back, but not from leaving
that call. Then the next thread to ask finds that nobody has the turn.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import TypeVar

from nanovllm.checks.callers import WITHIN_A_STEP, check_process, is_within

Result = TypeVar("Result")
POLL_S = 0.05  # how long a turn that was lost may hold up the next


class Turn:
    """A place in the queue. The first has the turn, the others wait."""

    def __init__(self, queue: "deque[Turn]") -> None:
        self.queue = queue
        self.thread = get_ident()
        self.heard: SimpleQueue[None] = SimpleQueue()  # that it may be the first now

    def is_valid(self) -> bool:
        """Is the call that took it on its thread's stack?

        A stack that changes while it is read (a generator on it yields) may look as if it had ended: it is read anew.
        """
        return any(is_within(Turn.run, self, sys._current_frames().get(self.thread)) for _ in range(3))

    def run(self, work: Callable[[], Result]) -> Result:
        """work(), once all that asked earlier have left."""
        try:
            self.queue.append(self)
            while (first := self.queue[0]) is not self:
                if not first.is_valid():
                    first.leave()
                    continue
                with suppress(Empty):
                    self.heard.get(timeout=POLL_S)
            return work()
        finally:
            self.leave()

    def leave(self) -> None:
        """Safe to call twice."""
        with suppress(ValueError, IndexError):
            self.queue.remove(self)
            self.queue[0].heard.put(None)


class FairLock:
    """run(work) is done by one thread at a time, in the order of asking. Not reentrant: RuntimeError.

    threading.Lock is not fair: a thread that makes step after step would take it again before those who wait wake up.
    """

    def __init__(self) -> None:
        self.queue: deque[Turn] = deque()
        self._only: int | None = None  # the thread that ends the program

    def run(self, work: Callable[[], Result], *, within: bool = False) -> Result:
        """work(), in a turn of this thread. within: in the turn that it has, if it has one; for what a step allows."""
        check_process()  # the turn may be a thread's that only the parent has
        mine = next((turn for turn in self.queue.copy() if turn.thread == get_ident() and turn.is_valid()), None)
        if mine is None:
            return Turn(self.queue).run(partial(self._work, work))
        if within and mine is self.queue[0]:
            return work()
        raise RuntimeError(WITHIN_A_STEP)  # or a signal handler interrupts the waiting: it would wait for itself

    def _work(self, work: Callable[[], Result]) -> Result:
        if self._only not in (None, get_ident()):
            self.queue.popleft()
            SimpleQueue[None]().get()  # for ever: the program ends, and takes this thread away
        return work()

    def finish(self, seconds: float) -> None:
        """The program ends: wait until nobody has a turn. From now on only this thread gets one."""
        self._only = get_ident()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._is_taken_elsewhere():
            time.sleep(0.01)

    def _is_taken_elsewhere(self) -> bool:
        return any(turn.thread != self._only and turn.is_valid() for turn in self.queue.copy())
