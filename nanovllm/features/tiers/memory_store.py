"""MemoryStore: what the pool has evicted, in the CPU's memory (core/tiers/store.py)."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nanovllm.core.tiers.store import Record


class MemoryStore:
    """A Store. Of records that were used together the deepest goes first, as in the pool.

    num_bytes    of data, at most
    used_bytes   of data, now
    num_read     records that were delivered
    num_dropped  records that were larger than all of it
    num_removed  records that have made room for others
    on_stored, on_removed    told of records
    """

    medium = "memory"

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.used_bytes = num_bytes, 0
        self.num_read = self.num_dropped = self.num_removed = 0
        self.on_stored: Callable[[list[Record]], None] = lambda records: None
        self.on_removed: Callable[[list[bytes]], None] = lambda keys: None
        self._records: OrderedDict[bytes, tuple[Record, Any]] = OrderedDict()  # the least recently used first

    def may_have(self, key: bytes) -> bool:
        return key in self._records

    def put(self, records: list[Record], read: Callable[[int], list[Any]]) -> None:
        if all(record.key in self._records for record in records):
            self.touch([record.key for record in records])
            self.on_stored(records)
            return
        for record, data in zip(records, read(len(records)), strict=True):
            if data.nbytes > self.num_bytes:
                self.num_dropped += 1
                continue
            self._remove(record.key)
            while self.used_bytes + data.nbytes > self.num_bytes:
                self._remove(next(iter(self._records)))
                self.num_removed += 1
            self._records[record.key] = record._replace(token_ids=tuple(record.token_ids)), data
            self.used_bytes += data.nbytes
            self.on_stored([record])

    def fetch(self, records: list[Record]) -> "Future[list[Any]]":
        found: list[Any] = []
        for record in records:
            kept, data = self._records.get(record.key, (None, None))
            if kept != record._replace(token_ids=tuple(record.token_ids)):
                break
            found.append(data)
        self.num_read += len(found)
        future: Future[list[Any]] = Future()
        future.set_result(found)
        return future

    def touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self._records:
                self._records.move_to_end(key)

    def reset(self) -> None:
        for key in [*self._records]:
            self._remove(key)

    def counts(self) -> dict[str, int]:
        held = {"num_records": len(self._records), "num_bytes": self.used_bytes, "num_read": self.num_read}
        return held | {"num_dropped": self.num_dropped, "num_removed": self.num_removed, "num_damaged": 0}

    def _remove(self, key: bytes) -> None:
        if key in self._records:
            self.used_bytes -= self._records.pop(key)[1].nbytes
            self.on_removed([key])
