"""FairLock: several threads share one LLM. One steps at a time, for all of them (chapter 2 has the step)."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

from nanovllm.checks.callbacks import WITHIN_A_STEP
from nanovllm.checks.forks import check_process


class FairLock:
    """A lock, `with turns:`, that is handed over in the order of asking. Not reentrant: RuntimeError.

    threading.Lock is not fair: a thread that makes step after step would take it again before those who wait wake up.
    """

    def __init__(self) -> None:
        self._mutex = Lock()
        self._ends = Lock()  # held by who ends the program, for ever: others wait, and are taken away with it
        self._only: int | None = None  # that thread
        # One for each thread that asked; the first has the turn, the others are locked.
        self._queue: deque[tuple[Lock, int]] = deque()

    def is_mine(self) -> bool:
        """Has this thread the turn?"""
        try:
            return self._queue[0][1] == get_ident()
        except IndexError:
            return False

    @contextmanager
    def unless_mine(self) -> Iterator[None]:
        """Take a turn; for a thread that has it already, that one. For what is allowed in the middle of a step."""
        check_process()  # a child's thread may have the number of the parent's thread whose turn it is
        if self.is_mine():
            yield
            return
        with self:
            yield

    def __enter__(self) -> None:
        check_process()  # the turn may be a thread's that only the parent has
        if any(thread == get_ident() for _, thread in self._queue.copy()):
            raise RuntimeError(WITHIN_A_STEP)  # or a signal handler interrupts the waiting: it would wait for itself
        self._take()
        if self._only not in (None, get_ident()):
            self._leave(self._queue[0])
            self._ends.acquire()

    def _take(self, seconds: float = -1) -> bool:
        """Wait for a turn, no longer than this. False: it did not come."""
        lock = Lock()
        lock.acquire()
        mine = lock, get_ident()
        with self._mutex:
            self._queue.append(mine)
            if self._queue[0] is mine:
                return True
        came = False
        try:
            came = lock.acquire(timeout=seconds)  # until the one before releases it
        finally:
            if not came:  # in time, or before Ctrl-C
                self._leave(mine)
        return came

    def __exit__(self, *error: object) -> None:
        self._leave(self._queue[0])

    def finish(self, seconds: float) -> None:
        """The program ends: wait until nobody has a turn. From now on only this thread gets one."""
        self._only = get_ident()
        self._ends.acquire(blocking=False)
        if not self.is_mine() and self._take(seconds):
            self._leave(self._queue[0])

    def _leave(self, mine: tuple[Lock, int]) -> None:
        with self._mutex:
            had_turn = self._queue[0] is mine
            self._queue.remove(mine)
            if had_turn and self._queue:
                self._queue[0][0].release()
