"""AsyncLLM: the engine in a thread of its own, with an asyncio face. What a server needs; it works without one, too.

llm = AsyncLLM("path/or/hub-id")
async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
    print(output.outputs[0].text)
llm.shutdown()

The thread is in engine_thread.py; here is what a coroutine asks of it. Names and meanings are vLLM's.
"""

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

from nanovllm.checks.exits import Worker, finish_with_others
from nanovllm.checks.names import known_names
from nanovllm.checks.values import check_choice
from nanovllm.config import EngineConfig, check_config
from nanovllm.features.callers.output_kind import OutputFilter
from nanovllm.features.callers.snapshot import snapshot
from nanovllm.features.lora.lora_request import LoRARequest
from nanovllm.features.pooling.outputs import PoolingRequestOutput
from nanovllm.features.pooling.params import PoolingParams
from nanovllm.files.prompt_length import length_check
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.prompts import Prompt
from nanovllm.request import Request
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.serving.engine_thread import EngineDied, EngineThread, Reader, StepFailed

logger = logging.getLogger("nanovllm")
Result = TypeVar("Result")
PAUSE_MODES = ("abort", "wait", "keep")
GENERATE_ARGUMENTS = ("prompt", "sampling_params", "request_id", "lora_request", "priority", "timeout_s")
ENCODE_ARGUMENTS = ("truncate_prompt_tokens", "tokenization_kwargs", "lora_request", "priority", "timeout_s")
MAX_IMAGE_BYTES = 2 << 30  # of the images of all requests; a request that comes to these is refused
NUM_PREPARING_THREADS = 4  # prompts are tokenized beside the event loop; one slow template must not stop the others
NUM_OPENING_THREADS = 2  # of requests with images; one more for those with large ones, which may take many seconds


class Overloaded(RuntimeError):
    """Too many sequences wait, or too many images; this request was not taken."""


@dataclass(frozen=True)
class OpensImages(Generic[Result]):
    """What a function returns that prepare() calls: the rest of its work, for which images have to be opened.

    That takes long, and is done where no text waits for it. are_large: nor requests with smaller images
    """

    rest: Callable[[], Result]
    are_large: bool

    @classmethod
    def if_any(cls, prompts: list[Any], rest: Callable[[], Result]) -> "Result | OpensImages[Result]":
        """What rest() returns, if none of the prompts has images."""
        data = [prompt.get("multi_modal_data") for prompt in prompts if isinstance(prompt, dict)]
        images = [each.get("image") for each in data if isinstance(each, dict)]
        if not images:
            return rest()
        return cls(rest, any(getattr(each, "are_large", False) for each in images))


