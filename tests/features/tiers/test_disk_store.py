"""The store's thread: order, bounds, and what it does when the disk does not do what it should."""

import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest

from examples.damaged_tiers import chain, data_of
from nanovllm.features.tiers import directory, disk_store
from nanovllm.features.tiers.disk_store import DiskStore
from nanovllm.features.tiers.memory_store import MemoryStore
from tests.features.tiers.test_directory import DATA, ENV, locked_elsewhere, opened
from tests.processes import LIMIT_S


@pytest.fixture
def store(tmp_path):
    made = DiskStore(opened(tmp_path / "cache"))
    yield made
    made.close()


def put(store, records):
    store.put(records, lambda n: [data_of(record) for record in records[:n]])


def read(store, records):
    found = store.fetch(records).result(timeout=LIMIT_S)
    assert [data.tobytes() for data in found] == [data_of(record).tobytes() for record in records[: len(found)]]
    return len(found)


@pytest.mark.parametrize("make", [lambda path: DiskStore(opened(path / "cache")), lambda path: MemoryStore(50 * DATA)])
def test_both_stores_deliver_what_they_were_given(tmp_path, make):
    store, records = make(tmp_path), chain(*range(20))
    put(store, records)
    getattr(store, "flush", lambda: None)()
    assert all(store.may_have(record.key) for record in records)
    assert read(store, records) == 20 and read(store, chain(0, 1, 77)) == 2
    assert read(store, [records[3]._replace(token_ids=[5] * 4)]) == 0
    assert store.counts()["num_records"] == 20 and store.counts()["num_read"] == 22
    store.reset()
    getattr(store, "flush", lambda: None)()
    assert not any(store.may_have(record.key) for record in records) and read(store, records) == 0
    getattr(store, "close", lambda: None)()


def test_looks_at_what_others_write_whatever_comes_of_it(store, monkeypatch):
    """A look that fails ends nothing, and readers that never pause keep nobody from looking."""
    put(store, chain(0))
    store.flush()
    looks = []
    monkeypatch.setattr(store.directory, "scan", lambda: looks.append(len(store._fetches)) or 1 / 0)
    with store._wake:
        store._scan_again = 0.0
        waiting = [store.fetch(chain(0)) for _ in range(2)]
    assert all(len(future.result(timeout=LIMIT_S)) == 1 for future in waiting)
    monkeypatch.undo()
    assert 2 in looks and read(store, chain(0)) == 1


def test_memory_holds_its_budget_and_drops_the_deepest_first():
    store = MemoryStore(10 * DATA)
    first, second = chain(*range(6)), chain(*range(50, 58))
    for record in reversed(first):  # as the pool evicts
        put(store, [record])
    store.touch([record.key for record in first])
    for record in reversed(second):
        put(store, [record])
        assert store.used_bytes <= 10 * DATA
    assert [store.may_have(record.key) for record in first] == [True, True, False, False, False, False]
    assert all(store.may_have(record.key) for record in second)
    big = chain(99)[0]
    store.put([big], lambda n: [data_of(big, 11 * DATA)])
    assert not store.may_have(big.key) and store.counts()["num_dropped"] == 1


def test_what_is_queued_is_written_at_the_end(tmp_path, monkeypatch):
    store = DiskStore(opened(tmp_path / "cache"))
    for token in range(30):
        put(store, chain(token))
    store.close()
    store.close()
    num_bytes = store.directory.used_bytes()
    monkeypatch.setattr(directory, "bytes_of", lambda path: 1 / 0)
    assert store.counts()["num_bytes"] == num_bytes, "known without a look at the disk: /metrics must not wait for it"
    assert len(opened(tmp_path / "cache")) == 30


def test_the_stores_own_thread_may_close_it(tmp_path, caplog):
    """A garbage collection in it finds that nobody has the engine any more."""
    store = DiskStore(opened(tmp_path / "cache"))
    put(store, chain(1, 2))
    store._later(store.close)
    store._thread.join(LIMIT_S)
    assert not store._thread.is_alive() and not caplog.text
    assert len(opened(tmp_path / "cache")) == 2


def test_behind_means_dropped_and_counted(tmp_path, monkeypatch, caplog):
    """While the disk does nothing the queue takes what it may, and calls for no more copies: of a step that is larger
    than that the beginning. Children of what was dropped are not kept."""
    monkeypatch.setattr(disk_store, "QUEUE_BYTES", 10 * DATA)
    store, go = DiskStore(opened(tmp_path / "cache")), threading.Event()
    store._later(go.wait)
    while store._others:  # until its thread waits
        pass
    records = chain(*range(30))
    put(store, records[:6])
    for record in records[6:9] + records[10:11]:
        put(store, [record])
    for _ in range(2):
        put(store, records[11:])
    go.set()
    store.flush()
    assert store.counts()["num_dropped"] == 2 * 19 + 1, "no room for 19, and the last has no parent"
    assert read(store, records) == 9
    assert caplog.text.count("some are not kept") == 1
    store.flush()
    put(store, records[9:])
    store.flush()
    assert read(store, records) >= 19, "a step of more than the queue may hold"
    store.close()


