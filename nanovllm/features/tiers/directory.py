"""A directory of cached prefixes: segments, their index, and a budget in bytes that holds at every moment.

Several processes may use it at once, each for reading and writing: a change of the index is a transaction, and within
it nobody else writes. Who reads a slot compares it with what was asked for, so a slot that another process writes
meanwhile is a miss, and nothing worse.
"""

import os
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nanovllm.core.tiers.store import Record
from nanovllm.features.tiers.index import AT_LEISURE, FILE, FILES, Index, NameSet, Patience, Place, now_us
from nanovllm.features.tiers.rebuild import close_hole, new_index
from nanovllm.features.tiers.segment import NAME, Segment, Space, remove_segment, segments_in

SLACK_BYTES = 512 << 10  # of the budget, for the index: its journal, and what a transaction adds
READ_BYTES = 64 << 20  # at a time
DAMAGED_INDEX = (sqlite3.DatabaseError, TypeError, ValueError, OverflowError)  # what a row that is nonsense may raise


class CacheDirectory:
    """It belongs to one thread at a time. Methods raise OSError and sqlite3.Error. Of the latter all but an
    OperationalError say that the index is damaged: rebuild() makes a new one.

    spaces       {kind: Space} that this process reads and writes; others are only made room in
    names        of records in those
    on_stored, on_removed    told of records, in the thread that changes something, or finds that another process has
    on_lost      told that any record may have gone
    patience     with other processes that lock the index
    num_added    records that were kept
    num_refused  records that found no room, or no parent
    num_removed  records that have made room for others
    num_damaged  records that were found to be no records
    """

    def __init__(self, path: Path, num_bytes: int, is_writable: bool = True) -> None:
        """Raises OSError or sqlite3.OperationalError if it cannot be opened."""
        self.path, self.num_bytes, self.is_writable = path, num_bytes, is_writable
        self.spaces: dict[int, Space] = {}
        self.names = NameSet()
        self.on_stored: Callable[[list[Record]], None] = lambda records: None
        self.on_removed: Callable[[list[bytes]], None] = lambda names: None
        self.on_lost: Callable[[], None] = lambda: None
        self.patience = AT_LEISURE
        self.num_added = self.num_refused = self.num_removed = self.num_damaged = 0
        self._own: dict[int, tuple[int, Segment]] = {}  # kind -> (its id in the index, its segment)
        self._holes: dict[int, set[int]] = {}  # id of a space -> slots without a record; made when it is needed
        self.index: Index | None = None
        self._or_rebuild(self._open_index)

    def use(self, spaces: Iterable[Space]) -> None:
        """What this process reads and writes from now on."""
        self.spaces = {space.kind: space for space in spaces}
        self._or_rebuild(self._open)

    def _or_rebuild(self, work: Callable[[], None]) -> None:
        try:
            work()
        except sqlite3.OperationalError:
            raise
        except DAMAGED_INDEX:
            if not self.is_writable:
                raise
            self.rebuild()

    def _open_index(self) -> None:
        self.index = Index(self.path, self.is_writable)
        if self.index.is_lost:
            raise sqlite3.DatabaseError("the index is lost")

    def _open(self) -> None:
        assert self.index is not None
        if self.is_writable:
            with self.index.writing():
                ids = {kind: self.index.add_space(space) for kind, space in self.spaces.items()}
        else:
            by_file = {file: number for number, file in self.index.spaces().items()}
            there = {kind: space.file_name for kind, space in self.spaces.items() if space.file_name in by_file}
            ids = {kind: by_file[file] for kind, file in there.items() if (self.path / file).exists()}
        self._own = {kind: (ids[kind], Segment(self.path, self.spaces[kind], self.is_writable)) for kind in ids}
        self._holes = {}
        self.names = NameSet(self.index.names(ids.values()))

    def rebuild(self) -> None:
        """Make a new index of what the segments say."""
        self.close()
        self.index = new_index(self.path, self.spaces.values())
        self._open()
        self.be(self.patience)
        self.on_lost()

    def be(self, patience: Patience) -> None:
        """Wait no longer than this for other processes, from now on."""
        assert self.index is not None
        self.patience = patience
        self.index.be(patience)

    def close(self) -> None:
        for _, segment in self._own.values():
            segment.close()
        self._own = {}
        if self.index is not None:
            self.index.close()
            self.index = None

    def sync(self) -> None:
        """What was written so far is on the disk when this returns."""
        if not self.is_writable:
            return
        for _, segment in self._own.values():
            os.fsync(segment.fileno())
        if self.index is not None:
            self.index.sync()

    # -- records --------------------------------------------------------------------------------------------------

    def put(self, items: list[tuple[Record, Any]]) -> None:
        """Keep records and their data, parents first; but those that are known, or have no room, or no parent here."""
        assert self.index is not None
        added: list[Record] = []
        gone: list[Place] = []
        try:
            with self.index.writing():
                room = self.num_bytes - SLACK_BYTES - self.used_bytes()
                for record, data in items:
                    room = self._put(record, data, room, added, gone)
                stored = [record for record in added if self.index.has(record.name)]  # another may have its room
                removed = [place.name for place in gone if not self.index.has(place.name)]
        except BaseException:
            self._holes.clear()  # slots that were taken for nothing are among them
            raise
        self._forget_names(removed)
        for record in stored:
            self.names.add(record.name)
        self.num_added += len(added)
        self.num_removed += len(gone)
        self.on_stored(stored)

    def tell_of(self, records: list[Record]) -> None:
        """Tell of those that are here, though they may have been for long. Parents come first."""
        self.on_stored([record for record in records if record.name in self.names])

    def _put(self, record: Record, data: Any, room: int, added: list[Record], gone: list[Place]) -> int:
        """Returns the room that is left in the budget, in bytes."""
        index, (space, segment) = self.index, self._own[record.kind]
        assert index is not None
        if index.has(record.name):
            return room
        if not (record.parent is None or index.has(record.parent)):
            self.num_refused += 1
            return room
        while (slot := self._hole(space, segment)) is None:
            if room >= segment.space.slot_bytes:
                slot, room = segment.num_slots, room - segment.space.slot_bytes
                break
            victim = index.oldest()
            if victim is None or victim.name == record.parent:  # its own chain fills the budget
                self.num_refused += 1
                return room
            removed = index.remove(victim)
            gone += removed
            room += sum(self._give_up(place, space) for place in removed)
        segment.write(slot, record, data)
        if index.add(record, space, slot):
            added.append(record)
        else:
            self._holes[space].add(slot)
        return room

    def read(self, records: list[Record]) -> list[Any]:
        """Data of the first of these, up to one that is not there, READ_BYTES at most; the first in any case."""
        assert self.index is not None
        if not records or records[0].kind not in self._own:
            return []
        (space, segment), places = self._own[records[0].kind], list[Place]()
        for record in records[: max(1, READ_BYTES // segment.space.slot_bytes)]:
            place = self.index.place_of(record.name)
            if place is None or place.space != space:
                self._forget_names([record.name])
                break
            places.append(place)
        found = []
        for record, place, slot in zip(records, places, segment.read([p.slot for p in places]), strict=False):
            held = segment.record_in(slot)
            if held is None or held[0].name != place.name:
                self._damaged(place)
                break
            if held[0] != record._replace(token_ids=tuple(record.token_ids)):
                break
            found.append(held[1])
        return found

    def touch(self, names: list[bytes], now: int | None = None) -> None:
        """These were used at a time, in microseconds, or now. Parents come first, also of calls with the same time."""
        assert self.index is not None
        with self.index.writing():
            self.index.touch(names, now_us() if now is None else now)

    def _damaged(self, place: Place) -> None:
        """A slot does not hold what the index says. Another process may just have changed both: then all is well."""
        assert self.index is not None
        if not self.is_writable:
            self._forget_names([place.name])
            return
        try:
            with self.index.writing():
                gone = self.index.remove(place)
        except sqlite3.OperationalError:  # another process writes: who reads it later removes it
            self._forget_names([place.name])
            return
        self._forget_names([place.name for place in gone])
        self._holes.clear()  # they are found anew when a slot is needed
        self.num_damaged += bool(gone)

    def _forget_names(self, names: list[bytes]) -> None:
        for name in names:
            self.names.discard(name)
        self.on_removed(names)

    @property
    def own_bytes(self) -> int:
        """Of the segments that this process reads."""
        paths = (self.path / space.file_name for space in self.spaces.values())
        return sum(path.stat().st_size for path in paths if path.exists())

    # -- room -----------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Of segments and index."""
        return sum(path.stat().st_size for path in [*segments_in(self.path), self.path / FILE])

    def _hole(self, space: int, segment: Segment) -> int | None:
        assert self.index is not None
        if space not in self._holes:
            self._holes[space] = set(range(segment.num_slots)) - self.index.slots(space)
        holes = self._holes[space]
        while holes:
            slot = holes.pop()
            if (
                0 <= slot < segment.num_slots and self.index.in_slot(space, slot) is None
            ):  # other processes fill them, too
                return slot
        return None

    def _give_up(self, place: Place, wanted: int) -> int:
        """A record has gone: its slot is for another of the space `wanted`, or its file is shorter. By how much."""
        if place.space == wanted:
            self._holes[wanted].add(place.slot)
            return 0
        assert self.index is not None
        self._holes.pop(place.space, None)
        return close_hole(self.path, self.index, place)

    def prune(self, num_bytes: int) -> int:
        """Remove the least recently used records until no more than num_bytes are used. Returns how many."""
        assert self.index is not None
        gone: list[Place] = []
        with self.index.writing():
            room = num_bytes - self.used_bytes()
            while room < 0 and (victim := self.index.oldest()) is not None:
                removed = self.index.remove(victim)
                gone += removed
                room += sum(self._give_up(place, wanted=-1) for place in removed)
            for number, file in self.index.spaces().items():
                if not self.index.slots(number) and number not in [own for own, _ in self._own.values()]:
                    if NAME.fullmatch(file):  # else it comes from an index that is damaged
                        remove_segment(self.path / file)
                    self.index.remove_space(number)
        self._forget_names([place.name for place in gone])
        return len(gone)

    def forget_own(self) -> None:
        """Remove what this process may read."""
        assert self.index is not None
        with self.index.writing():
            for space, segment in self._own.values():
                self.index.remove_all(space)
                segment.truncate(0)
        self.names, self._holes = NameSet(), {}
        self.on_lost()

    def clear(self) -> None:
        """Remove every file of ours."""
        self.close()
        for path in segments_in(self.path):
            remove_segment(path)
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
