"""EngineThread: the one thread that touches an engine. It does what others ask for, makes a step, says what came of it.

Others are coroutines of an event loop. A reader finds the newest output of a request, never a queue of them: an output
holds all that was generated so far. So a slow reader misses nothing, holds no memory but that, and slows nobody.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import TIMEOUT_MAX, Condition
from typing import Any

from nanovllm.checks.callers import check_process, notify
from nanovllm.checks.exits import Worker, finish_at_exit
from nanovllm.engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.request import Request
from nanovllm.serving.suspects import Suspects

logger = logging.getLogger("nanovllm")


class StepFailed(RuntimeError):
    """A step fails with this request in it, also if that is alone. The engine goes on without the request."""


class EngineDied(RuntimeError):
    """The engine cannot go on: a rank or the GPU was lost, or it was shut down. Nothing is answered any more."""


class Reader:
    """The newest outputs of some requests, for one coroutine. It lives in the event loop."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.num_unfinished = len(requests)
        self.newest: dict[str, RequestOutput] = {}
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def take_in(self, output: RequestOutput) -> None:
        self.newest[output.request_id] = output
        self.num_unfinished -= output.finished
        self.changed.set()

    def fail(self, error: Exception) -> None:
        if self.num_unfinished:
            self.error = self.error or error
            self.changed.set()


