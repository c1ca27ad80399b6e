"""python -m chapters grade: a class whose submissions misbehave, its marks, and what is similar."""

import ast
import csv
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from chapters.__main__ import main
from chapters.course import EXERCISES, find_chapter
from chapters.nano_engine import steps
from chapters.teaching import course_copy, isolation, table
from chapters.teaching.course_copy import Copies, remove
from chapters.teaching.marks import Roster, as_text, write_marks
from chapters.teaching.similar import same_code, similar_pairs
from chapters.teaching.submissions import find_submissions, others_in
from tests.course.course_text import for_each_chapter

CHAPTER = find_chapter(4)
SOLUTION = (CHAPTER.folder / "solution.py").read_text("utf-8")
GIVEN = (CHAPTER.folder / "exercise.py").read_bytes()
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a class is graded on Linux or macOS")
HARMED = "it has changed the course while it was graded"

PASSED = {"passed": True, "checks": 8, "checks_passed": 8, "message": "", "seconds": 1.0}
TASKS = [PASSED | {"task": name} for name in ("allocate", "append_slots", "free")]
VERDICT = json.dumps({"passed": True, "seconds": 3.0, "tasks": TASKS}) + "\n"
# As the last task's function: (body, what the student is told, or what the row's note says).
BODIES = {
    "right": ("", "left open without a model: 2"),
    "exits": ("import os; os._exit(0)", "exit code 0 before it was done"),
    "hangs": ("while True: pass", "it was not done after 1 s"),
    "prints": ("for _ in range(3): print('y' * 10**6)", "reference counts must be 0"),
    "deletes_its_folder": ("import shutil; shutil.rmtree('.')", "OSError"),
    "deletes_above": ("import shutil; shutil.rmtree('..', ignore_errors=True)", "reference counts must be 0"),
    "deletes_the_course": (
        "import chapters, shutil, pathlib\n"
        "    shutil.rmtree(pathlib.Path(chapters.__file__).parents[1], ignore_errors=True)",
        HARMED,
    ),
    "forges": ("open('json.py', 'w').write('1 / 0'); import os; os._exit(0)", "exit code 0 before it was done"),
    "kills_all": ("import os; os.kill(os.getppid(), 9)", "its process has ended"),
    "forges_its_verdict": (
        "import os; open(f'/proc/{os.getppid()}/fd/1', 'w').write(" + repr(VERDICT) + "); os.kill(os.getppid(), 9)",
        "1 lines in the place of a verdict",
    ),
    "adds_a_verdict": (
        "import os; open(f'/proc/{os.getppid()}/fd/1', 'w').write(" + repr(VERDICT) + ")",
        "2 lines in the place of a verdict",
    ),
    "looks_around": ("import os; raise ValueError(sorted(os.environ))", "ValueError"),
    "=formula": ("raise ValueError('=1+1')", "ValueError"),
}
# The first task's function overwrites the checks of the others, which do nothing.
OVERWRITES = """import pathlib
import chapters

def allocate(manager, seq):
    for path in pathlib.Path(chapters.__file__).parent.glob("ch04*/checks.py"):
        path.write_text("TASKS = []")

append_slots = free = allocate
"""


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {row["student"].lstrip("'"): row for row in csv.DictReader(file)}


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("chapters.__main__.find_model", lambda name: (None, "a test"))


def hand_in(folder: Path, sources: dict[str, str]) -> None:
    for name, source in sources.items():
        (folder / name / "ch04").mkdir(parents=True)
        (folder / name / "ch04" / "exercise.py").write_text(source, "utf-8")


@pytest.mark.nightly
def test_a_class(tmp_path, no_model, monkeypatch, capsys):
    """A row each; nobody changes what another one gets; the environment is empty; a second time, nothing is graded."""
    monkeypatch.setenv("SECRET_TOKEN", "x")
    folder, path = tmp_path / "class", tmp_path / "class.csv"
    with_free = {name: f"{SOLUTION}\n\ndef free(manager, seq):\n    {of[0]}\n" for name, of in BODIES.items() if of[0]}
    hand_in(folder, {"right": SOLUTION, "overwrites": OVERWRITES, **with_free})
    (folder / "empty").mkdir()
    (folder / "no_python_ch04.py").write_text("def (", "utf-8")
    command = ["grade", str(folder), "--csv", str(path), "--limit", "1"]
    assert main(command) == 0
    assert "submission runs with your rights" in capsys.readouterr().err
    rows = rows_of(path)
    assert sorted(rows) == sorted([*BODIES, "overwrites", "empty", "no_python"])
    assert rows["empty"]["note"] == "there is no exercise.py" and "SyntaxError" in rows["no_python"]["message_1"]
    assert rows["overwrites"]["percent"] == "0" and HARMED in rows["overwrites"]["note"]
    assert HARMED in rows["overwrites"]["suspicious"]
    for name, (_, told) in BODIES.items():
        row = rows[name]
        assert (row["chapter"], row["tasks"], row["task_3"], row["passed"]) == ("4", "3", "free", "no")
        if "not done" not in row["message_1"] + row["message_2"]:  # where others keep the machine busy
            assert told in row["message_3"] + row["note"], (name, row)
            if not row["note"]:
                assert row["checks_passed_1"] == "6" and row["message_1"] == "left open without a model: 2"
    assert "SECRET_TOKEN" not in rows["looks_around"]["message_3"] and "HOME" in rows["looks_around"]["message_3"]
    monkeypatch.setattr(isolation.Running, "record", None)
    shutil.rmtree(folder / "empty")
    assert main(command) == 0 and len(rows_of(path)) == len(rows) - 1, "nothing is graded; who has gone, goes"
    path.write_text("name,mark\n")
    assert main(command) == 2, "not ours: it is left as it is"


