"""A directory of cached prefixes against a dictionary; killed, damaged, full, read-only, and shared by processes."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nanovllm.features.tiers.directory import SLACK_BYTES, CacheDirectory, prepared
from nanovllm.features.tiers.index import FILE, NameSet
from tests.features.tiers.chains import DATA, OTHER, SPACE, TierNames, chain, check_read, data_of, items

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
    directory.put(items(records))
    directory.put(items(branch))
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
        directory.put(items(chain(1, 2)))
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


@pytest.mark.parametrize(
    "change",
    [dict(token_ids=[9] * 4), dict(parent=bytes(16)), dict(extra=b"x" * 16), dict(depth=3)],
    ids=lambda change: next(iter(change)),
)
def test_a_name_alone_is_not_believed(tmp_path, change):
    """Who asks with another parent, other tokens or other keys gets nothing, though the name is there."""
    directory, records = opened(tmp_path / "cache"), chain(1, 2)
    directory.put(items(records))
    assert directory.read([records[1]._replace(**change)]) == []


def test_the_least_recently_used_chain_goes_leaf_by_leaf(tmp_path):
    directory = opened(tmp_path / "cache")
    first, second = chain(*range(10)), chain(*range(100, 110))
    directory.put(items(first))
    directory.put(items(second))
    directory.index.touch([record.name for record in first], 1 << 60)
    directory.put(items(chain(*range(200, 235))))
    names = kept(directory)
    assert all(record.name in names for record in first), "used since"
    left = [record.name in names for record in second]
    assert left == sorted(left, reverse=True) and not left[-1], "the deepest go first"


def test_a_chain_that_fills_the_budget_keeps_its_beginning(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(*range(100))
    for record in records:
        directory.put(items([record]))
    names = kept(directory)
    assert 35 < len(names) <= 40 and names == {record.name for record in records[: len(names)]}
    assert directory.num_refused == 100 - len(names)


def test_another_models_records_make_room(tmp_path):
    """Its file becomes shorter, by its last slot each time, and what is left of it is found where it lies now."""
    directory = opened(tmp_path / "cache")
    records = chain(*range(30))
    directory.put(items(records))
    other_names = TierNames(b"another")
    other = opened(tmp_path / "cache", space=OTHER)
    theirs = chain(*range(8), names=other_names)
    other.put(items(theirs, 3 * DATA))
    names = kept(other)
    assert all(record.name in names for record in theirs)
    left = [record.name in names for record in records]
    assert left == sorted(left, reverse=True) and 5 < sum(left) < 25
    assert check_read(other, theirs, 3 * DATA) == 8
    assert check_read(opened(tmp_path / "cache"), records) == sum(left)


def test_pruned_and_cleared(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(*range(30))
    directory.put(items(records))
    directory.close()
    whole = CacheDirectory(tmp_path / "cache", 0)
    assert whole.prune(directory.num_bytes) == 0
    assert 15 < whole.prune(INDEX_BYTES + 10 * SPACE.slot_bytes) < 25
    whole.close()
    assert 0 < check_read(opened(tmp_path / "cache"), records) < 30
    whole = CacheDirectory(tmp_path / "cache", 0)
    whole.clear()
    assert not [*(tmp_path / "cache").iterdir()]


class DirectoryModel(RuleBasedStateMachine):
    """Against a dictionary, with a clock of its own: what is kept, in which order it goes, through every reopening."""

    @initialize(folder=st.integers(0, 1 << 60))
    def begin(self, folder):
        import tempfile

        self.tmp = tempfile.TemporaryDirectory()
        self.path = Path(self.tmp.name) / "cache"
        self.directory = opened(self.path)

    paths = st.lists(st.integers(0, 3), min_size=1, max_size=14)

    @rule(path=paths)
    def put(self, path):
        before, records = kept(self.directory), chain(*path)
        names = {record.name for record in records}
        self.directory.touch([record.name for record in records])
        self.directory.put(items(records))
        after = kept(self.directory)
        assert after - before <= names and names & before <= after, "a chain that is used made room for itself"
        if before <= after and not before <= names:
            assert names <= after, "there was room, or somebody who could make some"

    @rule(path=paths)
    def read(self, path):
        records, names = chain(*path), kept(self.directory)
        expected = next((n for n, record in enumerate(records) if record.name not in names), len(records))
        assert check_read(self.directory, records) == expected
        self.directory.touch([record.name for record in records[:expected]])

    @rule()
    def reopen(self):
        before = kept(self.directory)
        self.directory.close()
        self.directory = opened(self.path)
        assert kept(self.directory) == before

    @rule()
    def lose_the_index(self):
        before = kept(self.directory)
        self.directory.close()
        (self.path / FILE).unlink()
        self.directory = opened(self.path)
        assert kept(self.directory) == before

    @rule(keep=st.integers(0, 40))
    def prune(self, keep):
        self.directory.prune(keep * SPACE.slot_bytes + INDEX_BYTES)

    @invariant()
    def names_are_those_of_the_index(self):
        if hasattr(self, "directory"):
            names = kept(self.directory)
            assert all(name in self.directory.names for name in names)
            assert len(self.directory.names) == len(names)

    def teardown(self):
        if hasattr(self, "tmp"):
            self.directory.close()
            self.tmp.cleanup()


TestDirectoryModel = DirectoryModel.TestCase
TestDirectoryModel.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


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

KILLED = """
    import os, random, sys
    from tests.features.tiers.test_directory import *

    seed, path = int(sys.argv[1]), sys.argv[2]
    rng, kill_at, count = random.Random(seed), None, 0
    kill_at = rng.randrange(1, 120)

    def killing(write):
        def wrapped(self, data):  # in small steps, so that the end may come at any byte
            global count
            done = 0
            while done < len(data):
                count += 1
                if count >= kill_at:
                    os.kill(os.getpid(), 9)
                done += write(self, data[done : done + 300])
            return done
        return wrapped

    import nanovllm.features.tiers.segment as segment
    write_all = segment._write_all
    class Slow:
        def __init__(self, file): self.file = file
        write = killing(lambda self, data: self.file.write(data))
    segment._write_all = lambda file, parts: write_all(Slow(file), parts)
    directory = opened(Path(path))
    while True:
        stem = rng.randrange(6)
        directory.put(items(chain(stem, *(rng.randrange(3) for _ in range(rng.randrange(8))))))
