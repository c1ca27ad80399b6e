"""python -m chapters: progress, quizzes and grading from the command line."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from chapters.__main__ import main
from chapters.course import ROOT, Progress, find_chapter
from tests.course.course_text import CHAPTERS


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_progress_survives_a_spoiled_file(tmp_path):
    progress = Progress()
    progress.note(CHAPTERS[0], read=True)
    progress.note(CHAPTERS[0], quiz=[3, 5])
    assert Progress().get(CHAPTERS[0]) == {"read": True, "quiz": [3, 5]}
    progress.path.write_text("{torn")
    assert Progress().get(CHAPTERS[0]) == {}


def test_what_is_next(capsys):
    """Who reads the short paths is led along these, and to the whole texts after the last one."""

    def said(*command: str) -> str:
        assert main(list(command)) == 0
        return capsys.readouterr().out.strip().splitlines()[-1]

    assert said() == "Next: python -m chapters read 1"
    said("read", "1", "--short")
    said("read", "3", "--short")
    assert said() == "Next: python -m chapters read 2 --short"
    for chapter in CHAPTERS:
        Progress().note(chapter, short=True)
    assert said() == "Next: python -m chapters read 1"
    Progress().note(CHAPTERS[0], read=True)
    assert said() == "Next: python -m chapters quiz 1"


def test_a_terminal_tells_what_pictures_show(monkeypatch, capsys):
    assert main(["read", "5", "--short"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("▌", "").split())
    assert "In step 3, C gives way" in shown and "A 4..5, B 4..5; preempted: C; waiting: C D; free" in shown
    pages: list[str] = []  # not rendered, which takes long
    monkeypatch.setattr("chapters.__main__.Markdown", lambda text: pages.append(text) or "")
    for chapter in CHAPTERS:
        assert main(["read", str(chapter.number)]) == 0
        assert "accDescr" not in pages[-1] and "flowchart" not in pages[-1] and "![" not in pages[-1]
    assert len(pages) == len(CHAPTERS)


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX, and less")
def test_a_terminal_shows_styles(tmp_path):
    """Through the pager that most systems have, which shows the codes of styles unless it is told to."""
    if shutil.which("less") is None:
        pytest.skip("needs less")
    ours, other = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("LESS", "PAGER", "NO_COLOR")}
    command = [sys.executable, "-m", "chapters", "read", "1", "--short"]
    environment |= {"TERM": "xterm", "XDG_DATA_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdin=other, stdout=other, stderr=other, cwd=ROOT.parent, env=environment) as reader:
        os.close(other)
        shown = b""
        while b"What is LLM inference" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, b"q")
        reader.wait(60)
    os.close(ours)
    assert b"\x1b[1" in shown and b"ESC[" not in shown


def test_a_terminal_shows_what_a_text_folds(capsys):
    assert main(["read", "10"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    folded = shown.index("In C, replay writes the number of rows into the arguments of each recorded call")
    assert "void replay(const recorded_call *calls" in shown[folded:] and "details" not in shown


def test_exercise_of_a_student(tmp_path, monkeypatch, checkpoint, capsys):
    """The whole way: a student's exercise.py in place of the skeleton, graded by the command, remembered."""
    chapter = find_chapter(4)
    theirs = replace(chapter, folder=tmp_path / chapter.folder.name)
    theirs.folder.mkdir()
    source = (chapter.folder / "solution.py").read_text("utf-8").replace("def free(", "def free_(")
    source += "\n\ndef append_slots(manager, seq, num_tokens=1):\n    raise NotImplementedError\n"
    source += "\n\ndef free(manager, seq):\n    print('so')\n    return 1 / 0\n"
    (theirs.folder / "exercise.py").write_text(source, "utf-8")
    monkeypatch.setattr("chapters.__main__.find_chapter", lambda number: theirs)
    monkeypatch.chdir(checkpoint().parent)
    assert main(["check", "4", "--model", checkpoint().name]) == 1
    assert Progress().get(chapter)["solved"] == ["allocate"]
    shown = capsys.readouterr().out
    assert (
        "allocate: passed, 8 of 8 checks" in shown
        and "append_slots: not started, 0 of 9 checks" in shown
        and "free: no, 0 of 8 checks" in shown
        and "Printed:\n      so" in shown
    )
    assert "ZeroDivisionError: division by zero\n    exercise.py, line" in shown
    assert "Read again: Giving blocks back" in shown
    assert "One alone: --task append_slots. Quickly, without the model: --no-model." in shown


@pytest.mark.nightly
def test_files_of_a_class(tmp_path, checkpoint, capsys):
    """By a teacher: files of any names, as a report and as records. The exit code says whether all passed."""
    good, bad = tmp_path / "ada.py", tmp_path / "bob[1].py"
    good.write_text((find_chapter(4).folder / "solution.py").read_text("utf-8"), "utf-8")
    bad.write_text("1 / 0", "utf-8")
    command = ["check", "4", "--model", str(checkpoint())]
    assert main([*command, "--solution", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    ours = str(find_chapter(4).folder / "solution.py")
    assert (record["file"], record["chapter"], record["passed"]) == (ours, 4, True)
    task = record["tasks"][2]
    assert 0 < task.pop("seconds") < record["seconds"]
    assert task == {"task": "free", "passed": True, "checks": 8, "checks_passed": 8, "message": ""}
    assert main([*command, "--file", str(good), str(bad)]) == 1
    shown = capsys.readouterr().out
    assert "1 of 2 files passed" in shown and shown.count("bob[1].py cannot be loaded: ZeroDivisionError") == 3
    assert Progress().get(find_chapter(4)) == {}, "these are not the teacher's"
