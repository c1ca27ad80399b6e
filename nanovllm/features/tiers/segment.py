"""A segment: the file in which records of one kind and one model lie, each in a slot of the same size.

    file     [ what it is for, as JSON, 4,096 bytes | slot 0 | slot 1 | ... ]
    slot     [ header: kind, depth, name, parent, extra, checksums | token ids | data ]

A slot says all that its record is known by, so an index can be made anew from a segment, and nothing that is read is
believed without being compared: a slot that was half written, written over, damaged or cut off is no record.

Others may keep files in the same directory. Only one that carries a segment's name, and its header or a slot, is ours
to remove.
"""

import json
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from nanovllm.core.tiers.names import NAME_BYTES, NO_EXTRA
from nanovllm.core.tiers.store import Record
from nanovllm.files.system import open_for_owner

MAGIC = b"nvkv0001"
HEADER_BYTES = 4096
HEAD = struct.Struct(f"<8sHHI{NAME_BYTES}s{NAME_BYTES}s{NAME_BYTES}sQ")  # then 8 bytes: checksum of it and the tokens
SUM = struct.Struct("<Q")
NAME = re.compile(rf"([0-9a-f]{{{2 * NAME_BYTES}}})-[0-9]+\.seg")


@dataclass(frozen=True)
class Space:
    """What a segment is for. fingerprint: hexadecimal. num_tokens, data_bytes: of each record. about: for people."""

    fingerprint: str
    kind: int
    num_tokens: int
    data_bytes: int
    about: str = field(default="", compare=False)

    @property
    def file_name(self) -> str:
        return f"{self.fingerprint}-{self.kind}.seg"

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


