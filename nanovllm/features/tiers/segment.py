"""A segment: a file of records of one kind and one model, each in a slot of the same size, and a list of their hashes.

    .seg     [ what it is for, as JSON, 4,096 bytes | slot 0 | slot 1 | ... ]
    .idx     [ block hash of slot 0 | block hash of slot 1 | ... ]
    slot     [ header: kind, block hash, parent's hash, extra, checksums | token ids | data ]

Both files only grow, at their end, and one process at a time writes them: it holds a lock on the list. The data is
written before its hash, so what the list names has been written; a killed process leaves at most a slot without a hash.

A slot says all that its record is known by, and nothing that is read is believed without being compared: a slot that
was half written, damaged or cut off holds no record, and a wrong hash in the list names a slot that holds another one.
"""

import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from nanovllm.core.tiers.store import EXTRA_BYTES, Record
from nanovllm.files.system import lock_file, open_for_owner

MAGIC = b"nvkv0002"
HASH_BYTES = 32
HEADER_BYTES = 4096
HEAD = struct.Struct(f"<8sHHI{HASH_BYTES}s{HASH_BYTES}s{EXTRA_BYTES}sQ")  # then its checksum, with that of the tokens
SUM = struct.Struct("<Q")
NAME = re.compile(r"([0-9a-f]{32}-[0-9]+)-([0-9a-f]{16})\.(seg|idx)")


