"""A directory of cached prefixes against a dictionary; killed, damaged, full, read-only, and shared by processes."""

import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from examples.bench_tiers import SPACE, chain, check_read, damages, with_data
from nanovllm.core.tiers.names import TierNames
from nanovllm.features.tiers import directory as directory_module
from nanovllm.features.tiers import index as index_module
from nanovllm.features.tiers import rebuild as rebuild_module
from nanovllm.features.tiers.directory import DAMAGED_INDEX, SLACK_BYTES, CacheDirectory
from nanovllm.features.tiers.index import BUSY, FILE, Index, NameSet, prepared
from nanovllm.features.tiers.segment import Segment, Space
from nanovllm.tools.cli import main

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
DATA = SPACE.data_bytes
OTHER = Space("cd" * 16, 0, 4, 3 * DATA, "another model")
INDEX_BYTES = 40 << 10  # of a small index, and a segment's header
ROOM = 40 * SPACE.slot_bytes + SLACK_BYTES + INDEX_BYTES


def opened(path: Path, num_bytes: int = ROOM, space=SPACE, **options) -> CacheDirectory:
    directory = CacheDirectory(prepared(path), num_bytes, **options)
    directory.use([space])
    return directory


def kept(directory: CacheDirectory) -> set[bytes]:
    """Names in the index; checked: whole chains, each in a slot of its own, within the budget."""
    rows = directory.index._db.execute("SELECT name, parent, space, slot, depth FROM records").fetchall()
    names = {row[0] for row in rows}
    assert all(depth == 0 or parent in names for _, parent, _, _, depth in rows), "a child without its parent"
    assert len({(space, slot) for _, _, space, slot, _ in rows}) == len(rows), "two records in one slot"
    total = sum(path.stat().st_size for path in directory.path.iterdir())
    assert total <= directory.num_bytes, f"{total} bytes of {directory.num_bytes}"
    return names


def test_what_was_put_is_read(tmp_path):
    directory = opened(tmp_path / "cache")
    records, branch = chain(1, 2, 3, 4), chain(1, 2, 7)
    directory.put(with_data(records))
    directory.put(with_data(branch))
    assert check_read(directory, records) == 4 and check_read(directory, branch) == 3
    assert check_read(directory, chain(1, 2, 9)) == 2 and check_read(directory, chain(9, 2)) == 0
    assert directory.num_added == 5, "a common beginning is kept once"
    directory.close()
    again = opened(tmp_path / "cache")
    assert check_read(again, records) == 4 and all(record.name in again.names for record in records)