class Segment:
    """One file of slots. It belongs to one thread. Raises OSError where the file system does."""

    def __init__(self, directory: Path, space: Space, is_writable: bool = True) -> None:
        self.path, self.space = directory / space.file_name, space
        self._file: BinaryIO = _open(self.path, is_writable)
        if is_writable and self.space_of(self.path) != space:  # a new file, or one whose header is damaged
            self._file.seek(0)
            _write_all(self._file, [space.header])

    @classmethod
    def space_of(cls, path: Path) -> Space | None:
        """What a file says that it is for. None if it is not a segment, or not one of this version."""
        try:
            with open(path, "rb") as file:
                space = Space(**json.loads(file.read(HEADER_BYTES)))
            numbers = space.kind, space.num_tokens, space.data_bytes
            is_sane = all(type(number) is int and 0 <= number < 1 << 40 for number in numbers) and space.data_bytes
            return space if is_sane and space.file_name == path.name else None
        except (OSError, ValueError, TypeError):
            return None

    @property
    def num_slots(self) -> int:
        """That are there, whole."""
        return max(self.num_bytes - HEADER_BYTES, 0) // self.space.slot_bytes

    @property
    def num_bytes(self) -> int:
        return self._file.seek(0, 2)

    def write(self, slot: int, record: Record, data: Any) -> None:
        payload = memoryview(data).cast("B")
        assert len(payload) == self.space.data_bytes and len(record.token_ids) == self.space.num_tokens
        parent, checksum = record.parent or NO_EXTRA, xxhash.xxh3_64_intdigest(payload)
        head = HEAD.pack(MAGIC, record.kind, 0, record.depth, record.name, parent, record.extra, checksum)
        tokens = struct.pack(f"<{self.space.num_tokens}I", *record.token_ids)
        self._file.seek(self._offset(slot))
        _write_all(self._file, [head + SUM.pack(xxhash.xxh3_64_intdigest(head + tokens)) + tokens, payload])

    def read(self, slots: list[int]) -> Iterator[np.ndarray]:
        """The bytes of these slots; of neighbours in one go. What the file lacks is zeros."""
        start = 0
        while start < len(slots):
            end = start + 1
            while end < len(slots) and slots[end] == slots[end - 1] + 1:
                end += 1
            data = np.zeros((end - start, self.space.slot_bytes), np.uint8)
            view, done = data.data.cast("B"), 0
            if 0 <= slots[start] <= self.num_slots:  # otherwise it comes from an index that is damaged
                self._file.seek(self._offset(slots[start]))
            else:
                done = len(view)
            while done < len(view) and (n := self._file.readinto(view[done:])):  # type: ignore[attr-defined]
                done += n
            yield from data
            start = end

    def record_in(self, slot: np.ndarray) -> tuple[Record, np.ndarray] | None:
        """What a slot holds, and its data. None if it is damaged."""
        found, data = self._parse(slot[: self.space.head_bytes].tobytes()), slot[self.space.head_bytes :]
        return None if found is None or xxhash.xxh3_64_intdigest(data.data) != found[1] else (found[0], data)

    def records(self) -> Iterator[Record | None]:
        """What each slot says that it holds. Data is not read."""
        for slot in range(self.num_slots):
            self._file.seek(self._offset(slot))
            found = self._parse(self._file.read(self.space.head_bytes))
            yield None if found is None else found[0]

    def copy(self, source: int, target: int) -> None:
        """A slot's bytes into another slot."""
        slot = next(self.read([source]))
        self._file.seek(self._offset(target))
        _write_all(self._file, [slot.data])

    def truncate(self, num_slots: int) -> None:
        self._file.truncate(self._offset(num_slots))

    def close(self) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self.space.slot_bytes

    def _parse(self, head: bytes) -> tuple[Record, int] | None:
        """(record, checksum of its data), or None."""
        if len(head) < self.space.head_bytes:
            return None
        fixed, stated, tokens = head[: HEAD.size], head[HEAD.size : HEAD.size + SUM.size], head[HEAD.size + SUM.size :]
        if SUM.pack(xxhash.xxh3_64_intdigest(fixed + tokens)) != stated:
            return None
        magic, kind, _, depth, name, parent, extra, checksum = HEAD.unpack(fixed)
        if magic != MAGIC or kind != self.space.kind:
            return None
        token_ids = struct.unpack(f"<{self.space.num_tokens}I", tokens)
        return Record(name, None if depth == 0 else parent, token_ids, extra, depth, kind), checksum


def segments_in(directory: Path) -> list[Path]:
    """Files with a segment's name."""
    return [path for path in directory.iterdir() if NAME.fullmatch(path.name)]


def is_segment(path: Path) -> bool:
    """Does it carry the name, and the beginning of the header or of a slot? A damaged one may have lost either."""
    name = NAME.fullmatch(path.name)
    if name is None or not path.is_file():
        return False
    head = head_of(path, HEADER_BYTES + len(MAGIC))
    return head.startswith(f'{{"fingerprint": "{name[1]}"'.encode()) or head[HEADER_BYTES:] == MAGIC


def is_blank(path: Path) -> bool:
    """Is nothing in it, or zeros? So a process may leave a file that it has made and not written."""
    return not any(head_of(path, HEADER_BYTES + len(MAGIC)))


def head_of(path: Path, num_bytes: int) -> bytes:
    """The beginning of a file, nothing of one that another process has just removed."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read(num_bytes)
    return b""


def remove_segment(path: Path) -> None:
    """If it is one."""
    with suppress(FileNotFoundError):
        if is_segment(path) or (NAME.fullmatch(path.name) and is_blank(path)):
            path.unlink()


def _open(path: Path, is_writable: bool) -> BinaryIO:
    if not is_writable:
        return open(path, "rb", buffering=0)
    open(path, "ab", opener=open_for_owner).close()
    return open(path, "r+b", buffering=0)


def _write_all(file: Any, parts: list[Any]) -> None:
    for part in parts:
        view, done = memoryview(part), 0
        while done < len(view):  # a disk that is full may take a part
            done += file.write(view[done:])
