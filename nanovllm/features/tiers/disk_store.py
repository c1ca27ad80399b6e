"""DiskStore: a CacheDirectory behind a thread of its own, so that no step waits for a disk (core/tiers/store.py).

The thread reads before it writes, and looks once a second for what other processes have written. What waits to be
written is bounded: when a disk is slower than the engine, blocks are dropped, and counted. A block whose parent was
dropped is not kept either, so what is kept is whole chains.

Another process may hold the directory's lock, and be stopped in the middle. Then what is to be written stays in the
queue and is tried again after a pause that doubles; reading needs no lock and goes on.

The thread does not wait for the disk: a killed process loses what was queued, a machine without power also what the
system had not written yet. Reading finds that out, since every slot is compared with what is asked for. close() writes
what is queued, and waits for the disk.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import accumulate, islice, takewhile
from threading import Condition, Thread, current_thread
from time import monotonic
from typing import Any

from nanovllm.core.tiers.store import Record
from nanovllm.features.tiers.directory import CacheDirectory

logger = logging.getLogger("nanovllm")

QUEUE_BYTES = 256 << 20  # that wait to be written
BATCH = 16  # records written before it looks again whether somebody wants to read
PAUSE_S = 0.05  # after a write that found the directory locked, at first
LONGEST_PAUSE_S = 5.0
NUM_LAST_TRIES = 10  # of close(), while the directory is locked
SCAN_S = 1.0  # between two looks at what other processes have written


class DiskStore:
    """A Store. Its thread alone touches the directory.

    num_read     records that were delivered
    num_dropped  records that were not written: the disk was behind, is full or cannot be written; or no parent is there
    """

    medium = "disk"

    def __init__(self, directory: CacheDirectory) -> None:
        self.directory = directory
        self.num_read = self.num_dropped = 0
        self._fetches: deque[tuple[list[Record], Future[list[Any]]]] = deque()
        self._queue: dict[bytes, tuple[Record, Any]] = {}  # by key, to be written in this order
        self._queued_bytes = 0
        self._others: deque[Callable[[], Any]] = deque()
        self._forgets = False  # everything is to be forgotten
        self._writes = directory.is_writable
        self._has_dropped = self._has_failed_to_read = False  # each is logged once
        self._is_closing = False
        self._pause_s = PAUSE_S
        self._write_again = 0.0  # of monotonic()
        self._scan_again = monotonic() + SCAN_S
        self._wake = Condition()
        self._thread = Thread(target=self._run, name="prefix cache", daemon=True)
        self._thread.start()

    # -- for the engine's thread ----------------------------------------------------------------------------------

    def may_have(self, key: bytes) -> bool:
        return not self._forgets and (key in self.directory or key in self._queue)

    def put(self, records: list[Record], read: Callable[[int], list[Any]]) -> None:
        room = QUEUE_BYTES - self._queued_bytes if self._writes else -1
        ends = accumulate(self.directory.spaces[record.kind].data_bytes for record in records)
        num_queued = sum(1 for _ in takewhile(lambda end: end <= room, ends))  # the first ones: parents come first
        data = read(num_queued) if num_queued else []
        if num_queued < len(records) and self._writes and not self._has_dropped:
            text = "prefix cache: there are more blocks than may wait to be written to %s; some are not kept"
            logger.warning(text, self.directory.path)
            self._has_dropped = True
        with self._wake:
            self.num_dropped += len(records) - num_queued
            for record, record_data in zip(records, data, strict=False):
                if record.key not in self._queue:
                    kept = record._replace(token_ids=tuple(record.token_ids))
                    self._queue[record.key] = kept, record_data
                    self._queued_bytes += record_data.nbytes
            self._wake.notify()

    def fetch(self, records: list[Record]) -> "Future[list[Any]]":
        future: Future[list[Any]] = Future()
        with self._wake:
            self._fetches.append((records, future))
            self._wake.notify()
        return future

    def touch(self, keys: list[bytes]) -> None:
        if self._writes:
            self._later(partial(self.directory.touch, keys))

    def tell_of(self, records: list[Record]) -> None:
        """See CacheDirectory.tell_of. Records that are being written are told of when they are."""
        self._later(partial(self.directory.tell_of, records))

    def reset(self) -> None:
        """What this process may read of the directory goes, and what waits to be written.

        What cannot be removed stays for other processes; this one does not read it any more.
        """
        with self._wake:
            self._queue.clear()
            self._queued_bytes = 0
            self._forgets = True
            self._wake.notify()

    def counts(self) -> dict[str, int]:
        directory = self.directory
        return {
            "num_records": len(directory),
            "num_bytes": directory.own_bytes,
            "num_read": self.num_read,
            "num_dropped": self.num_dropped,
            "num_removed": directory.num_removed,
            "num_damaged": directory.num_damaged,
        }

    def flush(self) -> None:
        """Wait until everything that was put has been written, but for what another process keeps from it."""
        done: Future[None] = Future()
        self._write_again = 0.0
        self._later(partial(done.set_result, None))
        done.result()

    def close(self) -> None:
        """Write what is queued, and end. Safe to call twice; what is asked for later is not there.

        A garbage collection may call it in the store's own thread. That ends afterwards, and nobody waits for it.
        """
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if current_thread() is not self._thread:
            self._thread.join()

    def _later(self, work: Callable[[], Any]) -> None:
        with self._wake:
            self._others.append(work)
            self._wake.notify()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
        self._guarded(self.directory.sync)
        self.directory.close()

    def _next(self) -> Callable[[], Any] | None:
        """What is to be done, when there is something. None: it is over."""
        with self._wake:
            while True:
                pause_s, scan_s = self._write_again - monotonic(), self._scan_again - monotonic()
                has_to_write = bool(self._forgets or self._queue)
                if scan_s <= 0:
                    return self._scan
                if self._fetches:
                    return partial(self._deliver, *self._fetches.popleft())
                if has_to_write and pause_s <= 0:
                    return self._forget if self._forgets else self._write
                if self._others:
                    return partial(self._guarded, self._others.popleft())
                if self._is_closing:
                    return self._write_at_last if has_to_write else None
                self._wake.wait(min(pause_s, scan_s) if has_to_write else scan_s)

    def _scan(self) -> None:
        with suppress(Exception):  # the next look, or the next write, finds out whether that lasts
            self.directory.scan()
        self._scan_again = monotonic() + SCAN_S  # after it: a slow one does not keep readers from their turn

    def _deliver(self, records: list[Record], future: "Future[list[Any]]") -> None:
        found = [] if self._forgets else self._read(records)
        self.num_read += len(found)
        future.set_result(found)

    def _read(self, records: list[Record]) -> list[Any]:
        """The end of a chain may not be written yet."""
        written = [*takewhile(lambda record: record.key not in self._queue, records)]
        found = self._read_directory(written)
        for record in records[len(written) :] if len(found) == len(written) else ():
            kept, data = self._queue.get(record.key, (None, None))
            if kept != record._replace(token_ids=tuple(record.token_ids)):
                break
            found.append(data)
        return found

    def _read_directory(self, records: list[Record]) -> list[Any]:
        """A read that fails is a miss, as of too many open files or of a server that is away: the next may succeed."""
        try:
            return self.directory.read(records)
        except Exception as error:
            if not self._has_failed_to_read:
                logger.warning("prefix cache: %s could not be read, which is a miss: %r", self.directory.path, error)
            self._has_failed_to_read = True
        return []

    def _forget(self) -> None:
        if self._unless_locked(self.directory.forget_own):
            self.directory.read_no_more()  # what could not be removed
            self._forgets = False

    def _write(self) -> None:
        batch = [*islice(self._queue.values(), BATCH)]
        if not self._writes or self._unless_locked(partial(self.directory.put, batch)):
            self._written(batch)

    def _write_at_last(self) -> None:
        """It ends, and another process holds the lock: it is tried again for a while."""
        for _ in range(NUM_LAST_TRIES):
            self._write_again = 0.0
            (self._forget if self._forgets else self._write)()
            if self._write_again == 0.0:
                return
            with self._wake:
                self._wake.wait(PAUSE_S)
        self._written([*self._queue.values()])
        self._forgets = False

    def _written(self, batch: list[tuple[Record, Any]]) -> None:
        """These wait no more. What the directory does not have now was dropped."""
        with self._wake:
            for record, data in batch:
                if self._queue.pop(record.key, None) is not None:
                    self._queued_bytes -= data.nbytes
                    self.num_dropped += record.key not in self.directory

    def _unless_locked(self, work: Callable[[], Any]) -> bool:
        """Do what writes. False: another process does; then nothing is written for a while."""
        try:
            self._guarded(work)
        except BlockingIOError:
            self._write_again = monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return False
        self._pause_s = PAUSE_S
        return True

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Whatever happens to the directory, requests are answered: without it, if need be."""
        try:
            return work()
        except BlockingIOError:
            raise
        except Exception as error:
            if self._writes:
                logger.warning("prefix cache: %s is not written any more: %r", self.directory.path, error)
            self._writes = False
        return None
