"""The index of a directory: which record lies in which slot, and which was used least recently. SQLite keeps it.

It may be wrong, and may be lost: a slot is compared with what is asked for, and segments say all that is in here but
for the times of use. SQLite's journal makes the changes of a killed process whole or undone without any fsync.

Nobody but SQLite opens an index that is in use. Whoever closes a file drops all of this process's locks on it (POSIX),
also those of another engine in this process that is in the middle of a change.

No record was used later than its parent: it begins with its parent's time, and whoever uses it uses all before it. So
the least recently used record, the deepest of those used together, is nobody's parent: what is kept is whole chains.
"""

import os
import sqlite3
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from nanovllm.checks.values import shorten
from nanovllm.core.tiers.store import Record
from nanovllm.features.tiers.segment import NAME, Space, head_of, is_blank, is_segment, segments_in
from nanovllm.files.system import open_for_owner

FILE = "index.sqlite"
FILES = (FILE, f"{FILE}-journal", f"{FILE}-wal", f"{FILE}-shm")
VERSION = 1
SCHEMA = """
CREATE TABLE spaces (id INTEGER PRIMARY KEY, file TEXT UNIQUE NOT NULL, about TEXT, used INTEGER);
CREATE TABLE records (name BLOB PRIMARY KEY, parent BLOB, space INTEGER, slot INTEGER, depth INTEGER, used INTEGER,
    hits INTEGER DEFAULT 0) WITHOUT ROWID;
CREATE UNIQUE INDEX by_slot ON records (space, slot);
CREATE INDEX by_use ON records (used, depth DESC);
CREATE INDEX by_parent ON records (parent);
CREATE TABLE digests (path TEXT PRIMARY KEY, stamp TEXT, digest TEXT);
"""
CHILDREN = "SELECT r.name FROM records r JOIN below ON r.parent = below.name"
BELOW = f"WITH RECURSIVE below(name) AS (SELECT ? UNION {CHILDREN})"
SIGN = b"CREATE TABLE spaces (id INTEGER PRIMARY KEY, file TEXT"  # SQLite keeps the schema as text


class Patience(NamedTuple):
    """How long to wait for another process that has locked the index, in seconds."""

    reading: float
    writing: float


AT_LEISURE = Patience(2.0, 2.0)  # while an engine starts, and in commands
BUSY = Patience(0.1, 0.0)  # while requests are answered


def prepared(path: str | os.PathLike) -> Path:
    """A directory for this purpose alone, its owner's alone; made if it is missing. Raises ValueError, or OSError.

    Somebody else's files may have a suffix or a name as ours. So one file, at least, must be ours by its content, or
    all of them empty.
    """
    directory = Path(path).expanduser()
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"prefix_cache_dir: {shorten(str(path))} is a file; name a directory, or one to be made")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = [*directory.iterdir()]
    has_ours = any(map(is_segment, files)) or any(map(_is_index, files))  # an index that is in use has segments
    for file in files:
        named = (file.name in FILES or NAME.fullmatch(file.name)) and not file.is_dir()
        if not named or not (has_ours or file.name in FILES[1:] or is_blank(file)):
            found = f"{shorten(str(path))} holds {shorten(file.name)}"
            raise ValueError(f"prefix_cache_dir: {found}; name a directory of its own")
    with suppress(OSError):  # it may be somebody else's, or read-only
        directory.chmod(0o700)
    return directory


def _is_index(path: Path) -> bool:
    if path.name != FILE or not path.is_file():
        return False
    return SIGN in head_of(path, 1 << 16)


class Place(NamedTuple):
    name: bytes
    space: int
    slot: int


