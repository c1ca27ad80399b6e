"""A directory of cached prefixes: what was put is read, killed, damaged, full, read-only, and shared by processes."""

import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.damaged_tiers import SPACE, chain, check_read, damages, with_data
from nanovllm.features.tiers.directory import LOCK, NUM_SEGMENTS, CacheDirectory, prepared, segments_in
from nanovllm.features.tiers.segment import HASH_BYTES, HEADER_BYTES, Space, space_of
from nanovllm.files.system import lock_file
from nanovllm.tools.cli import main

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
DATA = SPACE.data_bytes
OTHER = Space("cd" * 16, 0, 4, 3 * DATA, "another model")
ROOM = 200_000


def opened(path: Path, num_bytes: int = ROOM, space=SPACE, **options) -> CacheDirectory:
    directory = CacheDirectory(prepared(path), num_bytes, **options)
    directory.use([space])
    return directory


def check_budget(directory: CacheDirectory) -> None:
    total = sum(path.stat().st_size for path in directory.path.iterdir())
    assert total <= directory.num_bytes, f"{total} bytes of {directory.num_bytes}"


def test_what_was_put_is_read(tmp_path):
    directory = opened(tmp_path / "cache")
    records, branch = chain(1, 2, 3, 4), chain(1, 2, 7)
    directory.put(with_data(records))
    directory.put(with_data(branch))
    assert check_read(directory, records) == 4 and check_read(directory, branch) == 3
    assert check_read(directory, chain(1, 2, 9)) == 2 and check_read(directory, chain(9, 2)) == 0
    assert len(directory) == 5, "a common beginning is kept once"
    directory.close()
    again = opened(tmp_path / "cache")
    assert check_read(again, records) == 4 and all(record.key in again for record in records)


def test_it_is_its_owners_alone(tmp_path):
    old = os.umask(0)
    try:
        directory = opened(tmp_path / "cache")
        directory.put(with_data(chain(1, 2)))
        directory.keep_digest("weights", "stamp", "digest")
    finally:
        os.umask(old)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache").iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["thesis.txt", "notes.seg", "ab" * 16 + "-0.seg", "prefix-cache.lock/", "sub/"])
def test_a_directory_of_something_else_is_refused(tmp_path, name, capsys):
    """By the engine's option and by the command, and left as it is."""
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(b"mine " * 2000)
    with pytest.raises(ValueError, match=f"holds '{name.strip('/')}'; name a directory of its own"):
        prepared(tmp_path)
    assert main(["cache", str(tmp_path), "--clear"]) != 0
    assert f"holds '{name.strip('/')}'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name.strip("/")]


def test_what_nfs_leaves_of_a_removed_file_is_no_file_of_others(tmp_path):
    (tmp_path / ".nfs000000000000002a00000001").write_bytes(b"open elsewhere")
    directory = opened(tmp_path)
    directory.put(with_data(chain(1)))
    directory.clear()
    assert {path.name for path in tmp_path.iterdir()} == {".nfs000000000000002a00000001", LOCK}


def test_files_of_others_that_come_later_stay(tmp_path):
    directory, others = opened(tmp_path / "cache"), {"notes.seg", "cd" * 16 + "-7.idx"}
    for name in others:
        (tmp_path / "cache" / name).write_bytes(b"mine " * 400)
    for start in range(0, 400, 8):
        directory.put(with_data(chain(*range(start, start + 8))))
    assert check_read(directory, chain(*range(392, 400))) == 8 and directory.num_removed > 0
    directory.prune(0)
    directory.forget_own()
    directory.clear()
    assert {path.name for path in (tmp_path / "cache").iterdir()} == others | {LOCK}


@pytest.mark.parametrize("about", ["x" * 5000, "\U0001f600" * 2000, '"' * 3000])
def test_a_header_fits_its_page(tmp_path, about):
    space = Space("ab" * 16, 0, 4, DATA, about)
    directory = opened(tmp_path / "cache", space=space)
    directory.put(with_data(chain(1, 2)))
    [path] = segments_in(tmp_path / "cache")
    found = space_of(path)
    assert found == space and about.startswith(found.about) and found.about
    assert check_read(opened(tmp_path / "cache", space=space), chain(1, 2)) == 2


def test_a_damaged_header_is_no_space(tmp_path):
    directory = opened(tmp_path / "cache")
    directory.put(with_data(chain(1)))
    [path] = segments_in(tmp_path / "cache")
    for damaged in (b"[" * HEADER_BYTES, b"[1]", b"\xff"):
        path.write_bytes(damaged)
        assert space_of(path) is None


@pytest.mark.parametrize(
    "change",
    [dict(token_ids=[9] * 4), dict(parent_hash=bytes(32)), dict(parent_hash=None), dict(extra=b"x" * 16)],
    ids=lambda change: next(iter(change)),
)
def test_a_hash_alone_is_not_believed(tmp_path, change):
    """Whoever asks with another parent, other tokens or other keys gets nothing, though the hash is there."""
    directory, records = opened(tmp_path / "cache"), chain(1, 2)
    directory.put(with_data(records))
    assert directory.read([records[1]._replace(**change)]) == []


