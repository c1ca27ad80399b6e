"""DiskStore: a CacheDirectory behind a thread of its own, so that no step waits for a disk (core/tiers/store.py).

The thread reads before it writes. What waits to be written is bounded: when a disk is slower than the engine, blocks
are dropped, and counted. A block whose parent was dropped is not kept either, so what is kept is whole chains.

Other processes lock the index while they write, and one may be stopped in the middle. A write that finds it locked
stays in the queue, and is tried again after a pause that doubles; meanwhile reads go on. Times of use are then
forgotten. A read waits for a moment, once: then nothing is read for a while.

The thread does not wait for the disk: a killed process loses what was queued, a machine without power also what the
system had not written yet. Who reads finds that out, for a slot is compared with what is asked for. close() writes what
is queued, and waits for the disk.
"""

import logging
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import islice, takewhile
from threading import Condition, Thread
from time import monotonic
from typing import Any

from nanovllm.core.tiers.store import Record
from nanovllm.features.tiers.directory import DAMAGED_INDEX, CacheDirectory
from nanovllm.features.tiers.index import AT_LEISURE, BUSY, NameSet, now_us

logger = logging.getLogger("nanovllm")

QUEUE_BYTES = 256 << 20  # that wait to be written
BATCH = 16  # records written between two looks at who wants to read
TOUCHED = 256  # records, the same
MAX_REBUILDS = 3
PAUSE_S = 0.05  # after a write that found the index locked, at first
ALONE_S = 5.0  # after a read that did; the longest pause


class Locked(Exception):
    """Another process has locked the index."""


