"""python -m chapters lab N --write: figures that only a busy machine gives are not kept."""

import copy

import pytest

from chapters import lab_notebook, recording
from chapters.__main__ import main
from chapters.course import find_chapter
from chapters.recording import Recording

# (chapter, part, which of its tables, row, column by its place, and what a busy machine might measure there)
BUSY = [
    (3, "With the cache and without it", 1, 2, 3, "999.0"),
    (3, "With the cache and without it", 1, 1, 4, "0.1"),
    (8, "The border, sorted or not", 0, 0, 5, "999.0"),
    (8, "The border, sorted or not", 0, 1, 3, "0.1"),
    (9, "Is it faster?", 0, 0, 1, "999.0"),
    (10, "Measured: how far away is a number?", 0, 0, 1, "1"),
    (10, "Measured: what each one saves", 1, 3, 1, "999.0"),
    (10, "Measured: what each one saves", 1, 6, 4, "999.0"),
    (10, "Measured: the control plane in the same picture", 0, 3, 1, "9999.0"),
    (11, "The four numbers, and throughput against latency", 0, 4, 4, "9999"),
    (11, "Requests that arrive when they like", 0, 0, 2, "9999"),
    (12, "Fetched and multiplied", 0, 1, 1, "999.0"),
    (12, "Fetched and multiplied", 0, 2, 1, "999.0"),
    (13, "What one more row costs", 0, 0, 1, "999.0"),
    (13, "What one more row costs", 0, 3, 1, "0.1"),
    (13, "The engine decides", 0, 0, 4, "999.0"),
    (13, "The engine decides", 0, 2, 4, "999.0"),
]


@pytest.fixture
def record(monkeypatch):
    """record(chapter, told) -> (exit code, what was kept) of recording a lab that tells this."""

    def run(chapter, told) -> tuple[int, list]:
        kept = []
        monkeypatch.setattr(lab_notebook, "run", lambda path, story: story.told.extend(told))
        monkeypatch.setattr(recording, "write", lambda folder, told: kept.append((folder, told)))
        return main(["lab", str(chapter.number), "--write"]), kept

    return run


@pytest.mark.parametrize("number", sorted({number for number, *_ in BUSY}))
def test_what_is_kept_could_be_recorded(record, number):
    chapter = find_chapter(number)
    told = Recording(chapter.folder).told
    assert record(chapter, told) == (0, [(chapter.folder, told)])


@pytest.mark.parametrize(("number", "part", "table", "row", "column", "cell"), BUSY)
def test_a_busy_machine_is_noticed(record, capsys, number, part, table, row, column, cell):
    chapter = find_chapter(number)
    told = copy.deepcopy(Recording(chapter.folder).told)
    sheets = [what for kind, what in Recording(chapter.folder, told).part(part) if kind == "table"]
    sheets[table]["rows"][row][column] = cell
    assert record(chapter, told) == (2, [])
    assert f"lab {number} is not kept: " in capsys.readouterr().err