"""


def test_killed_at_any_byte(tmp_path):
    """Processes that write and die, one after another on one directory: what is found afterwards is right and whole."""
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    num_found = 0
    for seed in range(6):
        killed = subprocess.run([sys.executable, str(script), str(seed), str(tmp_path / "cache")], env=ENV)
        assert killed.returncode == -signal.SIGKILL
        directory = opened(tmp_path / "cache")
        kept(directory)
        num_found += check_all(directory)
        directory.close()
    assert num_found > 20


ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}


def check_all(directory: CacheDirectory) -> int:
    """Of all chains that KILLED may have written, the records that are found; each has the right data."""
    found: set[bytes] = set()

    def walk(path: list[int], width: int) -> None:
        for token_id in range(width):
            records = chain(*path, token_id)
            if records[-1].name in directory.names and check_read(directory, records) == len(records):
                found.add(records[-1].name)
                walk([*path, token_id], 3)

    walk([], 6)
    return len(found)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_at_random(tmp_path, seed):
    """Bytes changed, ends cut off, parts cleared, in segments and index, while it is closed or open: no crash, nothing
    wrong is read, and it works on."""
    rng = random.Random(seed)
    directory = opened(tmp_path / "cache")
    paths = [[rng.randrange(3) for _ in range(rng.randrange(1, 8))] for _ in range(12)]
    for _ in range(8):
        for path in rng.sample(paths, 4):
            guarded(directory, CacheDirectory.put, items(chain(*path)))
        is_open = rng.random() < 0.5
        if not is_open:
            directory.close()
        damage(rng, rng.choice([p for p in directory.path.iterdir() if p.stat().st_size]))
        if not is_open:
            directory = opened(tmp_path / "cache")
        for path in paths:
            guarded(directory, check_read, chain(*path))
    directory.put(items(chain(50, 51)))
    assert check_read(directory, chain(50, 51)) == 2


def guarded(directory: CacheDirectory, work, *arguments) -> None:
    """As DiskStore does: a damaged index is made anew."""
    try:
        work(directory, *arguments)
    except (sqlite3.DatabaseError, TypeError, ValueError, OverflowError):
        directory.rebuild()


def damage(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    kind, where = rng.randrange(3), rng.randrange(len(data))
    if kind == 0:
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 1:
        del data[where:]
    else:
        data[where : where + 500] = bytes(len(data[where : where + 500]))
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate(len(data))


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
            directory.put(items(chain(*path)))
            num_read += check_read(directory, chain(*path))
        print(num_read)
        """)
    )
    command = [sys.executable, str(script)]
    path = str(tmp_path / "cache")
    started = [subprocess.Popen([*command, seed, path], stdout=subprocess.PIPE, text=True, env=ENV) for seed in "12"]
    assert all(int(process.communicate()[0]) > 100 and process.returncode == 0 for process in started)
    kept(opened(tmp_path / "cache"))


def test_reading_only(tmp_path):
    directory = opened(tmp_path / "cache")
    directory.put(items(chain(1, 2)))
    directory.close()
    reader = opened(tmp_path / "cache", is_writable=False)
    assert check_read(reader, chain(1, 2)) == 2
    damage_slot = tmp_path / "cache" / SPACE.file_name
    data = bytearray(damage_slot.read_bytes())
    data[-1] ^= 1
    damage_slot.write_bytes(data)
    assert check_read(reader, chain(1, 2)) == 1
    assert data_of(chain(1, 2)[1]).nbytes == DATA