# -- what one submission does to the run ------------------------------------------------------------------------------


def record_of(num_passed: int = 3) -> dict:
    """As report.record() says it of chapter 4."""
    tasks = []
    for number, task in enumerate(CHAPTER.module("checks").TASKS):
        num_checks, has_passed = len(task.checks), number < num_passed
        counts = {"checks": num_checks, "checks_passed": num_checks * has_passed}
        tasks.append(PASSED | counts | {"task": task.name, "passed": has_passed})
    return {"passed": num_passed == 3, "seconds": 3.0, "tasks": tasks}


def write_small_edition(folder: Path, *others: object) -> None:
    (folder / "chapters").mkdir(parents=True)
    (folder / "chapters" / "checks.py").write_text("TASKS = [1, 2, 3]", "utf-8")


@pytest.fixture
def small_course(monkeypatch):
    """In place of the copies of the course."""
    monkeypatch.setattr(course_copy, "write_edition", write_small_edition)


@pytest.fixture
def said(monkeypatch, no_model, small_course):
    """What is said of each submission, without running it: source -> record or what is raised."""
    found = dict[str, object]()

    def record(running, place, course, work, *others):
        outcome = found.get((work / "exercise.py").read_text("utf-8"), record_of())
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(isolation.Running, "record", record)
    return found


def deep(folder: Path) -> None:
    before = Path.cwd()
    os.chdir(folder)
    for _ in range(1100):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
    os.chdir(before)


def put_back(checks: Path) -> None:
    text = checks.read_text("utf-8")
    checks.write_text("TASKS = []", "utf-8")
    checks.write_text(text, "utf-8")


def come_and_go(module: Path) -> None:
    module.write_text("", "utf-8")
    module.unlink()