class EngineThread:
    """Methods without an underscore may be called from any thread, those of the last section from this one only.

    readers              request id -> its reader; belongs to this thread
    steps_left, delay_s  how many steps may still be made, and the seconds between two (set_pace)
    on_death             called in the event loop when the engine has died; `error` says why
    on_end               told, in this thread, of requests that do not come to their own end, and "abort" or "error"
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.readers: dict[str, Reader] = {}
        self.steps_left, self.delay_s = math.inf, 0.0
        self.on_death: Callable[[], None] = lambda: None
        self.on_end: Callable[[list[Request], str], None] = lambda requests, reason: None
        self.error: EngineDied | None = None
        self.suspects = Suspects()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._next_step = 0.0  # time.monotonic()
        self._asked: deque[Callable[[], None]] = deque()
        self._wake = Condition()
        self._is_closing = self._is_over = self._is_exit = False
        self._thread: Worker | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin, unless it has begun. loop: where readers live. RuntimeError in another one, and in a child of fork."""
        check_process()
        if self._thread is None:
            self.loop = loop
            thread = Worker(target=self._run, name="engine", daemon=True)
            thread.start()
            self._thread = thread
            finish_at_exit(self)
        if loop is not self.loop:
            raise RuntimeError("an AsyncLLM belongs to one event loop, the one in which it was asked first")

    def end(self) -> None:
        """Let the thread end after its step; readers hear of it."""
        self._is_closing = True
        self.ask(lambda: None)

    def close(self) -> None:
        """End the thread, and wait until it has. Safe to call twice."""
        self.end()
        if self._thread is not None:
            self._thread.join()

    def finish(self, seconds: float) -> None:
        """The program ends: end the thread after its step. No reader is told: it is about to go, too."""
        self._is_exit = True
        self.end()
        if self._thread is not None:
            self._thread.finish(seconds)

    @property
    def is_usable(self) -> bool:
        return self.error is None and not self._is_closing

    def check_usable(self) -> None:
        """Raises EngineDied."""
        if not self.is_usable:
            raise self.error or EngineDied("the engine has been shut down")

    def ask(self, function: Callable[[], None]) -> None:
        """Let the thread do this before its next step."""
        with self._wake:
            if not self._is_over:
                self._asked.append(function)
                self._wake.notify()
                return
        function()

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Let the event loop do this. It may be closed: then nobody reads any more."""
        if self._is_exit:
            return
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)  # pyrefly: ignore[missing-attribute]

    def set_pace(self, steps_left: float = math.inf, delay_s: float = 0.0) -> None:
        """Make so many steps and pause (0: pause now; infinity: go on), with a delay between two. For teaching."""

        def change() -> None:
            self.steps_left, self.delay_s, self._next_step = steps_left, delay_s, 0.0

        self.ask(change)

    # -- the thread -----------------------------------------------------------------------------------------------

    def enqueue(self, reader: Reader) -> None:
        """Raises ValueError, or EngineDied."""
        self.check_usable()
        self.readers.update(dict.fromkeys(self.engine.enqueue(reader.requests), reader))

    def forget(self, requests: list[Request], reason: str = "abort") -> None:
        """End requests, queued or not; their blocks are free before the next step."""
        queued = self.engine.requests
        notify(self.on_end, [r for r in requests if not r.finished and queued.get(r.request_id) is r], reason)
        self.engine.abort_requests(requests)
        for request in requests:  # one that was refused may have the id of another
            reader = self.readers.get(request.request_id)
            if reader is not None and any(read is request for read in reader.requests):
                del self.readers[request.request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End those of these requests that are there. Their readers get what there is as their last output."""
        requests = [self.engine.requests[each] for each in dict.fromkeys(request_ids) if each in self.engine.requests]
        notify(self.on_end, requests, "abort")
        ended = [self.engine.abort_request(request.request_id) for request in requests]
        self.hand_out([output for output in ended if output is not None])

    def hand_out(self, outputs: list[RequestOutput]) -> None:
        """One message for a step, whatever the number of its readers."""
        read = [(self.readers[output.request_id], output) for output in outputs if output.request_id in self.readers]
        for _, output in read:
            if output.finished:
                del self.readers[output.request_id]
        if read:
            self.tell(_deliver, read)

    def _run(self) -> None:
        try:
            while self._wait_for_step():
                try:
                    outputs = self.engine.step()
                except Exception as error:
                    self._fail_step(error)
                else:
                    self.hand_out(outputs)
                    self._clear_suspects()
                self.steps_left -= 1
                self._next_step = time.monotonic() + self.delay_s
        except BaseException as error:
            logger.exception("the engine has died")
            self.error = EngineDied(f"the engine has died: {type(error).__name__}: {error}")
            self.tell(self.on_death)
        with self._wake:
            self._is_over = True
        for reader in set(self.readers.values()):
            self.tell(reader.fail, self.error or EngineDied("the engine has been shut down"))
        while self._asked:  # and nothing of it is kept: it knows the AsyncLLM
            with suppress(Exception):  # of an engine that is broken
                self._asked.popleft()()

    def _wait_for_step(self) -> bool:
        """Do what was asked for, until it is time for a step. False: it is over."""
        while not self._is_closing:
            with self._wake:
                if not self._asked and (seconds := self._seconds_to_step()) > 0:
                    self._wake.wait(min(seconds, TIMEOUT_MAX))
                num_asked = len(self._asked)
            for _ in range(num_asked):  # if one raises, the others are done when the thread ends
                self._asked.popleft()()  # and no variable keeps what it knows while the thread waits
            if not self._is_closing and self._seconds_to_step() <= 0:  # even if others go on asking
                return True
        return False

    def _seconds_to_step(self) -> float:
        if not self.engine.has_unfinished_requests() or self.steps_left <= 0:
            return math.inf
        return self._next_step - time.monotonic()

    def _fail_step(self, error: Exception) -> None:
        """Find out whose doing it was (suspects.py). Those that are given up end; the others are computed again."""
        logger.error("a step has failed", exc_info=error)
        if self.engine.model_runner.has_ended:  # a rank was lost, or the GPU computes nothing any more
            raise error
        given_up = self.suspects.step_failed(self._worked_on(), self.engine.requests)
        readers = {self.readers[request.request_id] for request in given_up if request.request_id in self.readers}
        self.forget(given_up, "error")
        for reader in readers:
            self.tell(reader.fail, StepFailed(f"{type(error).__name__}: {error}"))
        self._try_next_group()

    def _worked_on(self) -> list[Request]:
        """The requests of the step that failed; all that may have been, if it failed before it had chosen."""
        scheduled, unfinished = self.engine.last_scheduled, self.engine.requests
        if scheduled is not None and scheduled.chunks:
            ids = [chunk.seq.request_id for chunk in scheduled.chunks]
        elif self.suspects.groups:
            ids = [request.request_id for request in self.suspects.groups[0]]
        else:
            ids = list(unfinished)
        return [unfinished[request_id] for request_id in dict.fromkeys(ids) if request_id in unfinished]

    def _clear_suspects(self) -> None:
        if self.suspects.groups and self.suspects.has_passed():
            self.suspects.groups.popleft()
            self._try_next_group()

    def _try_next_group(self) -> None:
        self.engine.isolate(self.suspects.next_group() or None)


def _deliver(read: list[tuple[Reader, RequestOutput]]) -> None:
    for reader, output in read:
        reader.take_in(output)
