"""KnownAdapters: which adapters the requests of one engine have named (chapter 15)."""

from dataclasses import replace
from itertools import count
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import MAX_INT32, shorten
from nanovllm.config import EngineConfig
from nanovllm.core.sequence import Sequence
from nanovllm.features.lora.adapter import Adapter
from nanovllm.features.lora.request import LoRARequest


class KnownAdapters:
    """The adapters that requests have named so far, or that were added. Any thread may ask.

    An id stands for the same weights until it is removed, or loaded in place. Other weights under it get a lora_id that
    no request can have, so K/V of the earlier ones is never found; sequences that run with those keep them.

    In memory are those of the requests that live, the max_loras that were named last, and those that are pinned.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self.model, self.config = model, config
        self._known: dict[int, tuple[LoRARequest, str]] = {}  # by lora_int_id: first named so; digest
        self._alive: WeakValueDictionary[int, Adapter] = WeakValueDictionary()
        self._newest: dict[int, Adapter] = {}  # the least recently named first
        self._pinned: dict[int, Adapter] = {}
        self._lora_ids: dict[tuple[int, str], int] = {}  # (lora_int_id, digest): of all that have been
        self._more_ids = count(MAX_INT32 + 1)
        self._lock = Lock()

    @property
    def requests(self) -> list[LoRARequest]:
        return [request for request, _ in list(self._known.values())]  # of a copy: another thread may add to it

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(request.lora_name for request in self.requests)

    def named(self, name: Any) -> LoRARequest | None:
        return next((request for request in self.requests if request.lora_name == name), None)

    def name_of(self, lora_id: int) -> str | None:
        """lora_name of the adapter with these weights; None if it has been removed or replaced."""
        known = list(self._known.values())
        now = (request for request, digest in known if self._lora_ids.get((request.lora_int_id, digest)) == lora_id)
        return next((request.lora_name for request in now), None)

    def digest_of(self, lora_id: int) -> str:
        """Of all that the adapter computes that has, or had, this lora_id."""
        return next(digest for (_, digest), number in list(self._lora_ids.items()) if number == lora_id)

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
        number = request.lora_int_id
        with self._lock:
            adapter = self._alive.get(number)
            if adapter is None or adapter.request != request or request.load_inplace:
                adapter = self._alive[number] = self._open(request)
                if number in self._pinned:
                    self._pinned[number] = adapter
            self._newest.pop(number, None)
            self._newest[number] = adapter
            if len(self._newest) > self.config.max_loras:
                del self._newest[next(iter(self._newest))]
            return adapter

    def _open(self, request: LoRARequest) -> Adapter:
        named = replace(request, load_inplace=False)  # what is kept asks for nothing
        adapter, number = Adapter.open(named, self.model, self.config), request.lora_int_id
        first, digest = self._known.get(number, (named, adapter.digest))
        if digest != adapter.digest and not request.load_inplace:
            reason = f"lora_int_id {number} is {first}, with other weights than {request.lora_path} has now"
            raise ValueError(f"{reason}; they need another id, or load_inplace=True")
        self._known[number] = (named if request.load_inplace else first), adapter.digest
        if (key := (number, adapter.digest)) not in self._lora_ids:
            was_used = any(number == other for other, _ in self._lora_ids)
            self._lora_ids[key] = next(self._more_ids) if was_used else number
        return replace(adapter, lora_id=self._lora_ids[key])

    # -- while the engine runs ------------------------------------------------------------------------------------

    def add(self, request: Any) -> bool:
        """Bring an adapter into memory. False if its id was known, and its files were not read anew. ValueError."""
        known = {*self._known}
        self.check(request)
        return request.load_inplace or request.lora_int_id not in known

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; its id and its name are free. What runs with it ends as it began. False: it is unknown."""
        with self._lock:
            for kept in (self._alive, self._newest, self._pinned):
                kept.pop(lora_int_id, None)
            return self._known.pop(lora_int_id, None) is not None

    def pin(self, lora_int_id: int) -> bool:
        """Let an adapter stay in memory until it is removed. Raises ValueError for an id that is not known."""
        if lora_int_id not in self._known:
            raise ValueError(f"no adapter has lora_int_id {shorten(lora_int_id)}; add_lora() it before")
        self._pinned[lora_int_id] = self.check(self._known[lora_int_id][0])
        return True

    def numbered(self, name: str, path: str, load_inplace: bool) -> LoRARequest:
        """A request for an adapter that has no id of its own: of its name, if that is known, or a free one."""
        known = self.named(name)
        number = 1 + max(self._known, default=0) if known is None else known.lora_int_id
        return LoRARequest(name, number, path, load_inplace)