HARMS = {
    "it is deep": lambda copy: deep(copy / "chapters"),
    "no rights": lambda copy: (copy / "chapters" / "checks.py").chmod(0),
    "no rights in a folder": lambda copy: (copy / "chapters").chmod(0),
    "overwritten, and put back": lambda copy: put_back(copy / "chapters" / "checks.py"),
    "a module that came and went": lambda copy: come_and_go(copy / "json.py"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_copy_is_noticed_and_made_anew(harm, tmp_path, small_course):
    copies, copy = Copies(tmp_path, []), tmp_path / "course"
    copies.restore(copy)
    assert copies.is_unharmed(copy)
    HARMS[harm](copy)
    assert not copies.is_unharmed(copy)
    copies.restore(copy)
    assert copies.is_unharmed(copy)
    HARMS[harm](copy)
    remove(copy)
    assert not copy.exists()


FORGED = {
    "no tasks": {"tasks": []},
    "no seconds": {"seconds": None},
    "passed": {"passed": True},
    "another task": {"tasks": [*record_of(2)["tasks"][:2], record_of(0)["tasks"][0]]},
    "more checks": {"tasks": [task | {"checks": 100} for task in record_of(2)["tasks"]]},
    "more checks passed": {"tasks": [task | {"checks_passed": 100} for task in record_of(2)["tasks"]]},
    "no numbers": {"tasks": [task | {"checks": "8"} for task in record_of(2)["tasks"]]},
    "no text": {"tasks": [task | {"message": []} for task in record_of(2)["tasks"]]},
}


def test_a_class_goes_on(tmp_path, said, monkeypatch, capsys):
    """Whatever is said of one, the others have their rows; nothing is left behind. As many at a time as have memory."""
    jobs = []
    monkeypatch.setattr(table, "ThreadPoolExecutor", lambda number: jobs.append(number) or ThreadPoolExecutor(number))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("nanovllm.files.system.available_bytes", lambda: 5 << 30)
    sources = {name: f"x = {number}" for number, name in enumerate(["ada", "odd", "zoe", *FORGED])}
    hand_in(tmp_path / "class", sources)
    (tmp_path / "class" / "mal" / "ch18").mkdir(parents=True)
    (tmp_path / "class" / "mal" / "ch18" / "exercise.py").write_text("")
    said |= {sources[name]: record_of(2) | change for name, change in FORGED.items()}
    said |= {sources["zoe"]: record_of(2), sources["odd"]: UnicodeError("\ud800")}
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    paths = ["--csv", str(tmp_path / "details.csv"), "--marks", str(tmp_path / "marks.csv")]
    assert main(["grade", str(tmp_path / "class"), *paths]) == 0
    rows = rows_of(tmp_path / "details.csv")
    assert (rows["ada"]["passed"], rows["ada"]["percent"], rows["ada"]["note"]) == ("yes", "100", "")
    assert (rows["zoe"]["passed"], rows["zoe"]["percent"], rows["zoe"]["note"]) == ("no", "68", "")
    assert rows["odd"]["note"] == r"the checks could not be run: UnicodeError: \ud800"
    assert rows["mal"]["note"] == "there is no chapter 18" and rows["mal"]["chapter"] == "18"
    for name in FORGED:
        assert (rows[name]["note"], rows[name]["percent"]) == (table.FORGED, "0"), name
    marks = (tmp_path / "marks.csv").read_text("utf-8").splitlines()
    assert marks[:2] == ["student,Chapter 4: PagedAttention (%)", "ada,100"] and "mal,0" in marks
    assert not [*(tmp_path / "tmp").iterdir()] and jobs == [2]


def test_what_is_beside_the_class_stops_nothing(tmp_path, said, monkeypatch, capsys):
    """A teacher's own nano engine, and a file that is no submission, although it is called as two students are."""
    monkeypatch.setattr(steps, "ENGINE", steps.SOLUTION)
    hand_in(tmp_path / "class", {"ada": "x = 1"})
    (tmp_path / "class" / "Lund.docx").touch()
    (tmp_path / "roster.csv").write_text("name,surname\nada,Ek\nEva,Lund\nKim,Lund\n", "utf-8")
    paths = ["--roster", str(tmp_path / "roster.csv"), "--marks", str(tmp_path / "marks.csv")]
    assert main(["grade", str(tmp_path / "class"), *paths]) == 0
    assert "No submissions, and left alone: Lund.docx" in capsys.readouterr().out


def test_a_table_that_was_cut_off(tmp_path, said, capsys):
    """The row that was being written is graded anew, and spoils no other; an empty file is a new one."""
    hand_in(tmp_path / "class", {"ada": "x = 1", "bob": "x = 2"})
    details = tmp_path / "details.csv"
    details.touch()
    command = ["grade", str(tmp_path / "class"), "--csv", str(details)]
    assert main(command) == 0
    details.write_text(details.read_text("utf-8").rstrip("\r\n,")[:-9], "utf-8")
    hand_in(tmp_path / "class", {"cid": "x = 3"})
    assert main(command) == 0 and "1 of 3 are in" in capsys.readouterr().out
    percents = {name: row["percent"] for name, row in rows_of(details).items()}
    assert percents == dict.fromkeys(("ada", "bob", "cid"), "100")
    details.write_text("x" * 200_000)
    assert main(command) == 2 and "is another table" in capsys.readouterr().err


def test_what_may_come_to_more_is_graded_again(tmp_path, said, monkeypatch, capsys):
    """What has not passed without a model, or with less time, and nothing else: not with less than before."""
    hand_in(tmp_path / "class", {"ada": "x = 1", "bob": "x = 2"})
    (tmp_path / "class" / "cid").mkdir()
    command = ["grade", str(tmp_path / "class"), "--csv", str(tmp_path / "details.csv"), "--limit"]
    said["x = 1"] = record_of(2)
    (tmp_path / "=model").mkdir()
    monkeypatch.chdir(tmp_path)

    def percents(limit: str, model: str | None) -> tuple[str, ...]:
        monkeypatch.setattr("chapters.__main__.find_model", lambda name: (model, "a test"))
        assert main([*command, limit]) == 0
        return tuple(row["percent"] for row in rows_of(tmp_path / "details.csv").values())

    assert percents("5", None) == ("68", "100", "0")
    said["x = 2"] = said["x = 1"]  # nobody asks
    assert percents("5", None) == ("68", "100", "0") and "graded again" not in capsys.readouterr().out
    said["x = 1"] = record_of(1)
    assert percents("5", "=model")[0] == "32" and "graded again: 1 (" in capsys.readouterr().out
    said["x = 1"] = record_of(0)
    assert percents("5", None) == percents("3", "=model") == ("32", "100", "0")
    assert percents("6", "=model") == ("0", "100", "0")


def test_a_table_keeps_the_rows_of_other_chapters(tmp_path, said):
    """Graded one after another, each with marks of its own."""
    hand_in(tmp_path / "class", {"ada": "x = 1"})
    (tmp_path / "class" / "ada" / "ch18").mkdir()
    (tmp_path / "class" / "ada" / "ch18" / "exercise.py").touch()
    command = ["grade", str(tmp_path / "class"), "--csv", str(tmp_path / "details.csv"), "--marks"]
    assert main([*command, str(tmp_path / "one.csv")]) == 0
    before = (tmp_path / "details.csv").read_text("utf-8")
    assert main([*command, str(tmp_path / "other.csv"), "--chapters", "4"]) == 0
    assert sorted((tmp_path / "details.csv").read_text("utf-8").splitlines()) == sorted(before.splitlines())
    assert "18" not in (tmp_path / "other.csv").read_text("utf-8")


def test_a_hubs_model_is_downloaded_once(tmp_path, monkeypatch, small_course):
    """Not by each submission, whose home is a new folder."""
    hand_in(tmp_path / "class", {"ada": "x = 1", "bob": "x = 2"})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    downloads, models = [], []

    def record(running, place, course, work, check, model, limit_s):
        models.append(model)
        return record_of()

    def download(name, **options):
        downloads.append(name)
        return str(tmp_path / "model")

    monkeypatch.setattr(isolation.Running, "record", record)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    command = ["grade", str(tmp_path / "class"), "--csv", str(tmp_path / "details.csv"), "--model", "owner/name"]
    assert main(command) == 0 and downloads == ["owner/name"] and models == [str(tmp_path / "model")] * 2


def test_cells():
    """Any text can be written, and is read again."""
    for text in ("\ud800", "x" * 10**6, "=1", "a\nb"):
        cell = as_text(text)
        assert len(cell.encode()) < csv.field_size_limit() and "\n" not in cell and cell[0] != "="
    assert as_text(as_text("=1")) == as_text("=1") == "'=1"


def test_only_the_end_of_a_stream_is_kept(monkeypatch):
    monkeypatch.setattr(isolation, "MOST_BYTES", 100)
    end, beginning = os.pipe()
    os.write(beginning, b"x" * 5000 + b"the end")
    os.close(beginning)
    kept = bytearray()
    isolation._keep_end(os.fdopen(end, "rb"), kept)
    assert len(kept) == 100 and kept.endswith(b"the end")


def test_what_cannot_be_asked_for_is_said_before_anything_is_graded(tmp_path, said, monkeypatch, capsys):
    hand_in(tmp_path / "class", {"ada": "x = 1"})
    (tmp_path / "roster.csv").write_bytes("name\nÖst\n".encode("cp1252"))
    marks, details, roster = (str(tmp_path / f"{name}.csv") for name in ("marks", "details", "roster"))
    twice, earlier, wide, torn, long = (
        str(tmp_path / f"{name}.csv") for name in "twice earlier wide torn long".split()
    )
    Path(twice).write_text("name,number\nAda,1\n\nada,2\n", "utf-8")
    Path(earlier).write_text("name,Chapter 4: PagedAttention (%)\nada,90\n", "utf-8")
    Path(wide).write_text("name,login\nLovelace, Ada,ada\n", "utf-8")
    Path(torn).write_text('name,notes\nada,"x\nbob,y\n', "utf-8")
    Path(long).write_text(f"name,notes\nada,{'x' * 200_000}\n", "utf-8")
    monkeypatch.setitem(sys.modules, "copydetect", None)
    for options, told in {
        ("--marks", marks, "--csv", marks): "must be different files",
        ("--marks", details): "must be different files",
        ("--marks", marks, "--similar", roster): "--similar takes copydetect",
        ("--marks", marks, "--roster", roster): "roster.csv is not UTF-8 text",
        ("--marks", marks, "--chapters", "99"): "there is no chapter 99",
        ("--marks", str(tmp_path / "none" / "marks.csv")): "none is not a folder",
        ("--marks", marks, "--csv", str(tmp_path / "class")): "class is a folder",
        ("--marks", marks, "--roster", twice): "the roster has ada in lines 2 and 4: name what was handed in after",
        ("--marks", marks, "--roster", wide): "wide.csv, line 2: it has more cells than there are columns, 2",
        ("--marks", marks, "--roster", torn): "torn.csv, line 3: unexpected end of data",
        ("--marks", marks, "--roster", long): "long.csv, line 2: field larger than field limit",
        ("--marks", marks, "--roster", earlier): "has a column Chapter 4: PagedAttention (%) already",
    }.items():
        assert main(["grade", str(tmp_path / "class"), *options]) == 2
        assert told in capsys.readouterr().err
    for command in (["grade", str(tmp_path), "--csv", details], ["check", "4"]):
        with pytest.raises(SystemExit):
            main([*command, "--jobs", "-1"])
        assert "-1 is not a whole number from 1 on" in capsys.readouterr().err
    assert not Path(details).exists()


DOCKER = """#!{python}
import json, os, pathlib, subprocess, sys

if sys.argv[1] == "rm":
    with open({note!r} + ".removed", "a") as file:
        print(sys.argv[-1], file=file)
if sys.argv[1] != "run":
    sys.exit(sys.argv[1] == "image" and sys.argv[-1] != "an-image")
if os.path.exists({note!r} + ".broken"):
    sys.exit(int(open({note!r} + ".broken").read()))
arguments = sys.argv[2:]
image = arguments.index("an-image")
options, command = arguments[:image], arguments[image + 1 :]
places = [each.split(":") for flag, each in zip(options, options[1:]) if flag == "--volume"]
with open({note!r}, "a") as file:
    file.write(json.dumps([options, command]) + "\\n")
for here, there, rights in places:
    assert rights == "ro"
    for path in (pathlib.Path(here), *pathlib.Path(here).rglob("*")):
        assert path.stat().st_mode & 0o004, "a container's nobody reads it"
    command = [each.replace(there, here, 1) if each.startswith(there) else each for each in command]
course = next(here for here, there, _ in places if there == "/course")
sys.exit(subprocess.run([sys.executable, *command[1:]], cwd=course, env={{"PATH": os.environ["PATH"]}}).returncode)
"""


@pytest.fixture
def files_are_mine_alone():
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_in_containers(tmp_path, no_model, monkeypatch, files_are_mine_alone, capsys):
    """With a program that takes docker's options and runs the command on this machine."""
    folder, note = tmp_path / "class", tmp_path / "note"
    hand_in(folder, {"ada": SOLUTION, "bob": SOLUTION.replace("def free(", "def free_(")})
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    docker.write_text(DOCKER.format(python=sys.executable, note=str(note)))
    docker.chmod(0o755)
    monkeypatch.setattr(isolation, "ENGINES", ("docker",))  # podman may be here
    monkeypatch.setenv("PATH", f"{docker.parent}{os.pathsep}{os.environ['PATH']}")
    command = ["grade", str(folder), "--marks", str(tmp_path / "marks.csv"), "--container", "an-image"]
    broken = note.with_suffix(".broken")
    for code in (1, 2, 125):  # no module named chapters; the demo model is torn; docker does not start
        broken.write_text(str(code))
        with monkeypatch.context() as patch:
            patch.setattr(course_copy, "write_edition", write_small_edition)
            assert main(command) == 0
        told = capsys.readouterr()
        assert "2 came to no verdict" in told.out and "the checks could not be run" in told.out
        assert "with your rights" not in told.err
    broken.unlink()
    assert main(command) == 0 and "no verdict" not in capsys.readouterr().out, "graded now: it was not their fault"
    rows = rows_of(tmp_path / "details.csv")
    assert {name: row["checks_passed"] for name, row in rows.items()} == {"ada": "19", "bob": "13"}
    calls = [json.loads(line) for line in note.read_text().splitlines()]
    for options, run in calls:
        pairs = {*pairwise(options)}
        assert {("--network", "none"), ("--cap-drop", "ALL"), ("--user", "65534:65534")} <= pairs
        assert {"--rm", "--read-only", "--memory", "--pids-limit"} <= {*options}
        assert run[:4] == ["python", "-m", "chapters", "check"] and "/submission/exercise.py" in run
    assert len(calls) == 2
    ran = {options[options.index("--name") + 1] for options, _ in calls}
    assert len(ran) == 2 and ran <= {*note.with_suffix(".removed").read_text().split()}, "each its own, side by side"
    assert main([*command[:-1], "no-image"]) == 2
    assert "docker has no image no-image; see chapters/teaching/Dockerfile" in capsys.readouterr().err
    docker.write_text("#!/bin/sh\nexit 1\n")
    assert main(command) == 2
    assert "--container needs docker or podman: docker is here, but does not answer" in capsys.readouterr().err


# -- marks -------------------------------------------------------------------------------------------------------------

MOODLE = """First name,Last name,ID number,Email address
Ada,Lovelace,11,al@uni.example
Bo,Ek,12,bo.ek@uni.example
Cid,Öst,13,cid@uni.example
"@dee",Dee,14,dee@uni.example
"""
CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section
    Points Possible,,,,
"Lovelace, Ada",101,s11,al,A
"Ek, Bo",102,s12,bo,A
"""
PARTS = {"chapter": "4", "percent": "68"}


@pytest.mark.parametrize(
    ("roster", "students"),
    [(MOODLE, ["Ada Lovelace", "bo.ek", "CID OEST", "@dee Dee"]), (CANVAS, ["lovelaceada", "bo", "nobody"])],
)
def test_marks_are_the_roster_with_a_column_for_each_chapter(tmp_path, roster, students):
    """Whatever a platform calls a student in the name of a folder; who is missing has 0; who is unknown is named."""
    (tmp_path / "roster.csv").write_text(roster, "utf-8-sig")
    rows = [PARTS | {"student": student} for student in students] + [
        {"student": students[0], "chapter": "7", "percent": "100"}
    ]
    unknown = write_marks(tmp_path / "marks.csv", Roster(tmp_path / "roster.csv"), rows)
    with (tmp_path / "marks.csv").open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        lines = list(table)
    own = roster.splitlines()[0].split(",")
    assert table.fieldnames == [*own, "Chapter 4: PagedAttention (%)", "Chapter 7: Prefix caching (%)"]
    assert [[line[name] for name in own] for line in lines] == [*csv.reader(roster.splitlines()[1:])]
    marks = [[line[name] for name in table.fieldnames[-2:]] for line in lines]
    if roster is MOODLE:
        assert marks == [["68", "100"], ["68", "0"], ["0", "0"], ["68", "0"]]
        assert unknown == ["not on the roster, and not in the marks: CID OEST"]
    else:
        assert marks == [["100", "100"], ["68", "100"], ["68", "0"]]
        assert unknown == ["not on the roster, and not in the marks: nobody"]


@pytest.mark.parametrize(
    ("roster", "lines"),
    [
        ("name,Quiz,Quiz,\nAda,10,20,\n", [["name", "Quiz", "Quiz", ""], ["Ada", "10", "20", ""]]),
        ("name,notes\nAda,a\u2028b\x0bc\x85d\n", [["name", "notes"], ["Ada", "a\u2028b\x0bc\x85d"]]),
        ('name,notes\nAda,"two\nlines"\n', [["name", "notes"], ["Ada", "two\nlines"]]),
        ('name,notes\r\nAda,"two\r\nlines"\r\n', [["name", "notes"], ["Ada", "two\r\nlines"]]),
        ("name,notes\rAda,old\r", [["name", "notes"], ["Ada", "old"]]),
        ("sep=;\r\nname;notes\r\nAda;a, b, c\r\n", [["name", "notes"], ["Ada", "a, b, c"]]),
        ("name,notes\nAda\n", [["name", "notes"], ["Ada", ""]]),
        ("name\tnotes\nAda\ta,b\n", [["name", "notes"], ["Ada", "a,b"]]),
    ],
)
def test_a_rosters_own_cells_stay(roster, lines, tmp_path):
    """Columns of one name, cells with ends of lines, and what is between them: it may be Excel that opens the marks."""
    (tmp_path / "roster.csv").write_bytes(roster.encode())
    write_marks(tmp_path / "marks.csv", Roster(tmp_path / "roster.csv"), [PARTS | {"student": "Ada"}])
    with (tmp_path / "marks.csv").open(encoding="utf-8", newline="") as file:
        table = csv.reader(file, delimiter=next(sign for sign in ";\t," if sign in roster))
        assert [*table] == [[*lines[0], "Chapter 4: PagedAttention (%)"], [*lines[1], "68"]]


def test_two_of_one_name(tmp_path):
    (tmp_path / "roster.csv").write_text("name;number\nAda;1\nada;2\n", "utf-8")
    with pytest.raises(ValueError, match="the roster has Ada in lines 2 and 3"):
        write_marks(tmp_path / "marks.csv", Roster(tmp_path / "roster.csv"), [PARTS | {"student": "Ada"}])
    (tmp_path / "roster.csv").write_text("name\n", "utf-8")
    with pytest.raises(ValueError, match="has no lines"):
        Roster(tmp_path / "roster.csv")
    write_marks(tmp_path / "marks.csv", None, [PARTS | {"student": "=1+1"}])
    assert (tmp_path / "marks.csv").read_text("utf-8").splitlines()[1] == "'=1+1,68", "no formula"


def test_the_best_of_several_files_counts(tmp_path):
    """Whether they have one name or two names of one line, in whatever order."""
    (tmp_path / "roster.csv").write_text("name,login\nAda Lovelace,al\nBo Ek,bo\n", "utf-8")
    marks = [("al", "68"), ("Ada Lovelace", "100"), ("bo", "100"), ("bo", "9")]
    rows = [{"student": student, "chapter": "4", "percent": percent} for student, percent in marks]
    told = write_marks(tmp_path / "marks.csv", Roster(tmp_path / "roster.csv"), rows)
    assert (tmp_path / "marks.csv").read_text("utf-8").splitlines()[1:] == ["Ada Lovelace,al,100", "Bo Ek,bo,100"]
    assert told == [f"{name} has handed in 2 files for chapter 4: the best one counts" for name in ("al", "bo")]


@pytest.mark.parametrize(
    ("roster", "names"),
    [
        ("name,number\nराम,1\nरमा,2\n", {"राम": 0, "रमा": 1}),
        ("name\nHoa\nHòa\n", {"Hoa": 0, "Hòa": 1, "hòa": 1}),
        ("Login,Name,Login\nanna,Anna A,9\n", {"anna": 0, "9": 0}),
        ("name\nÉlan\n", {"Elan": 0, "élan": 0}),
        ("Student,ID,Homework 1\nAda,101,11\nBo,11,9\n", {"11": 1, "9": None, "101": 0}),
        ("Identifier,Full name\nParticipant 11,Eva Lund\nParticipant 12,Eva Lund\n", {"Eva Lund (12)": 1}),
        ("Student,ID\n'Ek, Bo',7\n'Ek, Bo',8\n".replace("'", '"'), {"ekbo (7)": 0, "ekbo (8)": 1}),
    ],
)
def test_who_is_meant(roster, names, tmp_path):
    """Marks of other scripts are vowels; the same accents come first; a mark is no student's number."""
    (tmp_path / "roster.csv").write_text(roster, "utf-8")
    found = Roster(tmp_path / "roster.csv")
    assert {name: found.line_of(name) for name in names} == names


def test_a_table_and_the_marks_of_names_that_begin_like_formulas(tmp_path, said, capsys):
    """@dee keeps her flags: names are looked up as they are in the folder."""
    hand_in(tmp_path / "class", {"@dee": SOLUTION, "bob": SOLUTION.replace("num_needed", "n")})
    (tmp_path / "roster.csv").write_text("login\n@dee\nbob\ncid\n", "utf-8")
    options = ["--roster", str(tmp_path / "roster.csv"), "--marks", str(tmp_path / "marks.csv")]
    assert main(["grade", str(tmp_path / "class"), *options]) == 0
    flags = {name: row["suspicious"] for name, row in rows_of(tmp_path / "details.csv").items()}
    assert "the same code as 4: bob/ch04/exercise.py" in flags["@dee"] and "our solution.py" in flags["@dee"]
    assert "the same code as 4: @dee/ch04/exercise.py" in flags["bob"]
    assert "not on the roster" not in capsys.readouterr().out
    assert main(["grade", str(tmp_path / "class")]) == 2 and "--csv FILE" in capsys.readouterr().err


# -- submissions -------------------------------------------------------------------------------------------------------


def test_whose_file_is_which(tmp_path):
    names = {
        "ada/exercise.py": ("ada", 5),
        "bob/ch04/exercise.py": ("bob", 4),
        "cid/course/chapters/ch07_prefix_caching/exercise.py": ("cid", 7),
        "cid/course/chapters/ch08_sampling/exercise.py": ("cid", 8),
        "dora_ch16.py": ("dora", 16),
        "Eva Lund_8251_assignsubmission_file_/exercise.py": ("Eva Lund", 5),
        "fuchsgabi_LATE_17_42_exercise-1.py": ("fuchsgabi", 5),
        "gus/mine.py": ("gus", 5),
        "hal_Ch04 (1).PY": ("hal", 4),
        "Ida Ek_8252_assignsubmission_file_exercise-2/Exercise.py": ("Ida Ek", 5),
        "Jo Lund_8253_assignsubmission_file_ch04 (1)/exercise.py": ("Jo Lund", 4),
        "kay (2)/exercise.py": ("kay (2)", 5),
    }
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    with pytest.raises(ValueError, match=r"of which chapter is Eva Lund_.*/exercise\.py\?"):
        find_submissions(tmp_path, [])
    found = find_submissions(tmp_path, [5])
    assert {(each.student, each.chapter) for each in found} == {who for who in names.values() if who[1] == 5}
    for name in {name.partition("/")[0] for name, (_, chapter) in names.items() if chapter == 5}:
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert {(each.student, each.chapter) for each in find_submissions(tmp_path, [])} == {
        who for who in names.values() if who[1] != 5
    }
    (tmp_path / "link.py").symlink_to("/etc/passwd")
    (tmp_path / "large.py").write_bytes(b"#" * (1 << 21))
    problems = {each.student: each.problem for each in find_submissions(tmp_path, [4])}
    assert problems["link"] == "it is not a file" and "2,097,152 bytes" in problems["large"]


def test_two_students_of_one_name(tmp_path):
    """Each has the platform's number; several files of one student are of one name, and so are several assignments."""
    names = ["Eva Lund_11_assignsubmission_file_/exercise.py", "Eva Lund_12_assignsubmission_file_/exercise.py"]
    names += ["bob_1_2_exercise.py", "bob_1_3_exercise-1.py", "eklisa_4_5_exercise.py", "eklisa_LATE_6_7_exercise.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    found = [each.student for each in find_submissions(tmp_path, [4])]
    assert found == ["Eva Lund (11)", "Eva Lund (12)", "bob", "bob", "eklisa (4)", "eklisa (6)"]
    names = ["Ole Berg_24_assignsubmission_file_/ch04/exercise.py", "Ole Berg_35_assignsubmission_file_/ch05.py"]
    for name in names:
        path = tmp_path / "two assignments" / name
        path.parent.mkdir(parents=True)
        path.write_text("x = 1")
    found = find_submissions(tmp_path / "two assignments", [])
    assert [(each.student, each.chapter) for each in found] == [("Ole Berg", 4), ("Ole Berg", 5)]


def test_notebooks(tmp_path):
    """The cells that are exercise.py are graded: not a skeleton that lies beside them, and not other notebooks."""
    cells = [
        {"cell_type": "markdown", "source": ["# exercise.py is below"]},
        {"cell_type": "code", "source": ["# exercise.py: free\n", "first = 1\n"]},
        {"cell_type": "code", "source": ["print('a try')"]},
        {"cell_type": "code", "source": ["# exercise.py: free\n", "second = '\ud800'\n"]},
    ]
    kinds = {
        "ada/ch04/ch04.ipynb": {"cells": cells},
        "bob_ch04.ipynb": {"cells": cells},
        "cid/ch04/notes.ipynb": {"cells": cells[:1]},
        "notes_ch04.ipynb": ["no notebook"],
        "ada/ch04/plots.ipynb": {"cells": [{"cell_type": "code", "source": ["plot()"], "outputs": ["x" * (1 << 21)]}]},
        "dora/ch04/ch04.ipynb": {"cells": [*cells, {"cell_type": "code", "source": "", "outputs": ["x" * (1 << 21)]}]},
    }
    for name, content in kinds.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "torn_ch04.ipynb").write_text('{"cells": ' + "[" * 100_000)
    for student in ("ada", "cid"):
        skeleton = tmp_path / student / "ch04" / "chapters" / "ch04_paged_attention" / "exercise.py"
        skeleton.parent.mkdir(parents=True)
        skeleton.write_text("skeleton = 1")
    found = {each.student: each.source.decode() for each in find_submissions(tmp_path, [])}
    theirs = "# exercise.py: free\nsecond = '?'\n"
    graded = {"ada": theirs, "bob": theirs, "cid": "skeleton = 1", "dora": theirs}
    assert found == graded | {"notes": "", "torn": ""}


def test_what_cannot_be_read_has_a_row(tmp_path):
    """Of its chapter, or of those that others have handed in; what is no submission is left alone."""
    others = [".hidden", "Lund.docx", "README.txt", "Thumbs.db", "marks.csv.bak", "roster.csv"]
    for name in ("ada_ch04.py", "bob_ch05.zip", "cid.tar.gz", "dan_ch04.ipynb", *others):
        (tmp_path / name).write_text("x = 1")
    rows = {(each.student, each.chapter): each.problem for each in find_submissions(tmp_path, [])}
    unread = "it is neither a .py file nor a notebook with cells that begin with # exercise.py"
    assert rows == {("ada", 4): "", ("bob", 5): unread, ("cid", 4): unread, ("dan", 4): unread}
    assert {each.student for each in find_submissions(tmp_path, [4])} == {"ada", "cid", "dan"}
    assert others_in(tmp_path) == others
    with pytest.raises(ValueError, match=r"has no submissions of these chapters; it has some of 4$"):
        find_submissions(tmp_path, [7])


# -- what is alike -----------------------------------------------------------------------------------------------------

RENAMED = re.sub(r"\bnum_needed\b", "n", SOLUTION).replace("block_id)", "block_id  # its id\n        )")
RENAMED = re.sub(r"\b_take\b", "grab", re.sub(r"#.*", "", RENAMED))
# By somebody who has not seen ours.
HONEST = """
def allocate(manager, seq):
    size = manager.block_size
    full, rest = divmod(len(seq.tokens), size)
    count = full + (1 if rest else 0)
    if count > len(manager.free_blocks):
        return False
    seq.num_cached_tokens = 0
    seq.num_computed_tokens = 0
    seq.num_registered_blocks = 0
    ids = []
    while len(ids) < count:
        block = manager.blocks[manager.free_blocks.popleft()]
        if block.block_hash is not None:
            manager.forget(block)
        block.ref_count = 1
        ids.append(block.block_id)
    seq.block_table = ids
    return True


def append_slots(manager, seq, num_tokens=1):
    size, table = manager.block_size, seq.block_table
    while len(table) * size < seq.num_computed_tokens + num_tokens:
        if not manager.free_blocks:
            return False
        table.append(manager.free_blocks.popleft())
    return True


def free(manager, seq):
    table = seq.block_table
    for i in range(len(table) - 1, -1, -1):
        block = manager.blocks[table[i]]
        block.ref_count = block.ref_count - 1
        if block.ref_count < 1:
            (manager.free_blocks.append if block.block_hash else manager.free_blocks.appendleft)(table[i])
    del table[:]
"""
TEXTS = {"ours": SOLUTION, "renamed": RENAMED, "honest": HONEST, "nothing": GIVEN.decode(), "broken": "def ("}


def test_same_code():
    """Other names, layout and comments change nothing; another way does; what was given does not count."""
    found = same_code(((name, text.encode()) for name, text in TEXTS.items()), GIVEN)
    assert found == {"ours": ["renamed"], "renamed": ["ours"]}


def test_same_code_of_some_functions():
    """Annotations and pass change nothing; who wrote only one of the functions is told of the others."""
    plain = SOLUTION.replace("manager: BlockManager, ", "manager, ").replace(" -> bool", "")
    plain = re.sub(r"^( +)return", r"\1pass\n\1return", plain, flags=re.MULTILINE)
    mixed = f"{plain}\n\ndef free(manager, seq):\n    while seq.block_table: manager.release(seq.block_table.pop())\n"
    little = HONEST + SOLUTION[SOLUTION.index("def free(") :]
    sources = {"ours": SOLUTION, "plain": plain, "mixed": mixed, "little": little}
    found = same_code(((name, text.encode()) for name, text in sources.items()), GIVEN)
    assert found == {
        "ours": ["plain", "mixed (allocate, append_slots)"],
        "plain": ["ours", "mixed (allocate, append_slots)"],
        "mixed": ["ours (allocate, append_slots)", "plain (allocate, append_slots)"],
    }


def test_a_helper_is_counted_once():
    """However many of the functions call it."""
    helper = "\n".join(f"    x[{i}] = x[{i}] + x[{i + 1}] * {i}" for i in range(7))
    helper = f"def go(x):\n{helper}\n\ndef append_slots(m, s, n=1):\n    go(s)\n\ndef free(m, s):\n    go(m)\n"
    sources = {"a": helper, "b": f"{helper}\ndef allocate(m, s):\n    return True\n"}
    assert same_code(((name, text.encode()) for name, text in sources.items()), GIVEN) == {}


def moved(source: str) -> str:
    """Its functions in another order and with another import, and one that nobody calls."""
    tree = ast.parse(source)
    tree.body = [*ast.parse("import math\ndef unused():\n    return 3").body, *reversed(tree.body)]
    return ast.unparse(tree)


@for_each_chapter
def test_same_code_function_by_function(chapter):
    """Copied into exercise.py one by one; not the one that is another, or calls another."""
    given, ours = ((chapter.folder / f"{name}.py").read_text("utf-8") for name in ("exercise", "solution"))
    task = EXERCISES[chapter.number][0]
    sources = {"ours": ours, "moved": moved(ours), "given": given, "moved given": moved(given)}
    sources["another"] = f"{ours}\n\ndef {task}(x):\n    return _own(x)\n\ndef _own(x):\n    return 1\n"
    sources["a third"] = sources["another"].replace("return 1", "return 2")
    found = same_code(((name, text.encode()) for name, text in sources.items()), given.encode())
    assert found["ours"][0] == "moved" and found["moved"][0] == "ours" and not {"given", "moved given"} & {*found}
    of_others = [each for who in ("another", "a third") for each in found.get(who, [])]
    assert not any(re.search(rf"\({task}\b|\b{task}\)|, {task},", each) for each in of_others)


def test_similar():
    """copydetect, as we ask it: at least what our own program found among the wrong solutions, and no honest pair."""
    pytest.importorskip("copydetect", reason='pip install -e ".[teach]"')
    for name, wrong in {"wrong": ("block.ref_count -= 1", "block.ref_count = 0")}.items():
        TEXTS[name] = SOLUTION.replace(*wrong)
    found = {pair[1:]: pair[0] for pair in similar_pairs(((n, t.encode()) for n, t in TEXTS.items()), GIVEN, 0.0)}
    threshold = 0.75
    assert {pair for pair, share in found.items() if share >= threshold} == {
        ("ours", "renamed"), ("ours", "wrong"), ("renamed", "wrong"),
    }  # fmt: skip
    assert found[("ours", "renamed")] > 0.95
    assert not any({"nothing"} & {*pair} for pair in found), "it has nothing of its own"