class DiskStore:
    """A Store (core/tiers/store.py). Its thread alone touches the directory.

    num_read     records that were delivered
    num_dropped  records that were not written, because the disk was behind or cannot be written
    """

    medium = "disk"

    def __init__(self, directory: CacheDirectory) -> None:
        self.directory, self.num_read, self.num_dropped = directory, 0, 0
        self._fetches: deque[tuple[list[Record], Future[list[Any]]]] = deque()
        self._queue: dict[bytes, tuple[Record, Any]] = {}  # by name, to be written in this order
        self._others: deque[Callable[[], Any]] = deque()
        self._queued_bytes, self._num_rebuilds, self._forgets = 0, 0, False
        self._writes, self._is_closing = directory.is_writable, False
        self._pause_s, self._write_again, self._read_again = PAUSE_S, 0.0, 0.0  # of monotonic()
        directory.be(BUSY)
        self._wake = Condition()
        self._thread = Thread(target=self._run, name="prefix cache", daemon=True)
        self._thread.start()

    # -- for the engine's thread ----------------------------------------------------------------------------------

    def may_have(self, name: bytes) -> bool:
        return name in self.directory.names or name in self._queue

    def put(self, records: list[Record], read: Callable[[], list[Any]]) -> None:
        num_bytes = sum(self.directory.spaces[record.kind].data_bytes for record in records)
        if not self._writes or self._queued_bytes + num_bytes > QUEUE_BYTES:
            self.num_dropped += len(records)
            return
        data = read()
        with self._wake:
            for record, of_record in zip(records, data, strict=True):
                if record.name not in self._queue:
                    kept = record._replace(token_ids=tuple(record.token_ids))
                    self._queue[record.name] = kept, of_record
                    self._queued_bytes += of_record.nbytes
            self._wake.notify()

    def fetch(self, records: list[Record]) -> "Future[list[Any]]":
        future: Future[list[Any]] = Future()
        with self._wake:
            self._fetches.append((records, future))
            self._wake.notify()
        return future

    def touch(self, names: list[bytes]) -> None:
        if self._writes and monotonic() >= self._write_again:
            self._later(partial(self._touch, names, now_us()))

    def tell_of(self, records: list[Record]) -> None:
        """See CacheDirectory.tell_of. Records that are being written are told of when they are."""
        self._later(partial(self.directory.tell_of, records))

    def reset(self) -> None:
        """What this process may read of the directory goes, and what waits to be written."""
        with self._wake:
            self._queue.clear()
            self._queued_bytes = 0
            self._forgets = True
            self._wake.notify()

    def counts(self) -> dict[str, int]:
        kept = self.directory
        held = {"num_records": len(kept.names), "num_bytes": kept.own_bytes, "num_read": self.num_read}
        num_dropped = self.num_dropped + kept.num_refused
        return held | {"num_dropped": num_dropped, "num_removed": kept.num_removed, "num_damaged": kept.num_damaged}

    def flush(self) -> None:
        """Wait until everything that was put has been written, but for what another process keeps from it."""
        done: Future[None] = Future()
        self._write_again = 0.0
        self._later(lambda: done.set_result(None))
        done.result()

    def close(self) -> None:
        """Write what is queued, and end. Safe to call twice; what is asked for later is not there."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _later(self, work: Callable[[], Any]) -> None:
        with self._wake:
            self._others.append(work)
            self._wake.notify()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
        self._unless_locked(self.directory.sync)
        self.directory.close()

    def _next(self) -> Callable[[], Any] | None:
        """What is to be done, when there is something. None: it is over."""
        with self._wake:
            while True:
                pause_s = self._write_again - monotonic()
                may_write = pause_s <= 0 or self._is_closing
                if self._forgets and may_write:
                    return self._forget
                if self._fetches:
                    return partial(self._deliver, *self._fetches.popleft())
                if self._queue and may_write:
                    return self._write
                if self._others:
                    return partial(self._unless_locked, self._others.popleft())
                if self._is_closing:
                    return None
                self._wake.wait(pause_s if self._queue or self._forgets else None)

    def _deliver(self, records: list[Record], future: "Future[list[Any]]") -> None:
        found = self._read(records)
        self.num_read += len(found)
        future.set_result(found)

    def _forget(self) -> None:
        self._forgets = False
        self.directory.names = NameSet()  # nothing is asked for any more, even if it stays for a while
        if not self._unless_locked(self.directory.forget_own):
            self._forgets = not self._is_closing

    def _write(self) -> None:
        batch = [*islice(self._queue.values(), BATCH)]
        if self._is_closing:
            self.directory.be(AT_LEISURE)  # nobody waits for an answer
        if self._unless_locked(partial(self.directory.put, batch)):
            self._pause_s = PAUSE_S
            self._written(batch)
        elif self._is_closing:
            self.num_dropped += len(self._queue)
            self._written([*self._queue.values()])

    def _touch(self, names: list[bytes], now: int) -> None:
        """Some at a time, and parents first: what others see in between is a chain whose parents were used later."""
        self.directory.touch(names[:TOUCHED], now)
        if names[TOUCHED:]:
            with self._wake:
                self._others.appendleft(partial(self._touch, names[TOUCHED:], now))

    def _unless_locked(self, work: Callable[[], Any]) -> bool:
        """Do what writes. False: another process does; then nothing is written for a while."""
        try:
            self._guarded(work)
        except Locked:
            self._write_again = monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, ALONE_S)
            return False
        return True

    def _read(self, records: list[Record]) -> list[Any]:
        """The end of a chain may not be written yet."""
        written = [*takewhile(lambda record: record.name not in self._queue, records)]
        found = self._read_written(written)
        for record in records[len(written) :] if len(found) == len(written) else ():
            kept, data = self._queue.get(record.name, (None, None))
            if kept != record._replace(token_ids=tuple(record.token_ids)):
                break
            found.append(data)
        return found

    def _read_written(self, records: list[Record]) -> list[Any]:
        if not records or monotonic() < self._read_again:
            return []
        try:
            return self._guarded(partial(self.directory.read, records)) or []
        except Locked:
            self._read_again = monotonic() + ALONE_S
            return []

    def _written(self, batch: list[tuple[Record, Any]]) -> None:
        with self._wake:
            for record, data in batch:
                if self._queue.pop(record.name, None) is not None:
                    self._queued_bytes -= data.nbytes

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Whatever happens to the directory, requests are answered: without it, if need be. Raises Locked."""
        try:
            return work()
        except Locked:
            raise
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise Locked from error
            self._stop_writing(error)
        except DAMAGED_INDEX as error:
            self._num_rebuilds += 1
            if self._writes and self._num_rebuilds <= MAX_REBUILDS:
                logger.warning("prefix cache: a new index for %s: %s", self.directory.path, error)
                self._guarded(self.directory.rebuild)
            else:
                self._stop_writing(error)
        except Exception as error:
            self._stop_writing(error)
        return None

    def _stop_writing(self, error: BaseException) -> None:
        if self._writes:
            logger.warning("prefix cache: %s is not written any more: %r", self.directory.path, error)
        self._writes = False
