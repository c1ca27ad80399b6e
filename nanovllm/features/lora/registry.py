"""KnownAdapters: which adapters the requests of one engine have named (chapter 15)."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from numbers import Integral
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import MAX_INT32, check_number, shorten
from nanovllm.config import EngineConfig
from nanovllm.core.sequence import Sequence
from nanovllm.features.lora.adapter import Adapter
from nanovllm.features.lora.lora_request import LoRARequest

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine
    from nanovllm.prompts import Asked

logger = logging.getLogger("nanovllm")

Known = tuple[LoRARequest, str]  # named so first, or when it was loaded in place; digest of its weights


def make(engine: "LLMEngine") -> "KnownAdapters":
    """See wings.ON_DEMAND."""
    return KnownAdapters(engine.model_config, engine.config)


def read(engine: "LLMEngine", asked: "Asked") -> None:
    """See wings.READERS."""
    adapter = engine.known_adapters.check(asked.lora_request)
    asked.lora_id, asked.parts["adapter"] = adapter.lora_id, adapter


class KnownAdapters:
    """The adapters that requests have named so far, or that were added. Any thread may ask.

    A name is resolved once: whoever has the Adapter keeps these weights, and what becomes of the name does not matter.

    An id stands for the same weights until it is removed, or loaded in place. Other weights under it get a lora_id that
    no request can have, so K/V of the earlier ones is never found; sequences that run with those keep them.

    In memory are those of the requests that live, the max_loras that were named last, and those that are pinned.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self.model, self.config = model, config
        self._known: dict[int, Known] = {}  # by lora_int_id
        self._alive: WeakValueDictionary[int, Adapter] = WeakValueDictionary()
        self._newest: dict[int, Adapter] = {}  # the least recently named first
        self._pinned: dict[int, Adapter] = {}
        self._lora_ids: dict[tuple[int, str], int] = {}  # (lora_int_id, digest): of all that have been
        self._more_ids = count(MAX_INT32 + 1)
        self._num_removals: Counter[int] = Counter()  # by lora_int_id
        self._lock = Lock()  # of all that is above; nobody waits for a disk while holding it
        self._reading = Lock()  # one reads files at a time

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
        """The digest of all that the adapter computes which has, or had, this lora_id."""
        return next(digest for (_, digest), number in list(self._lora_ids.items()) if number == lora_id)

    def may_run(self, seq: Sequence, running: list[Sequence]) -> bool:
        """Is there a slot for this sequence's adapter beside those of the sequences that run?"""
        used = {other.lora_id for other in (*running, seq)} - {None}
        return seq.lora_id is None or len(used) <= self.config.max_loras

    # -- a request's adapter --------------------------------------------------------------------------------------

    def check(self, request: "LoRARequest | Adapter") -> Adapter:
        """A request's adapter, in memory: read and entered if need be. Raises ValueError for one that cannot be used.

        An Adapter, from resolve(), is what it is, whatever has become of its name.
        """
        if isinstance(request, Adapter):
            return request
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request must be a LoRARequest, found {shorten(request)}")
        if not self.config.enable_lora:
            raise ValueError(f"adapter {request.lora_name!r}: this LLM was built without enable_lora=True")
        number = request.lora_int_id
        with self._lock:
            num_removals = self._num_removals[number]
            if (adapter := self._in_memory(request)) is not None:
                return adapter
        with self._reading:
            with self._lock:
                if (adapter := self._in_memory(request)) is not None:  # somebody has read it meanwhile
                    return adapter
            adapter = Adapter.open(replace(request, load_inplace=False), self.model, self.config)
            with self._lock:
                if self._num_removals[number] != num_removals:  # removed meanwhile: this request alone has it
                    return replace(adapter, lora_id=self._lora_id(adapter))
                return self._enter(adapter, request.load_inplace)

    def at_once(self, request: "LoRARequest | Adapter | None") -> "LoRARequest | Adapter | None":
        """What check() gives, if that is in memory; otherwise the request."""
        if not isinstance(request, LoRARequest):
            return request
        with self._lock:
            return self._in_memory(request) or request

    def resolve(self, name: Any) -> Adapter | None:
        """The adapter that a name stands for at this moment. None: there is none.

        Raises ValueError, which says no path, if it has left the memory and its files are not what they were.
        """
        return self._current(
            lambda: next((known for known in self._known.values() if known[0].lora_name == name), None)
        )

    def _current(self, find: Callable[[], Known | None]) -> Adapter | None:
        """The adapter that is known as what find() says, under the lock; read again if it is not in memory."""
        while True:
            with self._lock:
                known = find()
                if known is None:
                    return None
                if (adapter := self._alive_as(known)) is not None:
                    return self._use(adapter)
            with self._reading:
                with self._lock:
                    if find() is not known or self._alive_as(known) is not None:
                        continue
                read, reason = self._read_again(known)
                with self._lock:
                    if find() is not known:  # removed or replaced while it was read
                        continue
                    if read is not None:
                        return self._enter(read, False)
            name = known[0].lora_name
            logger.error("adapter %r has left the memory, and cannot be read again: %s", name, reason)
            raise ValueError(f"the files of adapter {name!r} are not what was loaded; it must be loaded again")

    def _read_again(self, known: Known) -> tuple[Adapter | None, str]:
        """(the adapter, or None, and why)."""
        try:
            adapter = Adapter.open(known[0], self.model, self.config)
        except (ValueError, OSError) as error:
            return None, str(error)
        if adapter.digest != known[1]:
            return None, f"{known[0].lora_path} has other weights"
        return adapter, ""

    # -- under the lock -------------------------------------------------------------------------------------------

    def _in_memory(self, request: LoRARequest) -> Adapter | None:
        """What a request asks for, if nothing has to be read for it."""
        adapter = self._alive.get(request.lora_int_id)
        if adapter is None or adapter.request != request or request.load_inplace:
            return None
        return self._use(adapter)

    def _alive_as(self, known: Known) -> Adapter | None:
        adapter = self._alive.get(known[0].lora_int_id)
        return adapter if adapter is not None and adapter.digest == known[1] else None

    def _use(self, adapter: Adapter) -> Adapter:
        """It was named last."""
        number = adapter.request.lora_int_id
        self._newest.pop(number, None)
        self._newest[number] = adapter
        if len(self._newest) > self.config.max_loras:
            del self._newest[next(iter(self._newest))]
        return adapter

    def _lora_id(self, adapter: Adapter) -> int:
        """What stands for these weights under this number."""
        number = adapter.request.lora_int_id
        if (key := (number, adapter.digest)) not in self._lora_ids:
            was_used = any(number == other for other, _ in self._lora_ids)
            self._lora_ids[key] = next(self._more_ids) if was_used else number
        return self._lora_ids[key]

    def _enter(self, adapter: Adapter, load_inplace: bool) -> Adapter:
        """From now on its id and its name stand for what was read. Raises ValueError."""
        request, number = adapter.request, adapter.request.lora_int_id
        first, digest = self._known.get(number, (request, adapter.digest))
        if digest != adapter.digest and not load_inplace:
            reason = f"lora_int_id {number} is {first}, with other weights than {request.lora_path} has now"
            raise ValueError(f"{reason}; they need another id, or load_inplace=True")
        if number not in self._known or load_inplace:
            self._known[number] = request, adapter.digest
        adapter = self._alive[number] = replace(adapter, lora_id=self._lora_id(adapter))
        if number in self._pinned:
            self._pinned[number] = adapter
        return self._use(adapter)

    # -- while the engine runs ------------------------------------------------------------------------------------

    def add(self, request: Any) -> bool:
        """Bring an adapter into memory. False if its id was known, and its files were not read anew. ValueError."""
        is_new = isinstance(request, LoRARequest) and (request.load_inplace or request.lora_int_id not in self._known)
        self.check(request)
        return is_new

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; its id and its name are free. What runs with it ends as it began. False: it is unknown.

        Who is about to read it does not bring it back. Raises ValueError for what is no whole number.
        """
        lora_int_id = check_number("lora_int_id", lora_int_id, Integral)
        with self._lock:
            self._num_removals[lora_int_id] += 1
            for kept in (self._alive, self._newest, self._pinned):
                kept.pop(lora_int_id, None)
            return self._known.pop(lora_int_id, None) is not None

    def pin(self, lora_int_id: int) -> bool:
        """Let an adapter stay in memory until it is removed. Raises ValueError for an id that is not known."""
        lora_int_id = check_number("lora_int_id", lora_int_id, Integral, 1)
        adapter = self._current(lambda: self._known.get(lora_int_id))
        with self._lock:
            if adapter is None or lora_int_id not in self._known:
                raise ValueError(f"no adapter has lora_int_id {shorten(lora_int_id)}; add_lora() it before")
            self._pinned[lora_int_id] = self._alive.get(lora_int_id, adapter)
        return True

    def numbered(self, name: str, path: str, load_inplace: bool) -> LoRARequest:
        """A request for an adapter that has no id of its own: of its name, if that is known, or a free one."""
        known = self.named(name)
        number = 1 + max(self._known, default=0) if known is None else known.lora_int_id
        return LoRARequest(name, number, path, load_inplace)
