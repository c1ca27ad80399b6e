"""EngineClient: what code written for vLLM's AsyncLLM asks of one, beside generate(), abort() and shutdown()."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from nanovllm.checks.values import check_choice
from nanovllm.compat.names import accepted
from nanovllm.compat.refused import refused_method
from nanovllm.config import EngineConfig
from nanovllm.llm import LLM
from nanovllm.serving.engine_thread import EngineDied, EngineThread, Reader, StepFailed

logger = logging.getLogger("nanovllm")
EngineDeadError, EngineGenerateError = EngineDied, StepFailed  # vLLM's names
Client = TypeVar("Client", bound="EngineClient")
PAUSE_MODES = ("abort", "wait", "keep")


class EngineClient:
    """AsyncLLM's other half. Names and meanings are vLLM's."""

    llm: LLM
    thread: EngineThread
    readers: set[Reader]
    call: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
    stats: Callable[[], Coroutine[Any, Any, dict[str, Any]]]

    @classmethod
    def from_engine_args(cls: type[Client], engine_args: EngineConfig, **neutral: Any) -> Client:
        """engine_args: an AsyncEngineArgs or an EngineArgs. The engine's thread starts with the first request.

        neutral: start_engine_loop, usage_context and stat_loggers, at the values that ask for nothing.
        """
        accepted(neutral, ("engine_args",), "AsyncLLM")
        return cls(**vars(engine_args))

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
    def output_processor(self: Client) -> Client:
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
        await self.call(lambda: self.llm.engine.start_profile(profile_prefix))

    async def stop_profile(self) -> None:
        """See LLMEngine.stop_profile."""
        await self.call(self.llm.engine.stop_profile)

    # -- pausing --------------------------------------------------------------------------------------------------

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Make no step until resume_generation(). Requests are taken, and wait.

        mode: what becomes of those that run: "abort" ends them now; "wait" lets them end first (who comes meanwhile
        gets steps, too); "keep" lets them go on later. clear_cache: forget all prefixes.
        """
        check_choice("mode", mode, PAUSE_MODES)
        engine, thread = self.llm.engine, self.thread
        if mode == "wait":
            await self.wait_for_requests_to_drain(None)

        def pause() -> None:
            thread.steps_left = 0  # before the next step, which set_pace() would let pass
            if mode == "abort":
                thread.hand_out([o for i in list(engine.requests) if (o := engine.abort_request(i)) is not None])
            if clear_cache:
                engine.reset_prefix_cache(reset_running_requests=True)

        await self.call(pause)

    async def resume_generation(self) -> None:
        """Go on where pause_generation() has stopped. Nothing, if it has not."""
        self.thread.set_pace()

    async def is_paused(self) -> bool:
        return await self.call(lambda: self.thread.steps_left <= 0)

    async def wait_for_requests_to_drain(self, drain_timeout: float | None = 300) -> None:
        """Until the requests that are there now have ended. Raises TimeoutError after so many seconds; None: never."""
        engine = self.llm.engine
        left = await self.call(lambda: list(engine.requests.values()))

        async def drained() -> None:
            while await self.call(lambda: any(engine.requests.get(r.request_id) is r for r in left)):
                await asyncio.sleep(0.005)

        try:
            await asyncio.wait_for(drained(), drain_timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(f"after {drain_timeout:g} s requests were still there") from None

    def __getattr__(self, name: str) -> Any:
        raise refused_method(type(self), name)
