"""A directory of cached prefixes: segments, and a budget in bytes that holds at every moment.

Several processes may use it at once. Each appends to a segment of its own, and continues one that an ended process has
left. Room is made by removing the segment that was used least recently, as a whole: nothing is ever written over.
Writing takes the directory's lock for that moment; reading needs none. Whatever is read is compared with what
was asked for, so a segment that goes meanwhile is a miss, and nothing worse.

A block is found only through its parents, so these must not go first. They do not: whoever uses a block uses all before
it, and a segment that gets a block counts as used no later than the one that holds its parent.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanovllm.checks.values import shorten
from nanovllm.core.tiers.store import STATE, Record, state_key
from nanovllm.features.tiers.segment import (
    HASH_BYTES,
    HEADER_BYTES,
    NAME,
    Segment,
    Space,
    Writer,
    remove_segment,
    space_of,
)
from nanovllm.files.system import lock_file, open_for_owner

LOCK, DIGESTS, NEW_DIGESTS = "prefix-cache.lock", "prefix-cache.digests", "prefix-cache.digests.new"
SLACK_BYTES = 64 << 10  # of the budget, for the digests
NUM_SEGMENTS = 16  # of a full directory
READ_BYTES = 64 << 20  # at a time


def prepared(path: str | os.PathLike) -> Path:
    """A directory for this purpose alone, its owner's alone; made if it is missing. Raises ValueError, or OSError."""
    directory = Path(path).expanduser()
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"prefix_cache_dir: {shorten(str(path))} is a file; name a directory, or one to be made")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in directory.iterdir():
        # .nfs...: what NFS leaves of a file that is removed while a process has it open, until that closes it.
        if not is_ours(file) and not file.name.startswith(".nfs"):
            found = f"{shorten(str(path))} holds {shorten(file.name)}"
            raise ValueError(f"prefix_cache_dir: {found}; name a directory of its own")
    with suppress(OSError):  # it may be somebody else's, or read-only
        directory.chmod(0o700)
    return directory


def is_ours(file: Path) -> bool:
    return (file.name in (LOCK, DIGESTS, NEW_DIGESTS) or NAME.fullmatch(file.name) is not None) and not file.is_dir()