@dataclass(frozen=True)
class Space:
    """What segments are for. fingerprint: hexadecimal. num_tokens, data_bytes: of each record. about: for people."""

    fingerprint: str
    kind: int
    num_tokens: int
    data_bytes: int
    about: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """How the names of its files begin."""
        return f"{self.fingerprint}-{self.kind}"

    @property
    def header(self) -> bytes:
        """HEADER_BYTES in any case: of a long `about` the beginning."""
        about = self.about
        while len(text := json.dumps(asdict(self) | {"about": about}).encode()) > HEADER_BYTES:
            about = about[: len(about) // 2]
        return text.ljust(HEADER_BYTES)

    @property
    def head_bytes(self) -> int:
        return HEAD.size + SUM.size + 4 * self.num_tokens

    @property
    def slot_bytes(self) -> int:
        return self.head_bytes + self.data_bytes

    def pack(self, record: Record, data: Any) -> bytes:
        """A slot."""
        payload = memoryview(data).cast("B")
        assert len(payload) == self.data_bytes and len(record.token_ids) == self.num_tokens
        has_parent = record.parent_hash is not None
        parent_hash = record.parent_hash or bytes(HASH_BYTES)
        checksum = xxhash.xxh3_64_intdigest(payload)
        head = HEAD.pack(MAGIC, record.kind, has_parent, 0, record.block_hash, parent_hash, record.extra, checksum)
        tokens = struct.pack(f"<{self.num_tokens}I", *record.token_ids)
        return head + SUM.pack(xxhash.xxh3_64_intdigest(head + tokens)) + tokens + payload

    def unpack(self, slot: np.ndarray) -> tuple[Record, np.ndarray] | None:
        """The record in a slot, and its data. None if it is damaged."""
        head, data = slot[: self.head_bytes].tobytes(), slot[self.head_bytes :]
        fixed, stated, tokens = head[: HEAD.size], head[HEAD.size : HEAD.size + SUM.size], head[HEAD.size + SUM.size :]
        if SUM.pack(xxhash.xxh3_64_intdigest(fixed + tokens)) != stated:
            return None
        magic, kind, has_parent, _, block_hash, parent_hash, extra, checksum = HEAD.unpack(fixed)
        if magic != MAGIC or kind != self.kind or xxhash.xxh3_64_intdigest(data.data) != checksum:
            return None
        token_ids = struct.unpack(f"<{self.num_tokens}I", tokens)
        return Record(block_hash, parent_hash if has_parent else None, token_ids, extra, kind), data


def space_of(path: Path) -> Space | None:
    """What a segment says that it is for. None if it is not one, or its header is damaged."""
    try:
        with open(path, "rb") as file:
            space = Space(**json.loads(file.read(HEADER_BYTES)))
        numbers = space.kind, space.num_tokens, space.data_bytes
        is_sane = all(type(number) is int and 0 <= number < 1 << 40 for number in numbers) and space.data_bytes
        return space if is_sane and path.name.startswith(f"{space.name}-") else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


class Segment:
    """Two files, for reading. path: of the .seg file. hashes: of the slots, as far as refresh() has seen them."""

    def __init__(self, path: Path, space: Space) -> None:
        self.path = path
        self.space = space
        self.list_path = path.with_suffix(".idx")
        self.hashes: list[bytes] = []

    def refresh(self) -> list[bytes]:
        """The hashes that were added since the last call."""
        new = []
        with suppress(FileNotFoundError), open(self.list_path, "rb") as file:
            file.seek(len(self.hashes) * HASH_BYTES)
            while len(block_hash := file.read(HASH_BYTES)) == HASH_BYTES:
                new.append(block_hash)
        self.hashes += new
        return new

    def read(self, slots: list[int]) -> Iterator[np.ndarray]:
        """The bytes of these slots; of neighbours in one go. What the file lacks is zeros. Raises OSError."""
        slot_bytes = self.space.slot_bytes
        with open(self.path, "rb", buffering=0) as file:
            start = 0
            while start < len(slots):
                end = start + 1
                while end < len(slots) and slots[end] == slots[end - 1] + 1:
                    end += 1
                data = np.zeros((end - start, slot_bytes), np.uint8)
                view, done = data.data.cast("B"), 0
                file.seek(HEADER_BYTES + slots[start] * slot_bytes)
                while done < len(view) and (num_bytes := file.readinto(view[done:])):
                    done += num_bytes
                yield from data
                start = end

    def touch(self) -> None:
        """It was used now. Its list's time of writing is the time of use."""
        with suppress(OSError):
            os.utime(self.list_path)


def remove_segment(path: Path) -> None:
    """The list first: a segment without one is read by nobody, and removed before all others."""
    path.with_suffix(".idx").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


class Writer:
    """Appends to a segment that no other process writes. Raises BlockingIOError if one does, OSError."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._list = _opened(segment.list_path)
        try:
            lock_file(self._list.fileno(), wait=False)
            self._file = _opened(segment.path)
            num_slots = min(self._num_hashes(), self._num_slots())
            self._cut(num_slots)
            del segment.hashes[num_slots:]
            segment.refresh()
        except BaseException:
            self.close()
            raise

    @property
    def is_whole(self) -> bool:
        """Are the files as this process has left them? Another may have removed them, a disk may have damaged them."""
        segment = self.segment
        num_bytes = HEADER_BYTES + len(segment.hashes) * segment.space.slot_bytes
        try:
            found = segment.path.stat().st_size, segment.list_path.stat().st_size
        except FileNotFoundError:
            return False
        return found == (num_bytes, len(segment.hashes) * HASH_BYTES)

    def append(self, items: list[tuple[Record, Any]]) -> None:
        """All of them, or none: then it raises OSError."""
        segment, num_slots = self.segment, self._num_slots()
        try:
            for record, data in items:
                _write_all(self._file, segment.space.pack(record, data))
            _write_all(self._list, b"".join(record.block_hash for record, _ in items))
        except BaseException:
            with suppress(OSError):
                self._cut(num_slots)
            raise
        segment.hashes += [record.block_hash for record, _ in items]

    def sync(self) -> None:
        """What was written is on the disk when this returns."""
        os.fsync(self._file.fileno())
        os.fsync(self._list.fileno())

    def close(self) -> None:
        """Others may write it."""
        for file in (self._list, getattr(self, "_file", None)):
            if file is not None:
                file.close()

    def _cut(self, num_slots: int) -> None:
        """Leave this many slots, and their hashes. A new file gets its header."""
        if self._file.seek(0, os.SEEK_END) < HEADER_BYTES:
            self._file.truncate(0)
            _write_all(self._file, self.segment.space.header)
        self._list.truncate(num_slots * HASH_BYTES)
        self._file.truncate(HEADER_BYTES + num_slots * self.segment.space.slot_bytes)

    def _num_hashes(self) -> int:
        return self._list.seek(0, os.SEEK_END) // HASH_BYTES

    def _num_slots(self) -> int:
        return max(self._file.seek(0, os.SEEK_END) - HEADER_BYTES, 0) // self.segment.space.slot_bytes


def _opened(path: Path) -> BinaryIO:
    """For appending, wherever it was read."""
    return open(path, "ab", buffering=0, opener=open_for_owner)


def _write_all(file: Any, data: bytes) -> None:
    view, done = memoryview(data), 0
    while done < len(view):  # a disk that is full may take a part
        done += file.write(view[done:])