def test_a_full_disk_is_survived_with_one_warning(tmp_path):
    """A real one, as far as a process can make it: files may not grow beyond a size, and a write takes a part."""
    script = tmp_path / "full.py"
    script.write_text(
        textwrap.dedent("""
        import logging, resource, signal, sys
        from pathlib import Path
        from tests.features.tiers.test_disk_store import *

        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_500, 60_500))
        store, records = DiskStore(opened(Path(sys.argv[1]), 10 << 20)), chain(*range(300))
        for record in records:
            put(store, [record])
        store.flush()
        print(read(store, records), store.counts()["num_dropped"])
        store.close()
        """)
    )
    command = [sys.executable, str(script), str(tmp_path / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    num_read, num_dropped = map(int, ended.stdout.split())
    assert num_read >= 20 and num_read + num_dropped == 300
    assert ended.stderr.count("is not written any more") == 1 and ended.stderr.count("\n") == 1, ended.stderr
    again = DiskStore(opened(tmp_path / "cache", 10 << 20))
    assert read(again, chain(*range(300))) == num_read
    again.close()


def test_a_directory_that_is_removed(store, caplog):
    records = chain(*range(20))
    put(store, records[:10])
    store.flush()
    for path in [*store.directory.path.iterdir()]:
        path.unlink()
    store.directory.path.rmdir()
    for record in records[10:]:
        put(store, [record])
    store.flush()
    assert read(store, records) <= 10 and store.counts()["num_dropped"] == 10
    assert caplog.text.count("is not written any more") == 1


def test_a_read_that_fails_is_a_miss(store, caplog, monkeypatch):
    put(store, chain(1, 2))
    store.flush()

    def too_many(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(store.directory, "read", too_many)
        assert read(store, chain(1, 2)) == read(store, chain(1)) == 0
    put(store, chain(1, 2, 3))
    store.flush()
    assert read(store, chain(1, 2, 3)) == 3 and store.counts()["num_dropped"] == 0
    assert caplog.text.count("could not be read") == 1 and "not written any more" not in caplog.text


def test_what_cannot_be_removed_is_read_no_more(store, monkeypatch):
    """Windows removes no file that another process has open."""
    put(store, chain(1, 2))
    store.flush()

    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(directory, "remove_segment", refused)
    store.reset()
    store._later(store._scan)  # as once a second
    put(store, chain(7, 8))
    store.flush()
    assert not store.may_have(chain(1)[0].key) and read(store, chain(1, 2)) == 0
    assert store.counts()["num_dropped"] == 2


# -- another process holds the directory's lock ------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The store's clock, which stands still until a test moves it: clock.now += seconds."""
    time = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(disk_store, "monotonic", lambda: time.now)
    return time


def test_a_write_never_waits_and_is_not_lost(clock, store, monkeypatch):
    """It stays in the queue, where it can be read; it is tried again after a pause that doubles."""
    tries, put_all = [], store.directory.put
    monkeypatch.setattr(store.directory, "put", lambda items: tries.append(items) or put_all(items))
    with locked_elsewhere(store.directory.path):
        put(store, chain(1))
        store.flush()
        put(store, chain(1, 2))
        store.touch([chain(1)[0].key])
        assert read(store, chain(1, 2)) == 2 and len(tries) == 1
        for pause in (0.05, 0.1, 0.2):
            clock.now += pause
            with store._wake:
                store._wake.notify()
            assert read(store, chain(1, 2)) == 2
        store.flush()  # waits for none of it, but for the last try
        assert store.counts()["num_dropped"] == 0 and store.may_have(chain(1, 2)[1].key)
    assert 2 <= len(tries) <= 5
    store.flush()
    assert not store._queue and read(store, chain(1, 2)) == 2


def test_what_is_to_be_forgotten_is_not_read_meanwhile(clock, store):
    put(store, chain(1))
    store.flush()
    with locked_elsewhere(store.directory.path):
        store.reset()
        store.flush()
        assert not store.may_have(chain(1)[0].key) and read(store, chain(1)) == 0
    store.flush()
    assert len(store.directory) == 0
    put(store, chain(1))
    store.flush()
    assert read(store, chain(1)) == 1


def test_who_ends_while_the_directory_is_locked_drops_what_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "PAUSE_S", 0.001)
    store = DiskStore(opened(tmp_path / "cache"))
    with locked_elsewhere(tmp_path / "cache"):
        for token in range(40):
            put(store, chain(token))
        store.close()
    assert store.counts()["num_dropped"] == 40