class AsyncLLM:
    """Options are LLM's. All methods are for one event loop, the one in which generate() is first used.

    max_waiting: a request with whose samples more sequences would wait is refused by Overloaded.
    """

    def __init__(self, model: str, *, max_waiting: int | None = None, **options: Any) -> None:
        self.llm = LLM(model, **options)
        self.engine = self.llm.engine
        self.engine.check_length = length_check(self.engine.tokenizer, self.engine.kv_pool.max_model_len)
        self.thread = EngineThread(self.engine)
        weakref.finalize(self, self.thread.end)  # an AsyncLLM that nobody has any more gives its memory back
        self.max_waiting = max_waiting
        self.readers: set[Reader] = set()  # of the requests that somebody waits for
        self._num_entering = 0  # sequences that are being prepared or on their way to the engine's queue
        self._with_images: weakref.WeakValueDictionary[int, Request] = weakref.WeakValueDictionary()  # by their id()
        self._counting = Lock()  # while a sequence goes from that number to the queue: it counts once at every moment
        self._preparing = asyncio.Semaphore(NUM_PREPARING_THREADS)
        self._opening = {False: asyncio.Semaphore(NUM_OPENING_THREADS), True: asyncio.Semaphore(1)}  # by are_large
        self._compiling = asyncio.Semaphore(1)  # grammars wait for each other, and nobody else for them

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **neutral: Any) -> "AsyncLLM":
        """engine_args: an AsyncEngineArgs or an EngineArgs. The engine's thread starts with the first request.

        neutral: start_engine_loop, usage_context and stat_loggers, at the values that ask for nothing.
        """
        known_names(neutral, ("engine_args",), "AsyncLLM.from_engine_args")
        return cls(**vars(check_config(engine_args)))

    # -- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int | None = None,
        timeout_s: float | None = None,
        **neutral: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Growing outputs of one prompt, the last with finished=True; sampling_params.output_kind says what they hold.

        Leaving the loop, or cancelling the task, aborts the request: its blocks are free before the next step. Raises
        ValueError for what cannot be run, Overloaded, StepFailed, EngineDied, and TimeoutError after timeout_s.
        """
        known_names(neutral, GENERATE_ARGUMENTS, "AsyncLLM.generate")
        params = self.llm.get_default_sampling_params() if sampling_params is None else sampling_params
        adapter = self._adapter_now(lora_request)

        def make() -> list[Request]:
            stream = getattr(params, "output_kind", None) is not RequestOutputKind.FINAL_ONLY
            options: dict[str, Any] = dict(request_id=request_id, stream=stream, compile_grammar=False)
            return [self.engine.make_request(prompt, params, adapter, priority, **options)]

        shown: OutputFilter | None = None
        async with aclosing(self.run(lambda: OpensImages.if_any([prompt], make), timeout_s)) as steps:
            async for outputs in steps:
                shown = shown or OutputFilter(params.output_kind)
                for output in outputs:
                    if (taken := shown.take(output)) is not None:
                        yield taken

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int | None = None,
        timeout_s: float | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The one output of a prompt, of an LLM with runner="pooling". The options are those of LLM.embed.

        Raises as generate() does.
        """
        from nanovllm.features.pooling.calls import truncation_of
        from nanovllm.features.pooling.requests import make_request

        known_names(more, ENCODE_ARGUMENTS, "AsyncLLM.encode")
        truncation = truncation_of(truncate_prompt_tokens, tokenization_kwargs)
        adapter = self._adapter_now(lora_request)

        def make() -> list[Request]:
            return [
                make_request(
                    self.engine, prompt, pooling_params, adapter, truncation, request_id=request_id, priority=priority
                )
            ]

        async with aclosing(self.run(make, timeout_s)) as steps:
            async for outputs in steps:
                for output in outputs:
                    yield output  # pyrefly: ignore[invalid-yield]

    async def run(
        self, make: Callable[[], list[Request] | OpensImages[list[Request]]], timeout_s: float | None = None
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """Several requests that belong together: what is new of any of them, until all have finished.

        make: makes the requests, as prepare() calls functions; their grammars are compiled here. See generate().
        """
        loop = asyncio.get_running_loop()
        self.thread.start(loop)
        began, too_late = loop.time(), TimeoutError(f"the request was not done after {timeout_s or 0:g} s")
        self._enter(1)
        try:
            requests = await wait_for(self._made(make), timeout_s)
        except asyncio.TimeoutError:
            raise too_late from None
        finally:
            with self._counting:
                self._num_entering -= 1
        num_samples = sum(request.params.n for request in requests)
        reader = Reader(requests)

        def enqueue() -> None:
            with self._counting:
                self._num_entering -= num_samples
                self.thread.enqueue(reader)

        self._enter(num_samples)
        timer = loop.call_at(began + timeout_s, reader.fail, too_late) if timeout_s else None
        self.readers.add(reader)
        try:
            await self.call(enqueue)
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
                self.thread.ask(lambda: self.thread.forget(requests))
            self.readers.discard(reader)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their readers get what there is as their last output. Unknown ids are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self.call(lambda: self.thread.abort(request_ids))

    # -- the engine, from the event loop --------------------------------------------------------------------------

    async def _made(self, make: Callable[[], list[Request] | OpensImages[list[Request]]]) -> list[Request]:
        requests = await self.prepare(make)
        with self._counting:
            self._with_images.update((id(request), request) for request in requests if request.num_held_bytes)
        if any(request.params.structured_outputs is not None for request in requests):
            await self.prepare(lambda: self.engine.compile_grammars(requests), self._compiling)
        return requests

    async def prepare(
        self, function: Callable[[], Result | OpensImages[Result]], places: asyncio.Semaphore | None = None
    ) -> Result:
        """function() in a thread beside the event loop: for tokenizing and whatever else does not touch the engine.

        A few at a time, and those that open images apart from the others. Raises Overloaded while the images of
        other requests take as much memory as they may.
        """
        result = await self._in_thread(function, places or self._preparing)
        if not isinstance(result, OpensImages):
            return result
        opens = result

        def open_images() -> Result:
            self._check_image_bytes()
            return opens.rest()

        return await self._in_thread(open_images, self._opening[result.are_large])

    async def _in_thread(self, function: Callable[[], Result], places: asyncio.Semaphore) -> Result:
        await places.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def run() -> None:
            settle = _settled(future, function)
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(settle)
                loop.call_soon_threadsafe(places.release)

        worker = Worker(target=run, name="prepare", daemon=True)
        finish_with_others(worker)  # self.llm has registered after its stores and ranks
        try:
            worker.start()
        except RuntimeError:  # the system has no thread left
            places.release()
            raise
        return await future

    async def call(self, function: Callable[[], Result]) -> Result:
        """function() in the engine's thread, between two steps; what it returns or raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self.thread.start(loop)
        self.thread.ask(lambda: self.thread.tell(_settled(future, function)))
        return await future

    async def stats(self) -> dict[str, Any]:
        """See LLM.stats."""
        return await self.call(lambda: snapshot(self.engine))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See LLMEngine.reset_prefix_cache."""
        return await self.call(lambda: self.engine.reset_prefix_cache(reset_running_requests, reset_connector))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See LLMEngine.add_lora, as for the next three."""
        return await self.prepare(lambda: self.engine.add_lora(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        return await self.prepare(lambda: self.engine.remove_lora(lora_id))  # may wait for one that is being read

    async def list_loras(self) -> set[int]:
        return self.engine.list_loras()

    async def pin_lora(self, lora_id: int) -> bool:
        return await self.prepare(lambda: self.engine.pin_lora(lora_id))

    async def check_health(self) -> None:
        """Raises EngineDied."""
        self.thread.check_usable()

    def shutdown(self) -> None:
        """Abort what runs and end the engine's thread. Safe to call twice."""
        self.thread.close()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _adapter_now(self, lora_request: Any) -> Any:
        """The adapter itself, if it is in memory: what is removed or replaced before the request is made stays its."""
        return None if lora_request is None else self.engine.known_adapters.at_once(lora_request)

    def _enter(self, num_samples: int) -> None:
        """Count these sequences as entering. Raises Overloaded if there is no room for them, EngineDied, ValueError."""
        self.thread.check_usable()
        limit = self.max_waiting
        with self._counting:
            num_waiting = len(self.engine.scheduler.waiting) + self._num_entering
            if limit is not None and num_samples > limit:
                raise ValueError(f"a request may have {limit} samples (max_waiting), found {num_samples}")
            if limit is not None and num_waiting + num_samples > limit:
                raise Overloaded(f"{num_waiting} sequences wait already (the limit is {limit}); try again later")
            self._num_entering += num_samples

    def _check_image_bytes(self) -> None:
        """Raises Overloaded. A few threads open images at a time, so those of as many requests may come on top."""
        with self._counting:
            unfinished = [request for request in self._with_images.values() if not request.finished]
        num_bytes = sum(request.num_held_bytes for request in unfinished)
        if num_bytes > MAX_IMAGE_BYTES:
            raise Overloaded(f"the images of other requests take {num_bytes:,} bytes already; try again later")

    # -- its state ------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Requests are taken."""
        return self.thread.is_usable

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """The engine has died or was shut down: nothing is answered any more."""
        return not self.is_running

    @property
    def dead_error(self) -> EngineDied:
        return self.thread.error or EngineDied("the engine has been shut down")

    @property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    def get_tokenizer(self) -> Any:
        """See LLM.get_tokenizer."""
        return self.llm.get_tokenizer()

    def get_num_unfinished_requests(self) -> int:
        """Those that somebody waits for; one that was left counts no more, even if its last step is being made."""
        return sum(reader.num_unfinished for reader in self.readers)

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    @property
    def output_processor(self) -> "AsyncLLM":
        """vLLM's scripts and tests ask it for has_unfinished_requests()."""
        return self

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """One line in the log, at level INFO."""
        stats = await self.stats()
        counts = stats["num_running"], stats["num_waiting"], stats["num_output_tokens"], 100 * stats["kv_pool"]["usage"]
        logger.info("%d sequences run, %d wait; %d tokens generated; %.1f %% of the KV pool in use", *counts)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """See LLMEngine.start_profile."""
        await self.call(lambda: self.engine.start_profile(profile_prefix))

    async def stop_profile(self) -> None:
        """See LLMEngine.stop_profile."""
        await self.call(self.engine.stop_profile)

    # -- pausing --------------------------------------------------------------------------------------------------

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Make no step until resume_generation(). Requests are taken, and wait.

        mode: what becomes of those that run: "abort" ends them now; "wait" lets them end first (requests that come
        meanwhile get steps, too); "keep" lets them go on later. clear_cache: forget all prefixes.

        Raises ValueError for "wait" while it is paused: those that run then would never end.
        """
        check_choice("mode", mode, PAUSE_MODES)
        engine, thread = self.engine, self.thread
        if mode == "wait":
            if await self.call(lambda: thread.steps_left <= 0 and engine.has_unfinished_requests()):
                raise ValueError('mode "wait" waits for requests, and they get no steps until resume_generation()')
            await self.wait_for_requests_to_drain(None)

        def pause() -> None:
            thread.steps_left = 0  # before the next step, which set_pace() would let pass
            if mode == "abort":
                thread.abort(list(engine.requests))
            if clear_cache:
                engine.reset_prefix_cache(reset_running_requests=True)

        await self.call(pause)

    async def resume_generation(self) -> None:
        """Go on where pause_generation() has stopped, at full speed."""
        self.thread.set_pace()

    async def is_paused(self) -> bool:
        return await self.call(lambda: self.thread.steps_left <= 0)

    async def wait_for_requests_to_drain(self, drain_timeout: float | None = 300) -> None:
        """Until the requests that are there now have ended. Raises TimeoutError after so many seconds; None: never."""
        engine = self.engine
        left = await self.call(lambda: list(engine.requests.values()))

        async def drained() -> None:
            while await self.call(lambda: any(engine.requests.get(r.request_id) is r for r in left)):
                await asyncio.sleep(0.005)

        try:
            await wait_for(drained(), drain_timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(f"after {drain_timeout:g} s requests were still there") from None


AsyncLLMEngine = EngineClient = AsyncLLM  # vLLM's older name for it, and its name for what a server asks
EngineDeadError, EngineGenerateError = EngineDied, StepFailed  # vLLM's names


async def wait_for(work: Coroutine[Any, Any, Result], timeout_s: float | None) -> Result:
    """asyncio.wait_for, except that a cancellation always gets through.

    Before Python 3.12 theirs loses one that comes in the moment in which the work is done.
    """
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()
    if not done:
        raise asyncio.TimeoutError
    return task.result()


def _settled(future: asyncio.Future[Result], function: Callable[[], Result]) -> Callable[[], None]:
    """Call the function; what to do in the future's event loop so that it has the result, or the error."""
    try:
        settle = partial(future.set_result, function())
    except BaseException as error:  # a panic of Rust is no Exception; whoever waits must not wait for ever
        known = isinstance(error, Exception)
        settle = partial(future.set_exception, error if known else RuntimeError(f"{type(error).__name__}: {error}"))
    return lambda: None if future.done() else settle()  # whoever waited may have gone
