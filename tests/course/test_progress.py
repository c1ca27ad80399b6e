"""What the course remembers of a student: a file of any shape, two terminals, no home directory."""

import json
import pwd
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

import pytest

from chapters.__main__ import main
from chapters.ch06_prefill_decode import pictures
from chapters.ch10_optimization_stack import pictures as setups
from chapters.ch12_fewer_bits import pictures as moved
from chapters.course import EXERCISES, Progress, locked
from tests.course.course_text import CHAPTERS


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


ENTRIES = [None, 5, "text", [], [[]], {}, {"read": 1, "quiz": 3, "solved": "allocate"}, {"quiz": [1], "solved": [[]]}]
ENTRIES += [{"machine": {}}, {"machine": {"GB/s": "fast"}}, {"machine": {"GB/s": 0.0}}, {"machine": [1.5]}]
ENTRIES += [{"quiz": ["a", None]}, {"quiz": [-1, 2.5]}, {"quiz": [True, 10**4000]}, {"read": {}, "solved": [None, 7]}]


@pytest.mark.parametrize(
    "text", [*map(json.dumps, [*ENTRIES, *({"1": entry} for entry in ENTRIES)]), "[" * 10**5, "1" * 5000]
)
def test_progress_of_any_shape(text, monkeypatch, capsys):
    """What is next is said, and what is done is noted. The texts are neither counted nor rendered: that takes time."""
    monkeypatch.setattr("chapters.__main__.minutes_of", lambda chapter: (0, 0))
    monkeypatch.setattr("chapters.__main__.Markdown", lambda text: "")
    progress = Progress()
    progress.path.write_text(text)
    assert main([]) == 0 and "Next: python -m chapters read 1" in capsys.readouterr().out
    assert main(["read", "1"]) == 0
    progress.note(CHAPTERS[0], quiz=[2, 5])
    assert Progress().get(CHAPTERS[0]) == {"read": True, "quiz": [2, 5]}


def test_what_is_spoiled_leaves_the_rest():
    progress, good = Progress(), {"read": True, "quiz": [3, 5], "solved": ["causal_attention"]}
    progress.path.write_text(json.dumps({"1": good, "2": None, "3": good | {"quiz": "all"}}))
    spoiled = {name: value for name, value in good.items() if name != "quiz"}
    assert [Progress().get(chapter) for chapter in CHAPTERS[:3]] == [good, {}, spoiled]


def test_a_measured_machine_has_its_roof():
    """What the lab of chapter 6 measures in a terminal is in the picture of a site that is built there."""
    assert "your machine" not in pictures.roofline().frames[-1].text
    Progress().note(CHAPTERS[5], machine={"GB/s": 3350.0, "GFLOP/s": 989_000.0})
    frame = pictures.roofline().frames[-1]
    assert "On your machine: The bytes take 0.137 ms" in frame.text and "yours: 3,350 GB/s" in frame.picture
    assert "On your machine at most 1.9 times" in moved.roofline().frames[0].text
    assert "yours" not in setups.roofline().frames[0].picture, "an H100's line is above this picture"
    Progress().note(CHAPTERS[5], machine={"GB/s": 9.2, "GFLOP/s": 100.0})
    assert "yours: 9.2 GB/s" in setups.roofline().frames[0].picture


def test_two_terminals():
    """Each notes what it knows; neither wipes out what the other has noted since it began."""
    one, two = Progress(), Progress()
    one.note(CHAPTERS[0], read=True)
    two.note(CHAPTERS[1], read=True)
    two.note(CHAPTERS[0], quiz=[4, 5])
    one.note(CHAPTERS[0], quiz=[3, 5])
    assert Progress().get(CHAPTERS[0]) == {"read": True, "quiz": [4, 5]} and Progress().get(CHAPTERS[1])["read"]
    with ThreadPoolExecutor(1) as pool:
        with locked(one.path.with_suffix(".lock")):  # as a third one has it
            noted = pool.submit(one.note, CHAPTERS[2], read=True)
            with pytest.raises(TimeoutError):
                noted.result(0.2)
        noted.result()
    assert Progress().get(CHAPTERS[2]) == {"read": True}
    one.note(CHAPTERS[0], quiz=[1, 3])
    assert Progress().get(CHAPTERS[0])["quiz"] == [3, 3], "of a quiz that has become shorter"
    one.note(CHAPTERS[3], solved={"allocate": True, "free": True})
    two.note(CHAPTERS[3], solved={"append_slots": True, "free": False})
    assert Progress().get(CHAPTERS[3])["solved"] == ["allocate", "append_slots"]


def no_home(monkeypatch, tmp_path):
    def nobody(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


def home_is_a_file(monkeypatch, tmp_path):
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("without", "said"), [(no_home, "no home directory"), (home_is_a_file, "Not a directory")])
def test_without_a_home_directory(without, said, monkeypatch, tmp_path, capsys):
    """The course is there, but remembers nothing and says so; a script that needs the demo model says why it ends."""
    without(monkeypatch, tmp_path)
    for command, shown in ((["read", "1"], CHAPTERS[0].title), ([], "Next: python -m chapters read 1")):
        assert main(command) == 0
        printed = capsys.readouterr()
        assert shown in printed.out
        assert printed.err.count("\n") == 1 and "what you do is not remembered" in printed.err and said in printed.err
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    with pytest.raises(SystemExit, match=r"^quickstart\.py: .*demo model") as end:
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "quickstart.py"), run_name="__main__")
    assert "\n" not in str(end.value)


def test_exercises_are_those_that_are_checked():
    for chapter in CHAPTERS:
        assert EXERCISES[chapter.number] == [task.name for task in chapter.module("checks").TASKS]