def test_a_block_without_its_parent_is_refused(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(1, 2, 3)
    directory.put(with_data(records[1:]))
    assert len(directory) == 0
    directory.put(with_data(records[:1]))
    directory.put(with_data(records[1:]))
    assert check_read(directory, records) == 3


# -- room --------------------------------------------------------------------------------------------------------------


def test_the_budget_holds_and_what_was_used_last_stays(tmp_path):
    """Room is made by whole segments: of a sixteenth of the budget, so about so much is lost more than needed."""
    directory, told = opened(tmp_path / "cache"), set()
    directory.on_stored = lambda records: told.update(record.key for record in records)
    directory.on_removed = told.difference_update
    used = chain(*range(5))
    directory.put(with_data(used))
    for start in range(10, 1000, 10):
        directory.touch([record.key for record in used])
        directory.put(with_data(chain(*range(start, start + 10))))
        check_budget(directory)
        assert check_read(directory, chain(*range(start, start + 10))) == 10, "what is new is there"
    assert check_read(directory, used) == 5
    assert len(directory) * SPACE.slot_bytes > 0.4 * ROOM and directory.num_removed > 500
    assert told == set(directory._places)


def test_a_parent_is_not_removed_before_its_children(tmp_path):
    """A block counts as used no later than its parent, so a long chain loses its end first."""
    directory, records = opened(tmp_path / "cache"), chain(*range(60))
    for record in records:
        directory.put(with_data([record]))
    directory.touch([record.key for record in records])
    there = []
    for start in range(100, 1000, 10):
        there.append([record.key in directory for record in records])
        directory.put(with_data(chain(*range(start, start + 10))))
    assert all(kept == sorted(kept, reverse=True) for kept in there) and sum(there[-1]) < sum(there[0]) == 60


def test_a_chain_larger_than_the_budget(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(*range(400))
    for record in records:
        directory.put(with_data([record]))
        check_budget(directory)
    assert 0 < len(directory) < 400


def test_a_budget_below_one_record(tmp_path):
    directory = opened(tmp_path / "cache", 70_000, Space("ab" * 16, 0, 4, 60_000))
    directory.put(with_data(chain(1), 60_000))
    assert len(directory) == 0
    check_budget(directory)


def test_another_models_records_make_room(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(*range(100))
    directory.put(with_data(records))
    directory.close()
    other = opened(tmp_path / "cache", space=OTHER)
    for start in range(0, 200, 4):
        other.put(with_data(chain(*range(start, start + 4)), 3 * DATA))
        check_budget(other)
    assert check_read(other, chain(196, 197, 198, 199), 3 * DATA) == 4
    assert check_read(opened(tmp_path / "cache"), records) == 0


def test_pruned_and_cleared(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(*range(100))
    directory.put(with_data(records))
    directory.close()
    whole = CacheDirectory(tmp_path / "cache", 0)
    assert whole.prune(ROOM) == 0
    assert 0 < whole.prune(60_000) < 100 and whole.used_bytes() <= 60_000
    assert 0 < len(opened(tmp_path / "cache")) < 100
    whole.clear()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [LOCK]


def test_digests_are_kept_for_a_stamp(tmp_path):
    opened(tmp_path / "cache").keep_digest("weights", "stamp", "digest")
    again = opened(tmp_path / "cache")
    again.keep_digest("other", "1", "2")
    assert again.digest("weights", "stamp") == "digest" and again.digest("other", "1") == "2"
    assert again.digest("weights", "another stamp") is None and again.digest("none", "stamp") is None
    for damaged in (b"\xff{", b"[" * 100_000):
        (tmp_path / "cache" / "prefix-cache.digests").write_bytes(damaged)
        assert again.digest("weights", "stamp") is None


# -- what happens to files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_damaged_at_random(tmp_path, seed):
    """Bytes changed, ends cut off, parts cleared, in all files, while it is closed or open: no crash, nothing wrong is
    read, and it works on."""
    assert sum(damages(40, tmp_path / "cache", ROOM, seed)) > 40
    directory = opened(tmp_path / "cache")
    directory.put(with_data(chain(50, 51)))
    assert check_read(directory, chain(50, 51)) == 2


def test_a_damaged_record_is_a_miss_and_is_written_again(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(1, 2, 3)
    directory.put(with_data(records))
    [path] = segments_in(tmp_path / "cache")
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + 2 * SPACE.slot_bytes - 1)
        file.write(b"\xff\xff")
    for number in (1, 2, 3):
        assert check_read(directory, records) == number, "each is found to be damaged when it is read"
        directory.put(with_data(records))
    assert directory.num_damaged == 2
    assert check_read(opened(tmp_path / "cache"), records) == 3


@pytest.mark.parametrize("cut", [1, SPACE.slot_bytes + 5, 3 * SPACE.slot_bytes])
def test_a_segment_that_a_process_left_half_written_is_continued(tmp_path, cut):
    """As after a loss of power: the list names more than was written."""
    directory, records = opened(tmp_path / "cache"), chain(1, 2, 3)
    directory.put(with_data(records))
    directory.close()
    [path] = segments_in(tmp_path / "cache")
    os.truncate(path, path.stat().st_size - cut)
    num_left = 3 - -(-cut // SPACE.slot_bytes)
    again = opened(tmp_path / "cache")
    for number in range(num_left, 4):
        assert check_read(again, records) == number
        again.put(with_data(records))
    assert segments_in(tmp_path / "cache") == [path]


def test_two_processes_write(tmp_path):
    """Both in one small directory, each making room for the other: all that is read is right, and the budget holds."""
    script = tmp_path / "writer.py"
    script.write_text(
        textwrap.dedent("""
        import contextlib, random, sys, time
        from tests.features.tiers.test_directory import *

        rng, directory = random.Random(int(sys.argv[1])), opened(Path(sys.argv[2]))
        num_read = 0
        for _ in range(100):
            path = [rng.randrange(40), *(rng.randrange(3) for _ in range(rng.randrange(6)))]
            while True:
                try:
                    directory.put(with_data(chain(*path)))
                    break
                except BlockingIOError:
                    time.sleep(0.001)
            with contextlib.suppress(FileNotFoundError):  # the other one has just removed it
                check_budget(directory)
            num_read += check_read(directory, chain(*path))
        print(num_read)
        """)
    )
    command = [sys.executable, str(script)]
    path = str(tmp_path / "cache")
    started = [subprocess.Popen([*command, seed, path], stdout=subprocess.PIPE, text=True, env=ENV) for seed in "12"]
    assert all(int(process.communicate()[0]) > 100 and process.returncode == 0 for process in started)
    check_budget(opened(tmp_path / "cache"))


def test_each_process_writes_its_own_segment_and_reads_all(tmp_path):
    """Two directories in one process: the locks are of files that were opened, not of processes."""
    one, other = opened(tmp_path / "cache"), opened(tmp_path / "cache")
    one.put(with_data(chain(1, 2)))
    other.put(with_data(chain(1, 2, 3)))
    assert [len(s.hashes) for s in other._segments.values()] == [2, 1] and len(segments_in(tmp_path / "cache")) == 2
    one.scan()
    assert check_read(one, chain(1, 2, 3)) == 3
    for directory in (one, other):
        directory.close()
    third = opened(tmp_path / "cache")
    third.put(with_data(chain(1, 2, 3, 4)))
    assert len(segments_in(tmp_path / "cache")) == 2, "it goes on with one that was left"


def test_what_another_process_removes_is_a_miss(tmp_path):
    one, other = opened(tmp_path / "cache"), opened(tmp_path / "cache")
    one.put(with_data(chain(1, 2)))
    other.scan()
    assert check_read(other, chain(1, 2)) == 2
    other.forget_own()
    assert check_read(one, chain(1, 2)) == 0 and len(one) == 0
    one.put(with_data(chain(1, 2)))
    assert check_read(one, chain(1, 2)) == check_read(opened(tmp_path / "cache"), chain(1, 2)) == 2


def test_reading_only(tmp_path):
    directory = opened(tmp_path / "cache")
    directory.put(with_data(chain(1, 2)))
    directory.close()
    reader = opened(tmp_path / "cache", is_writable=False)
    assert check_read(reader, chain(1, 2)) == 2
    [path] = segments_in(tmp_path / "cache")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert check_read(reader, chain(1, 2)) == 1


@contextmanager
def locked_elsewhere(path: Path):
    """As by another process that writes, and was stopped."""
    with open(path / LOCK, "ab") as file:
        lock_file(file.fileno())
        yield


def test_nothing_is_written_while_another_process_writes(tmp_path):
    directory = opened(tmp_path / "cache")
    directory.put(with_data(chain(1)))
    with locked_elsewhere(tmp_path / "cache"):
        for work in (
            lambda: directory.put(with_data(chain(2))),
            lambda: directory.keep_digest("weights", "stamp", "digest"),
            lambda: directory.prune(0),
            directory.forget_own,
            directory.clear,
        ):
            with pytest.raises(BlockingIOError, match="another process has locked the file"):
                work()
        assert check_read(directory, chain(1)) == 1, "reading needs no lock"
    directory.put(with_data(chain(2)))
    assert check_read(directory, chain(2)) == 1


def test_a_list_that_names_no_slot(tmp_path):
    directory, records = opened(tmp_path / "cache"), chain(1, 2, 3)
    directory.put(with_data(records[:2]))
    directory.close()
    [path] = segments_in(tmp_path / "cache")
    with open(path.with_suffix(".idx"), "ab") as file:
        file.write(records[2].block_hash + b"\1" * HASH_BYTES * NUM_SEGMENTS)
    again = opened(tmp_path / "cache")
    assert check_read(again, records) == 2
    again.put(with_data(records))
    assert check_read(again, records) == 3