class Index:
    """One connection. It may move between threads, and is used by one at a time. Raises sqlite3.Error.

    is_lost: there was none, or an empty file, though there were segments.
    """

    is_lost = False
    patience = AT_LEISURE

    def __init__(self, directory: Path, is_writable: bool = True) -> None:
        """Raises sqlite3.DatabaseError for a file that is no index, or no whole one."""
        self.path = directory / FILE
        if is_writable:
            with suppress(FileExistsError):  # one that is there is not opened: see above
                os.close(open_for_owner(str(self.path), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        mode = "rw" if is_writable else "ro"
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(is_writable)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, is_writable: bool) -> None:
        self._wait_at_most(self.patience.reading)
        for pragma in ("mmap_size = 0", "cell_size_check = ON", "trusted_schema = OFF", "synchronous = OFF"):
            self._db.execute(f"PRAGMA {pragma}")
        if is_writable:
            self._db.execute("PRAGMA journal_mode = TRUNCATE")
        if self._one("PRAGMA quick_check(1)") != "ok":
            raise sqlite3.DatabaseError("the index is damaged")
        if (version := self._one("PRAGMA user_version")) == 0 and is_writable:
            with self.writing():
                if self._one("PRAGMA user_version") == 0:  # another process may have been first
                    for statement in SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {VERSION}")
                    # No process can write a segment before this transaction ends, so these are older than the index.
                    self.is_lost = bool(segments_in(self.path.parent))
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"an index of version {version}, and this is {VERSION}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction: all of it, or nothing; and no other process writes, here or into segments, meanwhile."""
        self._wait_at_most(self.patience.writing)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._wait_at_most(self.patience.reading)

    def sync(self) -> None:
        """All that was ever written is on the disk when this returns."""
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            with self.writing():
                self._db.execute(f"PRAGMA user_version = {VERSION}")  # a change, so that there is something to commit
        finally:
            self._db.execute("PRAGMA synchronous = OFF")

    def be(self, patience: Patience) -> None:
        self.patience = patience
        self._wait_at_most(patience.reading)

    def _wait_at_most(self, seconds: float) -> None:
        self._db.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")

    def _one(self, statement: str, *values: object) -> object:
        row = self._db.execute(statement, values).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        self._db.close()

    # -- spaces ---------------------------------------------------------------------------------------------------

    def add_space(self, space: Space) -> int:
        self._db.execute("INSERT OR IGNORE INTO spaces (file, about) VALUES (?, ?)", (space.file_name, space.about))
        return self._one("SELECT id FROM spaces WHERE file = ?", space.file_name)  # type: ignore[return-value]

    def spaces(self) -> dict[int, str]:
        """id -> file."""
        return dict(self._db.execute("SELECT id, file FROM spaces"))

    def remove_space(self, space: int) -> None:
        self._db.execute("DELETE FROM spaces WHERE id = ?", (space,))

    def summary(self) -> list[tuple[int, int, int, int, int]]:
        """(space, records, hits, first use, last use) of each; times in microseconds."""
        columns = "space, count(*), sum(hits), min(used), max(used)"
        return self._db.execute(f"SELECT {columns} FROM records GROUP BY space").fetchall()

    # -- records --------------------------------------------------------------------------------------------------

    def names(self, spaces: Iterable[int]) -> Iterator[bytes]:
        for space in spaces:
            yield from (row[0] for row in self._db.execute("SELECT name FROM records WHERE space = ?", (space,)))

    def slots(self, space: int) -> set[int]:
        return {row[0] for row in self._db.execute("SELECT slot FROM records WHERE space = ?", (space,))}

    def num_records(self) -> int:
        return self._one("SELECT count(*) FROM records")  # type: ignore[return-value]

    def has(self, name: bytes) -> bool:
        return self._one("SELECT 1 FROM records WHERE name = ?", name) is not None

    def place_of(self, name: bytes) -> Place | None:
        row = self._db.execute("SELECT name, space, slot FROM records WHERE name = ?", (name,)).fetchone()
        return None if row is None else Place(*row)

    def in_slot(self, space: int, slot: int) -> bytes | None:
        return self._one("SELECT name FROM records WHERE space = ? AND slot = ?", space, slot)  # type: ignore[return-value]

    def add(self, record: Record, space: int, slot: int, used: int | None = None) -> bool:
        """False, with nothing changed, if its parent is not kept. used: given where a parent may come later."""
        if used is None and record.parent is not None:
            used = self._one("SELECT used FROM records WHERE name = ?", record.parent)  # type: ignore[assignment]
            if used is None:
                return False
        values = record.name, record.parent, space, slot, record.depth, now_us() if used is None else used
        self._db.execute(
            "INSERT OR REPLACE INTO records (name, parent, space, slot, depth, used) VALUES (?, ?, ?, ?, ?, ?)", values
        )
        return True

    def move(self, place: Place, slot: int) -> None:
        self._db.execute("UPDATE records SET slot = ? WHERE name = ?", (slot, place.name))

    def touch(self, names: Iterable[bytes], now: int) -> None:
        self._db.executemany(
            "UPDATE records SET used = max(used, ?), hits = hits + 1 WHERE name = ?", ((now, name) for name in names)
        )

    def oldest(self) -> Place | None:
        """The least recently used record; the deepest of those that were used together."""
        row = self._db.execute("SELECT name, space, slot FROM records ORDER BY used, depth DESC LIMIT 1").fetchone()
        return None if row is None else Place(*row)

    def remove(self, place: Place) -> list[Place]:
        """A record, if it is still there, and all below it. Those that were removed."""
        if self._one("SELECT slot FROM records WHERE name = ?", place.name) != place.slot:
            return []
        below = f"{BELOW} SELECT name, space, slot FROM records WHERE name IN (SELECT name FROM below)"
        gone = [Place(*row) for row in self._db.execute(below, (place.name,)).fetchall()]
        self._db.executemany("DELETE FROM records WHERE name = ?", ((found.name,) for found in gone))
        return gone

    def remove_all(self, space: int) -> None:
        self._db.execute("DELETE FROM records WHERE space = ?", (space,))

    def remove_orphans(self) -> list[Place]:
        """Records that cannot be reached from the first one of their chain."""
        reached = (
            "WITH RECURSIVE reached(name) AS (SELECT name FROM records WHERE depth = 0 UNION "
            "SELECT r.name FROM records r JOIN reached p ON r.parent = p.name) "
            "SELECT name, space, slot FROM records WHERE name NOT IN (SELECT name FROM reached)"
        )
        gone = [Place(*row) for row in self._db.execute(reached).fetchall()]
        self._db.executemany("DELETE FROM records WHERE name = ?", ((found.name,) for found in gone))
        return gone

    # -- digests of files -----------------------------------------------------------------------------------------

    def digest(self, path: str, stamp: str) -> str | None:
        """Of a file's content, if it was computed when the file had this stamp."""
        return self._one("SELECT digest FROM digests WHERE path = ? AND stamp = ?", path, stamp)  # type: ignore[return-value]

    def keep_digest(self, path: str, stamp: str, digest: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", (path, stamp, digest))


def now_us() -> int:
    """The time, in microseconds."""
    return time.time_ns() // 1000


class NameSet:
    """Which names there are, in 8 bytes each, to be asked without a disk. Any thread asks, one changes it.

    Two names may agree in 8 bytes: then a True is wrong, and costs a look at the disk.
    """

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        self._parts = array("Q", sorted(map(_key, names))), set[int](), set[int]()  # in order; since added; since gone

    def __contains__(self, name: bytes) -> bool:
        (ordered, added, gone), key = self._parts, _key(name)
        if key in added:
            return True
        index = bisect_left(ordered, key)
        return index < len(ordered) and ordered[index] == key and key not in gone

    def __len__(self) -> int:
        ordered, added, gone = self._parts
        return len(ordered) + len(added) - len(gone)

    @property
    def num_bytes(self) -> int:
        ordered, added, gone = self._parts
        return 8 * len(ordered) + 100 * (len(added) + len(gone))

    def add(self, name: bytes) -> None:
        ordered, added, gone = self._parts
        gone.discard(_key(name))
        if name not in self:
            added.add(_key(name))
        if len(added) + len(gone) > 1024 + len(ordered) // 16:
            self._parts = array("Q", sorted((set(ordered) - gone) | added)), set(), set()

    def discard(self, name: bytes) -> None:
        _, added, gone = self._parts
        added.discard(_key(name))
        if name in self:
            gone.add(_key(name))


def _key(name: bytes) -> int:
    return int.from_bytes(name[:8], "little")
