"""The student's edition: nothing in it gives an answer away, and all of it works."""

import ast
import contextlib
import copy
import functools
import html
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest

from chapters import exercise_cells, notebook, quiz
from chapters.__main__ import main
from chapters.course import EXERCISES, Chapter, find_chapter
from chapters.grading import Result
from chapters.nano_engine import steps
from chapters.sealed import seal, unseal
from chapters.teaching import assignments, cells
from chapters.teaching.cells import requirements
from chapters.teaching.edition import check_skeleton, is_left_out, write_edition
from chapters.teaching.otter_plugin import AsText
from tests.course.course_text import CHAPTERS, ROOT, for_each_chapter
from tests.course.wrong_solutions.ch04 import WRONG
from tests.marks import by_night

SOLUTION, SKELETON = ((find_chapter(4).folder / name).read_text("utf-8") for name in ("solution.py", "exercise.py"))
WRONGS = {name: wrongs[1].apply(SOLUTION, name) for name, wrongs in WRONG.items()}  # task -> a file that has it wrong
WITHOUT_MODEL = "import sys, chapters.__main__ as m; m.find_model = lambda name: (None, ''); sys.exit(m.main())"


@pytest.fixture(scope="module")
def edition(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("edition") / "course"
    write_edition(folder)
    return folder


@pytest.fixture(scope="module")
def texts(edition) -> dict[Path, str]:
    files = (path for path in edition.rglob("*") if path.is_file())
    return {path.relative_to(edition): path.read_text("utf-8", "replace") for path in files}


def triples(text: str) -> set[tuple[str, ...]]:
    """Each line with the next two, without indentation."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return set(zip(lines, lines[1:], lines[2:], strict=False))


def test_no_solution_can_be_read(texts):
    """No three lines that follow each other and are our own: not the engine's, and not the skeleton's."""
    names = {path.name for path in texts}
    assert {"exercise.py", "checks.py", "quiz.sealed"} <= names
    assert not any(name.startswith("solution") for name in names)
    assert not names & {"quiz.toml", "teaching", "wrong_solutions"}
    engine, shown = set[str](), set[tuple[str, ...]]()
    for path, text in texts.items():
        if path.parts[0] == "nanovllm":
            engine |= {line.strip() for line in text.splitlines()}
        else:
            shown |= triples(text)
    for chapter in [*CHAPTERS, steps.NANO]:
        names_of_files = ("solution", "engine" if chapter is steps.NANO else "exercise")
        ours, skeleton = ((chapter.folder / f"{name}.py").read_text("utf-8") for name in names_of_files)
        own = {
            three for three in triples(ours) if not engine & {*three} and not any(line in skeleton for line in three)
        }
        assert len(own) > 1 and not own & shown, chapter.folder


class Renamed(ast.NodeTransformer):
    """Names are numbered as they occur; there are no types, and no docstrings."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.numbers.setdefault(node.id, f"name{len(self.numbers)}")
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg, node.annotation = self.numbers.setdefault(node.arg, f"name{len(self.numbers)}"), None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns = "function", None
        if is_docstring(node.body[0]):
            del node.body[0]
        return self.generic_visit(node)


def is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@functools.lru_cache(maxsize=1)  # a text is looked at twice, one time after the other: each of the edition's
def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def body_of(function: ast.FunctionDef) -> list[ast.stmt]:
    return [each for each in function.body if not is_docstring(each)]


def outline(function: ast.FunctionDef) -> tuple[object, ...]:
    """The kinds of its statements, how often it calls and compares: quick to compare, and functions that differ here
    do not do the same."""
    body = body_of(function)
    counts = Counter(type(node) for statement in body for node in ast.walk(statement))
    return (*map(type, body), counts[ast.Call], counts[ast.Compare])


def functions(source: str, outlines: Collection[tuple[object, ...]] | None = None) -> dict[str, str]:
    """What each function does, whatever its names are -> its own name. Nothing for what is no Python.

    outlines: only functions that have one of these.
    """
    try:
        nodes = nodes_of(source)
    except SyntaxError:
        return {}
    found = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    if outlines is not None:
        kinds = {each[:-2] for each in outlines}  # most functions differ in these, and nothing has to be counted
        found = [node for node in found if (*map(type, body_of(node)),) in kinds and outline(node) in outlines]
    names = [node.name for node in found]  # a function inside another one is renamed with it
    return {ast.dump(Renamed().visit(copy.deepcopy(node))): name for node, name in zip(found, names, strict=True)}


def opened(text: str) -> list[str]:
    """This text, and what is sealed in it: the whole of it, or a string of its Python."""
    texts, sealed = [text], [text]
    with contextlib.suppress(SyntaxError):
        strings = [node.value for node in nodes_of(text) if isinstance(node, ast.Constant)]
        sealed += [each for each in strings if isinstance(each, str) and re.fullmatch(r"\S{20,}", each)]
    for each in sealed:
        with contextlib.suppress(ValueError, zlib.error):
            texts += opened(unseal(each))
    return texts


def test_no_function_of_a_solution(texts):
    """Not under other names, and not sealed: in a string or in a quiz. (The engine is public; its functions may be.)"""
    ours = {}
    solutions = [(chapter.folder / "solution.py").read_text("utf-8") for chapter in CHAPTERS]
    nano = steps.SOLUTION.read_text("utf-8")
    nodes = [node for source in [*solutions, nano] for node in ast.walk(ast.parse(source))]
    outlines = {outline(node) for node in nodes if isinstance(node, ast.FunctionDef)}
    for source in solutions:
        ours |= functions(source)
    public = [text for path, text in texts.items() if path.parts[0] == "nanovllm" and path.suffix == ".py"]
    given = {what for text in [*public, steps.ENGINE.read_text("utf-8")] for what in functions(text, outlines)}
    ours |= {what: name for what, name in functions(nano).items() if what not in given}
    assert len(ours) > 50
    for path, text in texts.items():
        if path.parts[0] == "nanovllm":
            continue
        for each in opened(text):
            parts = [each]
            if path.suffix == ".sealed":
                parts += re.findall(r"^engine = \'\'\'(.*?)\'\'\'", each, re.MULTILINE | re.DOTALL)
            for part in parts:
                assert "solution import" not in part
                assert not {ours[what] for what in ours.keys() & functions(part, outlines).keys()}, path


def test_a_sealed_solution_is_found():
    source = (CHAPTERS[3].folder / "solution.py").read_text("utf-8")
    name = next(iter(functions(source).values()))
    [_, found] = opened(f"from chapters.sealed import unseal\nexec(unseal({seal(source.replace(name, 'other'))!r}))\n")
    assert functions(found).keys() == functions(source).keys()


def test_no_answer_can_be_read(texts):
    """Neither what is right, nor why."""
    everything = "\n".join(
        text for path, text in texts.items() if path.parts[0] == "chapters" and path.suffix != ".json"
    )
    for question in (question for chapter in CHAPTERS for question in quiz.load(chapter)):
        said = [question["why"], *question.get("wrong", {}).values()]
        said += [text for option in question.get("options", ()) for text in (option["text"], option.get("why", ""))]
        for text in (text for text in said if len(text) > 25):
            assert text not in everything


def test_what_is_for_teachers_is_left_out(edition, texts):
    for name in ("chapters/teaching/edition.py", "tests/course/test_exercises.py", "tests/course/test_student.py"):
        assert is_left_out(Path(name)) and not (edition / name).exists()
    for name in ("solution_old.py", "exercise.py.bak", "exercise.py~"):
        assert is_left_out(Path("chapters/ch04_paged_attention", name))
    assert not is_left_out(Path("tests/course/test_quiz.py")), "a student's edition has tests, too"
    assert "For teachers" not in texts[Path("README.md")] and "says how to work alone." in texts[Path("README.md")]
    told = texts[Path("chapters/README.md")]
    assert (
        "## Alone" in told and "## Grading" not in told and "solution.py" not in told and "wrong_solutions" not in told
    )
    with pytest.raises(ValueError, match="has something in it"):
        write_edition(edition)


@pytest.mark.parametrize("written", [SOLUTION, "def (", SKELETON.replace("raise NotImplementedError", "return", 1)])
def test_what_a_teacher_has_written_is_not_handed_out(written, tmp_path, monkeypatch, capsys):
    """Nor is it what submissions are graded with, or compared with. Nothing is written before this is said."""
    folder = tmp_path / CHAPTERS[3].folder.name
    folder.mkdir()
    (folder / "exercise.py").write_text(written, "utf-8")
    monkeypatch.setattr("chapters.teaching.edition.all_chapters", lambda: [Chapter(4, folder)])
    monkeypatch.setattr("chapters.teaching.edition.REPOSITORY", tmp_path)
    (tmp_path / "ada_ch04.py").write_text(SOLUTION, "utf-8")
    out = str(tmp_path / "out")
    assignment = ["student", out, "--assignment", "4", "--for"]
    grade = ["grade", str(tmp_path), "--csv", out]
    for command in (["student", out], [*assignment, "nbgrader"], [*assignment, "colab"], grade):
        assert main(command) == 2
        assert "exercise.py has been written into (allocate" in capsys.readouterr().err and not Path(out).exists()


@pytest.mark.parametrize("options", [[], ["--assignment", "4"]])
def test_a_teachers_nano_engine_is_not_handed_out(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steps, "ENGINE", steps.SOLUTION)
    assert main(["student", str(tmp_path), *options]) == 2
    assert "solution.py has been written into (Sequence, BlockManager" in capsys.readouterr().err


def test_a_teachers_own_skeleton(tmp_path):
    (tmp_path / "exercise.py").write_text("def f(x):\n    y = x + 1  # begin so\n    raise NotImplementedError('f')\n")
    check_skeleton(tmp_path / "exercise.py", ["f"])


def run(edition: Path, *command: str, given: str = "") -> str:
    env = {"PYTHONPATH": str(edition), "XDG_DATA_HOME": str(edition.parent), "PATH": "", "HOME": str(edition.parent)}
    done = subprocess.run(
        [sys.executable, "-c", *command], input=given, capture_output=True, text=True, cwd=edition, env=env
    )
    assert not done.stderr.replace("Checks that need a model stay open: \n", ""), done.stderr
    return done.stdout


def test_its_commands(edition):
    """A quiz is answered, there are no commands for teachers."""
    [first, *_] = quiz.load(CHAPTERS[0])
    assert first["why"][:30] in " ".join(run(edition, WITHOUT_MODEL, "quiz", "1", given=f"{first['answer']}\n").split())
    told = run(edition, WITHOUT_MODEL, "--help")
    assert " site " in told and not any(f" {name} " in told for name in ("student", "exam", "slides"))


@pytest.mark.parametrize("number", [6, 12, *map(by_night, (8, 10, 11))])
def test_it_grades(edition, number):
    """As we do, of the chapters whose checks have once asked our solutions."""
    ours = find_chapter(number).folder / "solution.py"
    told = run(edition, WITHOUT_MODEL, "check", str(number), "--file", str(ours))
    assert told.count(": passed") == len(EXERCISES[number]), told


# -- assignments ------------------------------------------------------------------------------------------------------


def unpack(archive: Path, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    return folder


@for_each_chapter
def test_notebooks(chapter):
    """The cells are exercise.py; those for nbgrader have our solution, too, and hidden tests. A check gives no mark."""
    names = EXERCISES[chapter.number]
    for sha256 in ("", "ab12"):
        texts = ["".join(cell["source"]) for cell in json.loads(cells.notebook(chapter, sha256))["cells"]]
        [about, *marked] = [text for text in texts if text.startswith(("# Chapter", exercise_cells.MARK))]
        defined = {node.name for node in ast.parse("\n".join(marked)).body if isinstance(node, ast.FunctionDef)}
        assert set(names) <= defined and chapter.title in about and "restart the kernel, run all cells" in about
        values = [f"CHAPTER, TASK, SHA256 = {chapter.number}, {name!r}, 'ab12'" for name in names]
        hidden = [text for text in texts if "### BEGIN HIDDEN TESTS" in text]
        assert [value for value, text in zip(values, hidden, strict=bool(sha256)) if value in text] == values[
            : len(hidden)
        ]
        checks = [text for text in texts if "from chapters.notebook import check" in text]
        assert len(checks) == len(names) and all("This cell gives no mark" in text for text in checks)
    ours = dict.fromkeys(line.strip() for line in (chapter.folder / "solution.py").read_text("utf-8").splitlines())
    text = "\n".join(marked)
    assert all(line in text for line in ours if line and not line.startswith(('"""', "def ")))


def test_cells_that_ran(monkeypatch):
    """Of cells with the same first line, the last one; no other cells."""
    ran = ["", "x = 1", "# exercise.py: a\nx = 1", "# exercise.py: b\ny = 1", "# exercise.py: a \nx = 2"]
    shell = SimpleNamespace(history_manager=SimpleNamespace(input_hist_raw=ran))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert notebook.exercise_in_cells() == "# exercise.py: a \nx = 2\n\n\n# exercise.py: b\ny = 1\n"


def test_a_check_in_cells_says_why_there_is_no_model_and_looks_again(monkeypatch, capsys):
    monkeypatch.setattr(notebook, "exercise_in_cells", lambda: SOLUTION)
    found, models = [(None, "no network"), ("a model", "")], []
    monkeypatch.setattr("chapters.__main__.find_model", lambda name: found.pop(0))
    with pytest.raises(notebook.NotPassed, match="6 of 8 checks passed\nleft open without a model: 2\nno network"):
        notebook.check(4, "free")
    [task] = [task for task in find_chapter(4).module("checks").TASKS if task.name == "free"]

    def report(chapter, file, model, *others):
        models.append(model)
        return [Result(task, len(task.checks))]

    monkeypatch.setattr(notebook, "report", report)
    notebook.check(4, "free")
    assert models == ["a model"] and capsys.readouterr().out == "free: passed, 8 checks\n"


@pytest.mark.parametrize("before", ["", "\n", " \n\n\t\n", "    ", "\n  "])
def test_a_cell_is_graded_as_it_runs(before):
    """Whatever empty lines and indentation it begins with."""
    ipython = pytest.importorskip("IPython.core.inputtransformer2", reason='pip install -e ".[ci]"')
    lines = ("# exercise.py: a", "def f():", "", "    return 1")
    indentation = before.rpartition("\n")[2]
    source = before + f"\n{indentation}".join(lines)
    assert exercise_cells.as_run(source) == ipython.TransformerManager().transform_cell(source).rstrip("\n")
    assert exercise_cells.exercise_of([source]) == "# exercise.py: a\ndef f():\n\n    return 1\n"


NAMES = ("checks", "exercise")


def archive_of(path: Path, number: int, text: str) -> None:
    """A course.zip with the chapter."""
    files = ("nanovllm/engine.py", *(f"chapters/{find_chapter(number).folder.name}/{name}.py" for name in NAMES))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("of_another_course.py", text)
        for name in files:
            archive.writestr(f"course/{name}", text)


def test_two_assignments_in_one_folder(tmp_path, monkeypatch):
    """Each notebook's first cell finds its chapter, a corrected archive counts, and nobody's exercise.py is lost."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: None)
    first, second = (compile(cells.first_cell(find_chapter(number)), "first", "exec") for number in (4, 5))
    archive_of(tmp_path / "course.zip", 4, "4")
    exec(first, {})
    with pytest.raises(FileNotFoundError, match=r"belongs to this notebook \(ch05_scheduler\)"):
        exec(second, {})
    [checks, written] = (tmp_path / "course/chapters/ch04_paged_attention" / f"{name}.py" for name in NAMES)
    written.write_text("mine", "utf-8")
    archive_of(tmp_path / "course.zip", 5, "5")
    exec(second, {})
    archive_of(tmp_path / "course (1).zip", 4, "corrected")
    exec(first, {})
    exec(second, {})
    assert os.environ["PYTHONPATH"] == sys.path[0] == str(tmp_path / "course")
    assert (checks.read_text("utf-8"), written.read_text("utf-8")) == ("corrected", "mine")
    assert not (tmp_path / "of_another_course.py").exists()


def test_what_a_grading_machine_installs():
    assert {"torch", "gguf", "accelerate"} <= {each.split(">")[0] for each in requirements()}


@pytest.fixture(scope="module")
def assignment(tmp_path_factory) -> tuple[Path, str]:
    """course.zip of chapter 4, and its SHA-256."""
    folder = tmp_path_factory.mktemp("assignment") / "ch04"
    sha256 = assignments._hand_out(folder, find_chapter(4))
    return folder / "course.zip", sha256


# What somebody writes who wants marks, one line each. Where the tests run, none of it is run.
FORGING = {
    "the check": "import chapters.notebook; chapters.notebook.check = lambda *given: print('ok')",
    "subprocess": "import subprocess; subprocess.run = lambda *given, **more: print(1 / 0)",
    "json": "import json; json.loads = lambda *given: {'tasks': [{'passed': True}]}",
    "the checks": "import pathlib; pathlib.Path('chapters/ch04_paged_attention/checks.py').write_text('TASKS = []')",
    "variables": "import os; os.environ.update(PYTHONSTARTUP='x', PYTHONPATH='forged', PYTHONOPTIMIZE='2')",
}
FORGED_LINE = json.dumps({"passed": True, "seconds": 1, "tasks": [{"passed": True}]})
TO_THE_PIPE = f"open(f'/proc/{{os.getppid()}}/fd/1', 'w').write({FORGED_LINE + chr(10)!r})"
# Of the task's own process: it writes into the pipe in which the verdict is expected.
WRITING = {
    "before it is ended": f"import os\n    {TO_THE_PIPE}\n    os.kill(os.getppid(), 9)",
    "beside it": f"import os\n    {TO_THE_PIPE}",
}


def notebook_of(*sources: str) -> dict:
    return {"cells": [{"cell_type": "code", "metadata": {}, "outputs": [], "source": source} for source in sources]}


def handed_to_otter(folder: Path, archive: Path, name: str, submitted: dict) -> Path:
    """As otter calls the plugin: where course.zip and its tests are, and what was handed in. Returns the folder where
    the tests run."""
    submission, source = folder / "submission", folder / "source" / "files"
    (submission / "tests").mkdir(parents=True)
    source.mkdir(parents=True)
    shutil.copyfile(archive, source / "course.zip")
    (submission / name).write_text(json.dumps(submitted), "utf-8")
    # Modules that would be imported, and an archive of theirs.
    for each in ("json", "zipfile", "course.zip", "sitecustomize"):
        (submission / f"{each}.py").write_text("1 / 0")
    (submission / "chapters").mkdir()
    executed = AsText(str(submission / name), {}, {}).before_execution(submitted)
    assert executed["cells"] == []
    assert {path.name for path in submission.iterdir()} == {"tests", "exercise.py", "course.zip"}
    return submission


def run_hidden_test(folder: Path, sha256: str, task: str = "free") -> str:
    """What it ends with there."""
    test = cells.hidden_test(find_chapter(4), task, sha256)
    (folder / "tests" / "run.py").write_text(f"import sys\nsys.path[0] = ''\n{test}\n", "utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "tests/run.py"], cwd=folder, env=environment, capture_output=True, text=True)
    return done.stderr


@pytest.mark.slow
def test_a_hidden_test(tmp_path, assignment, demo_stand_in):
    """What is right passes; another course.zip is not believed. Of a notebook, the cells that count are graded."""
    archive, sha256 = assignment
    folder = handed_to_otter(tmp_path / "script", archive, "ada.py", notebook_of(SOLUTION))
    assert run_hidden_test(folder, sha256) == ""
    assert "NotPassed: course.zip is not the one of this assignment" in run_hidden_test(folder, "ab12")
    [first, *others] = SOLUTION.split("\n\n\ndef ")
    parts = [first, *(f"def {other}" for other in others)]
    marked = [f"{exercise_cells.MARK}: {number}\n{part}" for number, part in enumerate(parts)]
    folder = handed_to_otter(tmp_path / "cells", archive, "ada.ipynb", notebook_of("1 / 0", *marked, "x"))
    assert (folder / "exercise.py").read_text("utf-8") == "\n\n\n".join(marked).rstrip() + "\n"


def test_nothing_of_a_notebook_runs_where_it_is_graded(tmp_path, assignment, demo_checkpoint):
    """The checks fail as `check` fails: whatever the cells replace, they replace it in a process that gives no mark."""
    archive, sha256 = assignment
    lines = list(FORGING.values())
    given = "\n".join([f"{exercise_cells.MARK}: all", *lines[:3], WRONGS["free"]])
    folder = handed_to_otter(tmp_path, archive, "ada.ipynb", notebook_of(*lines, given, *lines))
    said = run_hidden_test(folder, sha256)
    assert "NotPassed: 1 of 8 checks passed\nthe queue must be what it was (5 0 1), then 4, 3, 2" in said


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("way", WRITING)
def test_a_verdict_that_was_written_by_somebody_else(tmp_path, assignment, demo_checkpoint, way):
    archive, sha256 = assignment
    source = f"{SOLUTION}\n\ndef free(manager, seq):\n    {WRITING[way]}\n"
    folder = handed_to_otter(tmp_path, archive, "ada.py", notebook_of(source))
    assert "NotPassed: this could not be graded" in run_hidden_test(folder, sha256)


def test_a_missing_package_is_named_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "otter", None)
    assert main(["student", str(tmp_path / "out"), "--assignment", "4", "--for", "otter"]) == 2
    assert "this takes otter-grader" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["student", str(tmp_path / "out"), "--for", "otter"]) == 2
    assert "--for otter needs --assignment with the numbers of chapters" in capsys.readouterr().err


@pytest.fixture
def small_course(monkeypatch):
    """In place of the course that is handed out."""
    write_small = lambda folder, *_: (folder / "chapters").mkdir(parents=True)  # noqa: E731
    monkeypatch.setattr(assignments, "write_edition", write_small)


def test_assignments_are_added_to_a_course_of_nbgrader(tmp_path, capsys, small_course):
    """Its gradebook and what a teacher has set stay; nothing is written over, nor beside a course of somebody else."""
    folder = tmp_path / "out"
    student = ["student", str(folder), "--for", "nbgrader", "--assignment"]
    assert main([*student, "4"]) == 0
    (folder / "gradebook.db").write_text("marks")
    config = folder / "nbgrader_config.py"
    config.write_text(f"{config.read_text('utf-8')}# mine\n", "utf-8")
    assert main([*student, "5"]) == 0
    assert {path.name for path in (folder / "source").iterdir()} == {"ch04", "ch05"}
    assert (folder / "gradebook.db").read_text() == "marks" and config.read_text("utf-8").endswith("# mine\n")
    assert main([*student, "6", "5"]) == 2 and "ch05 is there already" in capsys.readouterr().err
    config.write_text("c = get_config()\n", "utf-8")
    assert main([*student, "6"]) == 2 and "does not name our plugin" in capsys.readouterr().err
    config.unlink()
    assert main([*student, "6"]) == 2 and "name a new folder" in capsys.readouterr().err
    assert not (folder / "source" / "ch06").exists()


def test_a_chapter_that_is_named_twice_is_written_once(tmp_path, capsys, small_course):
    assert main(["student", str(tmp_path / "out"), "--assignment", "4", "4"]) == 0
    assert capsys.readouterr().out.count("written") == 1


# -- the pages of a class ----------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_site_of_an_edition(edition, texts, tmp_path):
    """It is built there, and has no solution, no wrong solution, and no answer to a question of the oral check."""
    run(edition, f"import sys, chapters.__main__ as m; sys.exit(m.main(['site', '--out', {str(tmp_path / 'site')!r}]))")
    unpack(tmp_path / "site" / "runtime" / "course.zip", tmp_path / "site" / "unpacked")
    said = {}
    for path in tmp_path.glob("site/**/*"):
        if path.suffix in (".html", ".js", ".json", ".py", ".toml"):
            text = html.unescape(re.sub(r"<[^>]+>", "", path.read_text("utf-8", "replace")))
            said[path.relative_to(tmp_path)] = text
    assert not any(path.name.startswith(("solution", "instructor")) or "wrong_solutions" in str(path) for path in said)
    shown, engine = set[tuple[str, ...]](), set[str]()
    for path, text in texts.items():
        engine |= {line.strip() for line in text.splitlines()} if path.parts[0] == "nanovllm" else set()
    for text in said.values():
        shown |= triples(text)
    for chapter in CHAPTERS:
        ours, skeleton = ((chapter.folder / f"{name}.py").read_text("utf-8") for name in ("solution", "exercise"))
        own = {three for three in triples(ours) if not engine & {*three} and not any(x in skeleton for x in three)}
        assert len(own) > 1 and not own & shown, chapter.title
    guide = (ROOT / "chapters" / "INSTRUCTOR.md").read_text("utf-8")
    answers = guide.partition("| chapter | listen for |")[2].partition("\n\n")[0].splitlines()[2:]
    everything = " ".join(" ".join(said.values()).split())
    assert len(answers) == len(CHAPTERS)
    assert not any(answer.split("|")[2].strip()[:60] in everything for answer in answers)