class CacheDirectory:
    """It belongs to one thread at a time; `in` and own_bytes may be asked by any. Methods raise OSError.

    spaces       {kind: Space} that this process reads and writes; of others it only removes segments
    on_stored, on_removed    called with records, and with keys, in the thread that changes something
    num_removed  records that have made room for others
    num_damaged  records that were found to be no records
    """

    def __init__(self, path: Path, num_bytes: int, is_writable: bool = True) -> None:
        """Raises OSError if it cannot be used."""
        self.path = path
        self.num_bytes = num_bytes
        self.is_writable = is_writable
        self.spaces: dict[int, Space] = {}
        self.on_stored: Callable[[list[Record]], None] = lambda records: None
        self.on_removed: Callable[[list[bytes]], None] = lambda keys: None
        self.num_removed = self.num_damaged = 0
        self._places: dict[bytes, tuple[Segment, int]] = {}  # key of a record -> its segment and slot
        self._segments: dict[Path, Segment] = {}  # of these spaces
        self._writers: dict[int, Writer] = {}  # by kind
        if is_writable:
            open(path / LOCK, "ab", opener=open_for_owner).close()

    def use(self, spaces: Iterable[Space]) -> None:
        """What this process reads and writes from now on."""
        self.spaces = {space.kind: space for space in spaces}
        self.scan()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def sync(self) -> None:
        """What was written so far is on the disk when this returns."""
        for writer in self._writers.values():
            writer.sync()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process writes or removes meanwhile. Raises BlockingIOError if one does now."""
        with open(self.path / LOCK, "ab", opener=open_for_owner) as file:
            lock_file(file.fileno(), wait=False)
            yield

    # -- records --------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Take in what other processes have added to these spaces, and removed."""
        names = {space.name: space for space in self.spaces.values()}
        there = [path for path in segments_in(self.path) if NAME.fullmatch(path.name)[1] in names]  # pyrefly: ignore[unsupported-operation]
        for path in self._segments.keys() - set(there):
            self._forget(self._segments[path])
        for path in there:
            segment = self._segments.get(path)
            if segment is None:
                segment = self._segments[path] = Segment(path, names[NAME.fullmatch(path.name)[1]])  # pyrefly: ignore[unsupported-operation]
            first = len(segment.hashes)
            for slot, block_hash in enumerate(segment.refresh(), start=first):
                self._places[_key(segment.space, block_hash)] = segment, slot

    def put(self, items: list[tuple[Record, Any]]) -> None:
        """Keep records and their data, parents first; but those that are known, or have no room, or no parent here.

        Raises BlockingIOError, with nothing kept, while another process writes.
        """
        with self.locked():
            self.scan()
            for kind, space in self.spaces.items():
                new = self._new_records([item for item in items if item[0].kind == kind])
                while new:
                    count = self._room_for(space, len(new))
                    if count == 0:
                        break
                    self._append(kind, new[:count])
                    new = new[count:]

    def _new_records(self, items: list[tuple[Record, Any]]) -> list[tuple[Record, Any]]:
        new: dict[bytes, tuple[Record, Any]] = {}
        for record, data in items:
            parent = record.block_hash if record.kind == STATE else record.parent_hash
            if record.key not in self and (parent is None or parent in self or parent in new):
                new[record.key] = record, data
        return list(new.values())

    def _append(self, kind: int, items: list[tuple[Record, Any]]) -> None:
        writer = self._writers[kind]
        segment, first = writer.segment, len(writer.segment.hashes)
        writer.append(items)
        for slot, (record, _) in enumerate(items, start=first):
            self._places[record.key] = segment, slot
        self._touch_parents(segment, [record for record, _ in items])
        self.on_stored([record for record, _ in items])

    def _touch_parents(self, segment: Segment, records: list[Record]) -> None:
        """The segments of their parents were used no earlier than theirs."""
        parents = [record.block_hash if record.kind == STATE else record.parent_hash for record in records]
        holders = {self._places[parent][0] for parent in parents if parent in self._places}
        for holder in holders - {segment}:
            holder.touch()

    def read(self, records: list[Record]) -> list[Any]:
        """Data of the first of these, up to one that is not there, READ_BYTES at most; the first in any case."""
        if not records or records[0].kind not in self.spaces:
            return []
        space = self.spaces[records[0].kind]
        found: list[Any] = []
        wanted = records[: max(1, READ_BYTES // space.slot_bytes)]
        while len(found) < len(wanted):
            segment, slots = self._run(wanted[len(found) :])
            if segment is None:
                break
            num_found = len(found)
            try:
                for record, slot in zip(wanted[num_found:], segment.read(slots), strict=False):
                    held = space.unpack(slot)
                    if held is None or held[0].block_hash != record.block_hash:
                        self._damaged(record)
                        return found
                    if held[0] != record._replace(token_ids=tuple(record.token_ids)):
                        return found
                    found.append(held[1])
            except FileNotFoundError:  # another process has made room
                self._forget(segment)
                break
        return found

    def _run(self, records: list[Record]) -> tuple[Segment | None, list[int]]:
        """The segment of the first record, and the slots of all that follow in the same one."""
        segment, slots = None, list[int]()
        for record in records:
            place = self._places.get(record.key)
            if place is None or (segment is not None and place[0] is not segment):
                break
            segment = place[0]
            slots.append(place[1])
        return segment, slots

    def touch(self, keys: list[bytes]) -> None:
        """These were used now. Parents come first."""
        places = [self._places[key] for key in reversed(keys) if key in self._places]
        for segment in dict.fromkeys(segment for segment, _ in places):  # parents last: they were used no earlier
            segment.touch()

    def tell_of(self, records: list[Record]) -> None:
        """Tell of those that are here, though they may have been for long. Parents come first."""
        self.on_stored([record for record in records if record.key in self])

    def _damaged(self, record: Record) -> None:
        self.num_damaged += 1
        del self._places[record.key]
        self.on_removed([record.key])

    def _forget(self, segment: Segment) -> list[bytes]:
        """It is gone. Returns the keys of its records."""
        self._segments.pop(segment.path, None)
        keys = [_key(segment.space, block_hash) for block_hash in segment.hashes]
        gone = [key for key in dict.fromkeys(keys) if self._places.get(key, (None,))[0] is segment]
        for key in gone:
            del self._places[key]
        self.on_removed(gone)
        return gone

    # -- room -----------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Bytes of all files."""
        return sum(bytes_of(path) for path in self.path.iterdir())

    @property
    def own_bytes(self) -> int:
        """Bytes of the segments that this process reads, as far as it has seen them. Any thread may call it: it reads
        no file."""
        segments = [*self._segments.values()]
        return sum(HEADER_BYTES + len(s.hashes) * (s.space.slot_bytes + HASH_BYTES) for s in segments)

    def _room_for(self, space: Space, num_records: int) -> int:
        """How many of so many records fit into this process's segment now, if need be after removing others."""
        writer = self._writer(space)
        record_bytes = space.slot_bytes + HASH_BYTES
        count = min(num_records, self._capacity(space) - len(writer.segment.hashes))
        while True:
            room = self.num_bytes - SLACK_BYTES - self.used_bytes()
            if room >= count * record_bytes:
                return count
            if not self._remove_oldest(but=[writer.segment.path for writer in self._writers.values()]):
                return max(0, min(count, room // record_bytes))

    def _capacity(self, space: Space) -> int:
        """Records of a full segment."""
        return max(1, self.num_bytes // NUM_SEGMENTS // (space.slot_bytes + HASH_BYTES))

    def _writer(self, space: Space) -> Writer:
        """The writer of a segment with room for a record, at least."""
        writer = self._writers.get(space.kind)
        capacity = self._capacity(space)
        if writer is not None:
            if writer.is_whole and len(writer.segment.hashes) < capacity:
                return writer
            writer.close()
            del self._writers[space.kind]
        left = [segment for segment in self._segments.values() if segment.space == space]
        for segment in left:
            if len(segment.hashes) < capacity and space_of(segment.path) == space:
                with suppress(BlockingIOError):  # another process writes it
                    return self._open_writer(segment)
        path = self.path / f"{space.name}-{time.time_ns():016x}.seg"
        return self._open_writer(Segment(path, space))

    def _open_writer(self, segment: Segment) -> Writer:
        writer = self._writers[segment.space.kind] = Writer(segment)
        self._segments[segment.path] = segment
        return writer

    def _remove_oldest(self, but: Iterable[Path] = ()) -> bool:
        """Remove the segment that was used least recently. False if there is none."""
        kept = set(but)
        paths = [path for path in segments_in(self.path) if path not in kept]
        if not paths:
            return False
        path = min(reversed(paths), key=last_use)  # of those used at one time the newest: it has no children there
        num_records = bytes_of(path.with_suffix(".idx")) // HASH_BYTES
        remove_segment(path)
        self.num_removed += num_records
        if path in self._segments:
            self._forget(self._segments[path])
        return True

    def prune(self, num_bytes: int) -> int:
        """Remove the least recently used segments until no more than num_bytes are used. Returns how many records."""
        before = self.num_removed
        with self.locked():
            while self.used_bytes() > num_bytes and self._remove_oldest():
                pass
        return self.num_removed - before

    def forget_own(self) -> None:
        """Remove what this process may read."""
        with self.locked():
            self.scan()
            self.close()
            for segment in self._segments.values():
                remove_segment(segment.path)
            self.read_no_more()

    def read_no_more(self) -> None:
        """What is known now is not read any more, whether it is there or not."""
        keys = [*self._places]
        self._places.clear()
        self.on_removed(keys)

    def clear(self) -> None:
        """Remove every file of ours but the lock: of two files with its name, each would let a process in."""
        with self.locked():
            self.close()
            for path in [path for path in self.path.iterdir() if is_ours(path) and path.name != LOCK]:
                path.unlink(missing_ok=True)
            self.scan()

    # -- digests of a checkpoint's files --------------------------------------------------------------------------

    def digest(self, path: str, stamp: str) -> str | None:
        """The digest of a file's content, if it was computed when the file had this stamp."""
        found = self._digests().get(path)
        return found[1] if isinstance(found, list) and len(found) == 2 and found[0] == stamp else None

    def keep_digest(self, path: str, stamp: str, digest: str) -> None:
        """Raises BlockingIOError, with nothing kept, while another process writes."""
        with self.locked():
            digests = self._digests() | {path: [stamp, digest]}
            new = self.path / NEW_DIGESTS
            with open(new, "w", encoding="utf-8", opener=open_for_owner) as file:
                json.dump(digests, file)
            new.replace(self.path / DIGESTS)

    def _digests(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / DIGESTS).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def segments_in(directory: Path) -> list[Path]:
    """The .seg files, in the order in which they were begun."""
    found = [path for path in directory.iterdir() if NAME.fullmatch(path.name) and path.suffix == ".seg"]
    return sorted(found, key=lambda path: path.stem[-16:])


def _key(space: Space, block_hash: bytes) -> bytes:
    return state_key(block_hash) if space.kind == STATE else block_hash


def bytes_of(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def last_use(segment: Path) -> int:
    """In nanoseconds; 0 for one whose list is missing, which nobody can read."""
    with suppress(OSError):
        return segment.with_suffix(".idx").stat().st_mtime_ns
    return 0
