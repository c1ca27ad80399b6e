"""Methods that LLM and LLMEngine have because vLLM's do: what a script may call. Names and meanings are vLLM's.

on_kv_events is ours: vLLM tells of its blocks over sockets only.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.checks.vllm_refused import refused_method

if TYPE_CHECKING:
    from nanovllm.config import EngineConfig
    from nanovllm.engine import LLMEngine
    from nanovllm.features.assembly import Features
    from nanovllm.features.cache_reports.events import KVEventBatch
    from nanovllm.features.callers.metrics import Metric
    from nanovllm.features.callers.shared_engine import SharedEngine
    from nanovllm.features.lora.request import LoRARequest
    from nanovllm.outputs import RequestOutput
    from nanovllm.request import Request

Self = TypeVar("Self")


class EngineMethods:
    """A base of LLMEngine."""

    requests: "dict[str, Request]"
    tokenizer: Any
    features: "Features"

    @classmethod
    def from_engine_args(cls: type[Self], engine_args: "EngineConfig") -> Self:
        return cls(engine_args)  # type: ignore[call-arg]

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer (of transformers)."""
        return self.tokenizer

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_metrics(self) -> "list[Metric]":
        """Counters since the engine was built, under vLLM's names."""
        from nanovllm.features.callers.metrics import metrics_of

        return metrics_of(self)  # type: ignore[arg-type]

    @property
    def on_kv_events(self) -> "Callable[[KVEventBatch], None] | None":
        """Is called by who makes a step, when it has changed which blocks can be found (cache_reports/events.py).

        What it raises is logged. It may ask an LLM for stats() and abort(), and must not wait for an event loop.
        To set it raises ValueError without LLM(kv_events_config=...).
        """
        return None if self.features.kv_events is None else self.features.kv_events.on_batch

    @on_kv_events.setter
    def on_kv_events(self, follower: "Callable[[KVEventBatch], None] | None") -> None:
        if self.features.kv_events is None:
            example = 'kv_events_config={"enable_kv_cache_events": True, "publisher": "null"}'
            raise ValueError(f"KV events are not gathered: LLM({example}) asks for them")
        self.features.kv_events.on_batch = follower

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what PyTorch does until stop_profile(). Raises ValueError without LLM(profiler_config=...)."""
        from nanovllm.features.callers.profile import Profile

        self._profile = Profile.of(self, profile_prefix)  # type: ignore[arg-type]

    def stop_profile(self) -> None:
        """Write the trace. Nothing, if none was begun."""
        if (profile := self.__dict__.pop("_profile", None)) is not None:
            profile.stop()

    def add_lora(self, lora_request: "LoRARequest") -> bool:
        """Read an adapter before a request names it. False if it was there. Raises ValueError."""
        return self.features.known_adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. What runs with it ends as it began. False if there is none of this lora_int_id."""
        return self.features.known_adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The lora_int_ids of all adapters that are known."""
        return {request.lora_int_id for request in self.features.known_adapters.requests}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the CPU's memory, however many others are named. Raises ValueError for an unknown one."""
        return self.features.known_adapters.pin(lora_id)

    def __getattr__(self, name: str) -> Any:
        raise refused_method(type(self), name)


class LLMMethods:
    """A base of LLM."""

    engine: "LLMEngine"
    _shared: "SharedEngine"
    _requests: Any
    _complete: Any

    @classmethod
    def from_engine_args(cls: type[Self], engine_args: "EngineConfig") -> Self:
        return cls(**vars(engine_args))

    def enqueue(
        self, prompts: Any, sampling_params: Any = None, lora_request: Any = None, priority: Any = None, **neutral: Any
    ) -> list[str]:
        """Queue prompts, given as to generate(), and compute nothing yet. Returns the requests' ids."""
        requests = self._requests(prompts, sampling_params, lora_request, priority, **neutral)
        self._shared.enqueue(requests)
        self._shared.enqueued += requests
        return [request.request_id for request in requests]

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: bool = True) -> "list[RequestOutput]":
        """Compute what was enqueued. Outputs are in the order in which the prompts came.

        output_type: the outputs' type, which is RequestOutput.
        """
        requests, self._shared.enqueued = self._shared.enqueued, []
        return self._complete(requests, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer (of transformers)."""
        return self.engine.tokenizer

    def get_metrics(self) -> "list[Metric]":
        """See LLMEngine.get_metrics; stats() has more, under our names."""
        with self._shared.turns.unless_mine():
            return self.engine.get_metrics()

    @property
    def on_kv_events(self) -> "Callable[[KVEventBatch], None] | None":
        """See LLMEngine.on_kv_events."""
        return self.engine.on_kv_events

    @on_kv_events.setter
    def on_kv_events(self, follower: "Callable[[KVEventBatch], None] | None") -> None:
        self.engine.on_kv_events = follower

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """See LLMEngine.start_profile."""
        self.engine.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        """See LLMEngine.stop_profile."""
        self.engine.stop_profile()

    def __getattr__(self, name: str) -> Any:
        raise refused_method(type(self), name)
