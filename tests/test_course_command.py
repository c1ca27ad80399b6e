"""python -m chapters: progress, quizzes and grading from the command line."""

import io
import sys

import pytest
from course_text import CHAPTERS
from rich.console import Console

from chapters.__main__ import main
from chapters.course import Progress, find_chapter
from chapters.grading import Bench
from chapters.report import grade_all


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_command(checkpoint, capsys, monkeypatch):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(chapter.title in shown for chapter in CHAPTERS) and "Next: python -m chapters read 1" in shown
    assert main(["read", "1"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(Console, "input", lambda self, prompt="": "a" if "-" in prompt else "1")
    assert main(["quiz", "1"]) in (0, 1)
    assert main(["check", "1", "--model", str(checkpoint())]) == 1
    assert "not started" in capsys.readouterr().out
    assert main([]) == 0
    assert "Next: python -m chapters check 1" in capsys.readouterr().out
    assert main(["lab", "99"]) == 2 and "there is no chapter 99" in capsys.readouterr().err


def test_progress_survives_a_spoiled_file(tmp_path):
    progress = Progress()
    progress.note(CHAPTERS[0], read=True)
    progress.note(CHAPTERS[0], quiz=[3, 5])
    assert Progress().get(CHAPTERS[0]) == {"read": True, "quiz": [3, 5]}
    progress.path.write_text("{torn")
    assert Progress().get(CHAPTERS[0]) == {}


CRASH = """

def free(manager, seq):
    return 1 / 0
"""


def test_exercise_of_a_student(tmp_path, checkpoint, monkeypatch, capsys):
    """The whole way: a student's file in place of the skeleton, graded by the command, remembered."""
    chapter = find_chapter(4)
    monkeypatch.setitem(sys.modules, f"chapters.{chapter.folder.name}.exercise", chapter.module("solution"))
    assert main(["check", str(chapter.number), "--model", str(checkpoint())]) == 0
    assert Progress().get(chapter)["solved"] == [task.name for task in chapter.module("checks").TASKS]
    # And by a teacher, from a file of any name, with a crash in it.
    handed_in = tmp_path / "ada.py"
    handed_in.write_text((chapter.folder / "solution.py").read_text("utf-8").replace("def free(", "def free_(") + CRASH)
    assert main(["check", "4", "--file", str(handed_in), "--model", str(checkpoint())]) == 1
    shown = capsys.readouterr().out
    assert "ada.py, line" in shown and "ZeroDivisionError" in shown and "allocate: passed" in shown
    assert main(["check", "4", "--file", "nowhere.py", "--model", str(checkpoint())]) == 2


def test_report(checkpoint):
    console = Console(file=io.StringIO(), width=100)
    chapter = CHAPTERS[0]
    results = grade_all(chapter.module("checks").TASKS, chapter.module("exercise"), Bench(str(checkpoint())), console)
    assert not any(result.passed for result in results)
    assert "Read again: " in console.file.getvalue() and "0 of" in console.file.getvalue()


def test_solutions_are_checked_by_the_command(checkpoint, capsys):
    assert main(["check", "4", "--solution", "--model", str(checkpoint())]) == 0, capsys.readouterr().out
