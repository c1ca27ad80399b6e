"""FairLock: several threads share one LLM. One steps at a time, for all of them (chapter 2 has the step)."""

from collections import deque
from threading import Lock

from nanovllm.checks.forks import check_process


class FairLock:
    """A lock, `with turns:`, that is handed over in the order of asking. Not reentrant.

    threading.Lock is not fair: a thread that makes step after step would take it again before those who wait wake up.
    """

    def __init__(self) -> None:
        self._mutex = Lock()
        # One for each thread that asked; the first has the turn, the others are locked.
        self._queue: deque[Lock] = deque()

    def __enter__(self) -> None:
        check_process()  # the turn may be a thread's that only the parent has
        mine = Lock()
        mine.acquire()
        with self._mutex:
            self._queue.append(mine)
            if self._queue[0] is mine:
                return
        try:
            mine.acquire()  # until the one before releases it
        except BaseException:  # Ctrl-C while waiting
            self._leave(mine)
            raise

    def __exit__(self, *error: object) -> None:
        self._leave(self._queue[0])

    def _leave(self, lock: Lock) -> None:
        with self._mutex:
            had_turn = self._queue[0] is lock
            self._queue.remove(lock)
            if had_turn and self._queue:
                self._queue[0].release()