def test_it_is_its_owners_alone(tmp_path):
    old = os.umask(0)
    try:
        directory = opened(tmp_path / "cache")
        directory.put(with_data(chain(1, 2)))
    finally:
        os.umask(old)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache").iterdir()} == {0o600}


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'thesis.txt'; name a directory of its own"):
        prepared(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        prepared(tmp_path / "thesis.txt")


@pytest.mark.parametrize("name", ["notes.seg", "index.sqlite", "index.sqlite.bak", "ab" * 16 + "-0.seg", "sub.seg/"])
def test_files_of_others_with_names_as_ours(tmp_path, name, capsys):
    """Refused by the engine's option and by the command, and left as they are."""
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(b"mine " * 2000)
    with pytest.raises(ValueError, match=f"holds '{name.strip('/')}'; name a directory of its own"):
        prepared(tmp_path)
    assert main(["cache", str(tmp_path), "--clear"]) != 0
    assert f"holds '{name.strip('/')}'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name.strip("/")]


def test_files_of_others_that_come_later(tmp_path):
    """Whatever is removed, rebuilt or cleared: they stay, and take nothing of the budget."""
    directory, others = opened(tmp_path / "cache"), ["notes.seg", "index.sqlite.bak", "cd" * 16 + "-7.seg"]
    for name in others:
        (tmp_path / "cache" / name).write_bytes(b"mine " * 400)
    outside = tmp_path / OTHER.file_name
    outside.write_bytes(OTHER.header)
    directory.index.add_space(OTHER)
    directory.index._db.execute("UPDATE spaces SET file = ? WHERE file = ?", (f"../{outside.name}", OTHER.file_name))
    directory.put(with_data(chain(1, 2)))
    directory.rebuild()
    assert check_read(directory, chain(1, 2)) == 2
    directory.index.add_space(Space("ef" * 16, 0, 4, DATA))
    directory.index._db.execute("UPDATE spaces SET file = ? WHERE file LIKE 'ef%'", (f"../{outside.name}",))
    directory.prune(0)
    directory.forget_own()
    directory.clear()
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {*others} and outside.exists()


@pytest.mark.parametrize("about", ["x" * 5000, "\U0001f600" * 2000, '"' * 3000])
def test_a_header_fits_its_page(tmp_path, about):
    space = Space("ab" * 16, 0, 4, DATA, about)
    directory = opened(tmp_path / "cache", space=space)
    directory.put(with_data(chain(1, 2)))
    directory.close()
    (tmp_path / "cache" / FILE).unlink()
    found = Segment.space_of(tmp_path / "cache" / space.file_name)
    assert found == space and about.startswith(found.about) and found.about
    assert check_read(opened(tmp_path / "cache", space=space), chain(1, 2)) == 2


def test_who_is_stored_and_removed_at_once_is_not_told_of(tmp_path):
    """One put fills the budget twice: names, events and index agree."""
    directory, told = opened(tmp_path / "cache"), set()
    directory.on_stored = lambda records: told.update(record.name for record in records)
    directory.on_removed = told.difference_update
    directory.put([item for start in range(0, 600, 10) for item in with_data(chain(*range(start, start + 10)))])
    assert told == kept(directory) and len(directory.names) == len(told)


@pytest.mark.parametrize(
    "change",
    [dict(token_ids=[9] * 4), dict(parent=bytes(16)), dict(extra=b"x" * 16), dict(depth=3)],
    ids=lambda change: next(iter(change)),
)
def test_a_name_alone_is_not_believed(tmp_path, change):
    """Who asks with another parent, other tokens or other keys gets nothing, though the name is there."""
    directory, records = opened(tmp_path / "cache"), chain(1, 2)
    directory.put(with_data(records))
    assert directory.read([records[1]._replace(**change)]) == []


def test_the_least_recently_used_chain_goes_leaf_by_leaf(tmp_path):
    directory = opened(tmp_path / "cache")
    first, second = chain(*range(10)), chain(*range(100, 110))
    directory.put(with_data(first))
    directory.put(with_data(second))
    directory.index.touch([record.name for record in first], 1 << 60)
    directory.put(with_data(chain(*range(200, 235))))
    names = kept(directory)
    assert all(record.name in names for record in first), "used since"
    left = [record.name in names for record in second]
    assert left == sorted(left, reverse=True) and not left[-1], "the deepest go first"


def test_a_chain_that_fills_the_budget_keeps_its_beginning(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(*range(100))
    for record in records:
        directory.put(with_data([record]))
    names = kept(directory)
    assert 35 < len(names) <= 40 and names == {record.name for record in records[: len(names)]}
    assert directory.num_refused == 100 - len(names)


def test_another_models_records_make_room(tmp_path):
    """Its file becomes shorter, by its last slot each time, and what is left of it is found where it lies now."""
    directory = opened(tmp_path / "cache")
    records = chain(*range(30))
    directory.put(with_data(records))
    other_names = TierNames(b"another")
    other = opened(tmp_path / "cache", space=OTHER)
    theirs = chain(*range(8), names=other_names)
    other.put(with_data(theirs, 3 * DATA))
    names = kept(other)
    assert all(record.name in names for record in theirs)
    left = [record.name in names for record in records]
    assert left == sorted(left, reverse=True) and 5 < sum(left) < 25
    assert check_read(other, theirs, 3 * DATA) == 8
    assert check_read(opened(tmp_path / "cache"), records) == sum(left)


def test_pruned_and_cleared(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(*range(30))
    directory.put(with_data(records))
    directory.close()
    whole = CacheDirectory(tmp_path / "cache", 0)
    assert whole.prune(directory.num_bytes) == 0
    assert 15 < whole.prune(INDEX_BYTES + 10 * SPACE.slot_bytes) < 25
    whole.close()
    assert 0 < check_read(opened(tmp_path / "cache"), records) < 30
    whole = CacheDirectory(tmp_path / "cache", 0)
    whole.clear()
    assert not [*(tmp_path / "cache").iterdir()]


HOURS = 3600 * 1_000_000  # in microseconds


class DirectoryModel(RuleBasedStateMachine):
    """Days of an index, against a dictionary: what is kept, when it was used, who goes first; reopened, or lost."""

    @initialize()
    def begin(self):
        self.now, self.used = 0, dict[bytes, tuple[int, int]]()  # name -> (when it was used, minus its depth)
        self.ends = ExitStack()
        for module in (directory_module, index_module, rebuild_module):
            self.ends.enter_context(patch.object(module, "now_us", lambda: self.now))
        self.path = Path(self.ends.enter_context(tempfile.TemporaryDirectory())) / "cache"
        self.directory = opened(self.path)

    paths = st.lists(st.integers(0, 3), min_size=1, max_size=14)

    @rule(passed=st.integers(1, 3 * HOURS))
    def time_passes(self, passed):
        self.now += passed

    @rule(path=paths)
    def put(self, path):
        records = chain(*path)
        self.touch(records)
        before = self.used.copy()
        self.directory.put(with_data(records))
        after, ours = kept(self.directory), {record.name for record in records}
        for record in records:
            if record.name in after and record.name not in before:
                start = self.now if record.parent is None else self.used[record.parent][0]
                self.used[record.name] = start, -record.depth
        gone = before.keys() - after
        assert after - before.keys() <= ours and not gone & ours
        others = [before[name] for name in before.keys() - ours - gone]
        assert all(before[name] <= min(others, default=before[name]) for name in gone), "somebody older stays"
        assert ours <= after or not others, "there was room, or somebody to make some"
        self.used = {name: used for name, used in self.used.items() if name in after}

    @rule(path=paths)
    def read(self, path):
        records = chain(*path)
        expected = next((n for n, record in enumerate(records) if record.name not in self.used), len(records))
        assert check_read(self.directory, records) == expected
        self.touch(records)

    def touch(self, records):
        self.now += 1
        there = [record for record in records if record.name in self.used]
        self.directory.touch([record.name for record in there])
        self.used |= {record.name: (self.now, -record.depth) for record in there}

    @rule()
    def reopen(self):
        self.directory.close()
        self.directory = opened(self.path)

    @rule()
    def lose_the_index(self):
        """The segments do not say when their records were used: all count as used now."""
        self.directory.close()
        (self.path / FILE).unlink()
        self.directory = opened(self.path)
        self.used = {name: (self.now, depth) for name, (_, depth) in self.used.items()}

    @rule(keep=st.integers(0, 40))
    def prune(self, keep):
        self.directory.prune(keep * SPACE.slot_bytes + INDEX_BYTES)
        left = kept(self.directory)
        oldest_left = min((self.used[name] for name in left), default=(self.now, 0))
        assert all(self.used[name] <= oldest_left for name in self.used.keys() - left)
        self.used = {name: self.used[name] for name in left}

    @invariant()
    def the_index_is_the_dictionary(self):
        if hasattr(self, "directory"):
            kept(self.directory)
            rows = self.directory.index._db.execute("SELECT name, used, -depth FROM records").fetchall()
            assert {name: (used, depth) for name, used, depth in rows} == self.used
            assert len(self.directory.names) == len(rows) and all(name in self.directory.names for name in self.used)

    def teardown(self):
        if hasattr(self, "directory"):
            self.directory.close()
            self.ends.close()


TestDirectoryModel = DirectoryModel.TestCase
TestDirectoryModel.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)


def test_name_set_against_a_set():
    rng, names, model = random.Random(0), NameSet(), set()
    for _ in range(5000):
        name = rng.randrange(3000).to_bytes(8, "little") + b"rest of it"
        if rng.random() < 0.6:
            names.add(name)
            model.add(name)
        else:
            names.discard(name)
            model.discard(name)
        assert (name in names) == (name in model) and len(names) == len(model)
    assert {n.to_bytes(8, "little") + b"rest of it" for n in range(3000)} & model == {m for m in model if m in names}


# -- what happens to files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_damaged_at_random(tmp_path, seed):
    """Bytes changed, ends cut off, parts cleared, in segments and index, while it is closed or open: no crash, nothing
    wrong is read, and it works on."""
    assert sum(damages(40, tmp_path / "cache", ROOM, seed)) > 40
    directory = opened(tmp_path / "cache")
    directory.put(with_data(chain(50, 51)))
    assert check_read(directory, chain(50, 51)) == 2


@pytest.mark.parametrize("slot", [-1, 1 << 50, 1 << 62, "text", None])
def test_an_index_that_names_no_slot(tmp_path, slot):
    """Found by 10,000 damages: a number that no file has."""
    directory, records = opened(tmp_path / "cache"), chain(1, 2, 3)
    directory.put(with_data(records))
    directory.index._db.execute("UPDATE records SET slot = ? WHERE depth = 1", (slot,))
    try:
        assert check_read(directory, records) == 1
    except DAMAGED_INDEX:
        directory.rebuild()
    directory.put(with_data(records))
    assert check_read(directory, records) == 3


def test_two_processes_write(tmp_path):
    """Both in one small directory, each making room for the other: everything that is read is right."""
    script = tmp_path / "writer.py"
    script.write_text(
        textwrap.dedent("""
        import random, sys
        from tests.features.tiers.test_directory import *

        rng, directory = random.Random(int(sys.argv[1])), opened(Path(sys.argv[2]))
        num_read = 0
        for _ in range(150):
            path = [rng.randrange(4), *(rng.randrange(3) for _ in range(rng.randrange(6)))]
            directory.put(with_data(chain(*path)))
            num_read += check_read(directory, chain(*path))
        print(num_read)
        """)
    )
    command = [sys.executable, str(script)]
    path = str(tmp_path / "cache")
    started = [subprocess.Popen([*command, seed, path], stdout=subprocess.PIPE, text=True, env=ENV) for seed in "12"]
    assert all(int(process.communicate()[0]) > 100 and process.returncode == 0 for process in started)
    kept(opened(tmp_path / "cache"))


def test_a_second_process_is_faster(tmp_path, monkeypatch):
    """It opens the index that the first has just made and writes a segment: the index is not taken for lost."""
    prepare, others = Index._prepare, []

    def made_then_overtaken(index: Index, is_writable: bool) -> None:
        prepare(index, is_writable)
        if not others:
            others.append(None)
            others[0] = opened(tmp_path / "cache")
            others[0].put(with_data(chain(1)))

    monkeypatch.setattr(Index, "_prepare", made_then_overtaken)
    first = opened(tmp_path / "cache")
    others[0].put(with_data(chain(2)))
    assert [check_read(first, chain(number)) for number in (1, 2)] == [1, 1]


def test_reading_only(tmp_path):
    directory = opened(tmp_path / "cache")
    directory.put(with_data(chain(1, 2)))
    directory.close()
    reader = opened(tmp_path / "cache", is_writable=False)
    assert check_read(reader, chain(1, 2)) == 2
    damage_slot = tmp_path / "cache" / SPACE.file_name
    data = bytearray(damage_slot.read_bytes())
    data[-1] ^= 1
    damage_slot.write_bytes(data)
    assert check_read(reader, chain(1, 2)) == 1


LOCKER = """
import sqlite3, sys
index = sqlite3.connect(sys.argv[1], isolation_level=None)
index.execute("BEGIN " + sys.argv[2])
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked_elsewhere(path: Path, kind: str):
    """By another process. IMMEDIATE: others may read. EXCLUSIVE: they may not."""
    command = [sys.executable, "-c", LOCKER, str(path / FILE), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield
        process.stdin.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps the locks of a handle")
def test_locks_of_this_process_are_not_lost(tmp_path):
    """POSIX drops them when any handle of the file is closed: so nothing but SQLite opens an index that is in use."""
    directory = opened(tmp_path / "cache")
    directory.put(with_data(chain(1)))
    command = [
        sys.executable,
        "-c",
        LOCKER.replace("connect(", "connect(timeout=0, database="),
        str(directory.index.path),
    ]
    with directory.index.writing():
        for is_writable in (False, True):
            other = CacheDirectory(prepared(tmp_path / "cache"), ROOM, is_writable)
            other.be(BUSY)
            if is_writable:
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    other.sync()
            other.close()
        tried = subprocess.run([*command, "IMMEDIATE"], capture_output=True, text=True, input="")
        assert "database is locked" in tried.stderr
    directory.put(with_data(chain(2)))
    directory.sync()
    assert check_read(directory, chain(2)) == 1
