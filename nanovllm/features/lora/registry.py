"""KnownAdapters: which adapters the requests of one engine have named (chapter 15)."""

from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import shorten
from nanovllm.config import EngineConfig
from nanovllm.core.sequence import Sequence
from nanovllm.features.lora.adapter import Adapter
from nanovllm.features.lora.request import LoRARequest


class KnownAdapters:
    """The adapters that requests have named so far. An id stands for the same weights as long as the engine lives.

    In memory are those of the requests that live, and the max_loras that were named last. Any thread may ask.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self.model, self.config = model, config
        self._known: dict[int, tuple[LoRARequest, str]] = {}  # first named so; digest
        self._alive: WeakValueDictionary[int, Adapter] = WeakValueDictionary()
        self._newest: dict[int, Adapter] = {}  # the least recently named first
        self._lock = Lock()

    @property
    def requests(self) -> list[LoRARequest]:
        return [request for request, _ in list(self._known.values())]  # of a copy: another thread may add to it

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(request.lora_name for request in self.requests)

    def named(self, name: Any) -> LoRARequest | None:
        return next((request for request in self.requests if request.lora_name == name), None)

    def may_run(self, seq: Sequence, running: list[Sequence]) -> bool:
        """Is there a slot for this sequence's adapter beside those of the sequences that run?"""
        used = {other.lora_id for other in (*running, seq)} - {None}
        return seq.lora_id is None or len(used) <= self.config.max_loras

    def check(self, request: Any) -> Adapter:
        """A request's adapter, in memory. Raises ValueError for one that cannot be used."""
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request must be a LoRARequest, found {shorten(request)}")
        if not self.config.enable_lora:
            raise ValueError(f"adapter {request.lora_name!r}: this LLM was built without enable_lora=True")
        lora_id = request.lora_int_id
        with self._lock:
            adapter = self._alive.get(lora_id)
            if adapter is None or adapter.request != request:
                adapter = Adapter.open(request, self.model, self.config)
                first, digest = self._known.setdefault(lora_id, (request, adapter.digest))
                if digest != adapter.digest:  # K/V that was computed with the first ones would be found
                    reason = f"lora_int_id {lora_id} is {first}, with other weights than {request.lora_path} has now"
                    raise ValueError(f"{reason}; they need another id")
                self._alive[lora_id] = adapter
            self._newest.pop(lora_id, None)
            self._newest[lora_id] = adapter
            if len(self._newest) > self.config.max_loras:
                del self._newest[next(iter(self._newest))]
            return adapter
