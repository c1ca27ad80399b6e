"""AsyncLLM: the engine in a thread of its own, with an asyncio face. What a server needs; it works without one, too.

llm = AsyncLLM("path/or/hub-id")
async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
    print(output.outputs[0].text)
llm.shutdown()

One thread touches the engine: it does what others ask for, makes a step, tells the event loop what came of it. A reader
finds the newest output of a request, never a queue of them: an output holds all that was generated so far. So a slow
reader misses nothing, holds no memory but that, and slows nobody.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from threading import TIMEOUT_MAX, Condition, Thread
from typing import Any, TypeVar

from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.prompts import Prompt
from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.stats import snapshot

logger = logging.getLogger("nanovllm")

Result = TypeVar("Result")
NUM_PREPARING_THREADS = 4  # prompts are tokenized beside the event loop; one slow template must not stop the others


class Overloaded(RuntimeError):
    """Too many sequences wait; this request was not taken."""


class StepFailed(RuntimeError):
    """The step that worked on this request failed. The engine goes on without the request."""


class EngineDied(RuntimeError):
    """The engine cannot go on: a rank was lost, or it fails whatever it is asked. Nothing is answered any more."""


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


class AsyncLLM:
    """Options are LLM's. All methods are for one event loop, the one in which generate() is first used.

    max_waiting: as soon as so many sequences wait, more requests are refused by Overloaded.
    steps_left, delay_s: how many steps may still be made, and the seconds between two: for teaching (see set_pace).
    on_death: called in the event loop when the engine has died.
    """

    def __init__(self, model: str, *, max_waiting: int | None = None, **options: Any) -> None:
        self.llm = LLM(model, **options)
        self.engine = self.llm.engine
        self.max_waiting = max_waiting
        self.on_death: Callable[[], None] = lambda: None
        self.error: EngineDied | None = None
        self.steps_left, self.delay_s = math.inf, 0.0
        self._next_step = 0.0  # time.monotonic()
        self._num_entering = 0  # sequences that are being prepared or on their way to the engine
        self._readers: dict[str, Reader] = {}  # request id -> who reads it; belongs to the engine's thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: list[Callable[[], None]] = []  # what the engine's thread has to do before its next step
        self._wake = Condition()
        self._is_closing = self._is_over = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._preparing = ThreadPoolExecutor(NUM_PREPARING_THREADS, "prepare")

    # -- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Growing outputs of one prompt, the last with finished=True.

        Leaving the loop, or cancelling the task, aborts the request: its blocks are free before the next step. Raises
        ValueError for what cannot be run, Overloaded, StepFailed, EngineDied, and TimeoutError after timeout_s.
        """
        params = sampling_params or self.llm.get_default_sampling_params()

        def make() -> list[Request]:
            return [self.engine.make_request(prompt, params, request_id=request_id, stream=True)]

        async with aclosing(self.run(make, timeout_s)) as steps:
            async for outputs in steps:
                for output in outputs:
                    yield output

    async def run(
        self, make: Callable[[], list[Request]], timeout_s: float | None = None
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """Several requests that belong together: what is new of any of them, until all have finished.

        make: makes the requests, in a thread beside the event loop. See generate().
        """
        self._check_room()
        self._num_entering += 1  # others that come meanwhile count it
        try:
            requests = await self.prepare(make)
        finally:
            self._num_entering -= 1
        num_samples = sum(request.params.n for request in requests)
        reader, loop = Reader(requests), asyncio.get_running_loop()
        seconds = f"the request was not done after {timeout_s:g} s" if timeout_s else ""
        timer = loop.call_later(timeout_s, reader.fail, TimeoutError(seconds)) if timeout_s else None
        self._num_entering += num_samples
        try:
            try:
                await self.call(lambda: self._enqueue(reader))
            finally:
                self._num_entering -= num_samples
            while reader.num_unfinished or reader.newest:
                await reader.changed.wait()
                reader.changed.clear()
                if reader.error is not None:
                    raise reader.error
                outputs, reader.newest = list(reader.newest.values()), {}
                yield outputs
        finally:
            if timer is not None:
                timer.cancel()
            if reader.num_unfinished:
                self._ask(lambda: self._forget(requests))

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets what there is as its last output. Unknown ids are ignored."""

        def end() -> None:
            if (output := self.engine.abort_request(request_id)) is not None:
                self._hand_out([output])

        await self.call(end)

    # -- the engine, from the event loop --------------------------------------------------------------------------

    async def prepare(self, function: Callable[[], Result]) -> Result:
        """function() in a thread beside the event loop: for tokenizing and whatever else does not touch the engine."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, function)

    async def call(self, function: Callable[[], Result]) -> Result:
        """function() in the engine's thread, between two steps; what it returns or raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(method: str, value: Any) -> None:
            if not future.done():  # who waited may have gone
                getattr(future, method)(value)

        def run() -> None:
            try:
                method, value = "set_result", function()
            except Exception as error:
                method, value = "set_exception", error  # type: ignore[assignment]
            self._tell(settle, method, value)

        if self._loop is None:
            self._loop = loop
            self._thread.start()
        assert loop is self._loop, "an AsyncLLM belongs to one event loop"
        self._ask(run)
        return await future

    async def stats(self) -> dict[str, Any]:
        """See LLM.stats."""
        return await self.call(lambda: snapshot(self.engine))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See LLMEngine.reset_prefix_cache."""
        return await self.call(lambda: self.engine.reset_prefix_cache(reset_running_requests))

    async def check_health(self) -> None:
        """Raises EngineDied."""
        if self.error is not None:
            raise self.error

    def set_pace(self, steps_left: float = math.inf, delay_s: float = 0.0) -> None:
        """Make so many steps and pause (0: pause now; infinity: go on), with a delay between two. For teaching."""

        def change() -> None:
            self.steps_left, self.delay_s, self._next_step = steps_left, delay_s, 0.0

        self._ask(change)

    def shutdown(self) -> None:
        """Abort what runs and end the engine's thread. Safe to call twice."""
        self._is_closing = True
        if self._thread.is_alive():
            self._ask(lambda: None)
            self._thread.join()
        self._preparing.shutdown(cancel_futures=True)

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # -- helpers --------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.error is not None or self._is_closing:
            raise self.error or EngineDied("the engine has been shut down")

    def _check_room(self) -> None:
        self._check_usable()
        num_waiting = len(self.engine.scheduler.waiting) + self._num_entering
        if self.max_waiting is not None and num_waiting >= self.max_waiting:
            raise Overloaded(f"{num_waiting} sequences wait already (the limit is {self.max_waiting}); try again later")

    def _ask(self, function: Callable[[], None]) -> None:
        """Let the engine's thread do this before its next step."""
        with self._wake:
            if not self._is_over:
                self._asked.append(function)
                self._wake.notify()
                return
        function()

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Let the event loop do this. It may be closed: then nobody reads any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[union-attr]

    # -- the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_step():
                try:
                    outputs = self.engine.step()
                except Exception as error:
                    self._fail_step(error)
                else:
                    self._hand_out(outputs)
                self.steps_left -= 1
                self._next_step = time.monotonic() + self.delay_s
        except BaseException as error:
            logger.exception("the engine has died")
            self.error = EngineDied(f"the engine has died: {type(error).__name__}: {error}")
            self._tell(self.on_death)
        with self._wake:
            self._is_over = True
        for function in self._asked:
            function()
        for reader in set(self._readers.values()):
            self._tell(reader.fail, self.error or EngineDied("the engine has been shut down"))

    def _wait_for_step(self) -> bool:
        """Do what was asked for, until it is time for a step. False: it is over."""
        while not self._is_closing:
            with self._wake:
                if not self._asked:
                    if (seconds := self._seconds_to_step()) <= 0:
                        return True
                    self._wake.wait(min(seconds, TIMEOUT_MAX))
                asked, self._asked = self._asked, []
            for function in asked:
                function()
        return False

    def _seconds_to_step(self) -> float:
        if not self.engine.has_unfinished_requests() or self.steps_left <= 0:
            return math.inf
        return self._next_step - time.monotonic()

    def _enqueue(self, reader: Reader) -> None:
        self._check_usable()
        self._readers.update(dict.fromkeys(self.engine.enqueue(reader.requests), reader))

    def _forget(self, requests: list[Request]) -> None:
        self.engine.abort_requests(requests)
        for request in requests:  # one that was refused may have the id of another
            reader = self._readers.get(request.request_id)
            if reader is not None and any(read is request for read in reader.requests):
                del self._readers[request.request_id]

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        """One message for a step, whatever the number of its readers."""
        read = [(self._readers[output.request_id], output) for output in outputs if output.request_id in self._readers]
        for _, output in read:
            if output.finished:
                del self._readers[output.request_id]
        if read:
            self._tell(_deliver, read)

    def _fail_step(self, error: Exception) -> None:
        """End the requests that the step worked on; all, if it failed before it had chosen."""
        logger.error("a step has failed", exc_info=error)
        scheduled = self.engine.scheduled
        worked_on = {chunk.seq.seq_id for chunk in scheduled.chunks} if scheduled is not None else set()
        requests = [
            request
            for request in self.engine.requests.values()
            if scheduled is None or any(sample.seq.seq_id in worked_on for sample in request.samples)
        ]
        readers = {self._readers[r.request_id] for r in requests if r.request_id in self._readers}
        self._forget(requests)
        for reader in readers:
            self._tell(reader.fail, StepFailed(f"{type(error).__name__}: {error}"))
        if getattr(self.engine.model_runner, "has_ended", False):  # of ranks; one alone ends with its process
            raise error


def _deliver(read: list[tuple[Reader, RequestOutput]]) -> None:
    for reader, output in read:
        reader.take_in(output)
