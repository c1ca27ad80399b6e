"""The student's edition: nothing in it gives an answer away, and all of it works."""

import ast
import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from chapters import notebook, quiz
from chapters.__main__ import main
from chapters.course import EXERCISES, find_chapter
from chapters.report import record, report
from chapters.sealed import seal, unseal
from chapters.teaching import cells
from chapters.teaching.assignments import requirements
from chapters.teaching.edition import is_left_out, write_edition
from tests.course.course_text import CHAPTERS, for_each_chapter
from tests.course.wrong_solutions.ch04 import WRONG

SOLUTION = (find_chapter(4).folder / "solution.py").read_text("utf-8")
WRONGS = {name: wrongs[1].apply(SOLUTION, name) for name, wrongs in WRONG.items()}  # task -> a file that has it wrong
NO_MODEL = "import sys\nsys.modules['gguf'] = None\n"  # a package without which the demo model cannot be made

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
    for chapter in CHAPTERS:
        ours, skeleton = ((chapter.folder / f"{name}.py").read_text("utf-8") for name in ("solution", "exercise"))
        own = {
            three for three in triples(ours) if not engine & {*three} and not any(line in skeleton for line in three)
        }
        assert len(own) > 1 and not own & shown, chapter.title


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
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            del node.body[0]
        return self.generic_visit(node)


def functions(source: str) -> dict[str, str]:
    """What each function does, whatever its names are -> its own name. Nothing for what is no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = [node.name for node in found]  # a function inside another one is renamed with it
    return {ast.dump(Renamed().visit(copy.deepcopy(node))): name for node, name in zip(found, names, strict=True)}


def opened(text: str) -> list[str]:
    """This text, and what is sealed in it: the whole of it, or a string of its Python."""
    texts, sealed = [text], [text]
    with contextlib.suppress(SyntaxError):
        sealed += [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    for each in sealed:
        if isinstance(each, str):
            with contextlib.suppress(ValueError, zlib.error):
                texts += opened(unseal(each))
    return texts


def test_no_function_of_a_solution(texts):
    """Not under other names, and not sealed: in a string or in a quiz. (The engine is public; its functions may be.)"""
    ours = {}
    for chapter in CHAPTERS:
        ours |= functions((chapter.folder / "solution.py").read_text("utf-8"))
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
                assert not {ours[what] for what in ours.keys() & functions(part).keys()}, path


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
    assert not is_left_out(Path("tests/course/test_quiz.py")), "a student's edition has tests, too"
    told = texts[Path("chapters/README.md")]
    assert (
        "## Alone" in told and "## Grading" not in told and "solution.py" not in told and "wrong_solutions" not in told
    )
    with pytest.raises(ValueError, match="has something in it"):
        write_edition(edition)


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


@pytest.mark.parametrize("number", [6, 8, 10, 11, 12])
def test_it_grades(edition, number):
    """As we do, of the chapters whose checks have once asked our solutions."""
    ours = find_chapter(number).folder / "solution.py"
    told = run(edition, WITHOUT_MODEL, "check", str(number), "--file", str(ours))
    assert told.count(": passed") == len(EXERCISES[number]), told


# -- assignments ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_model(tmp_path_factory) -> dict[str, str]:
    """Variables of an environment in which there is no demo model, and the course is where one starts."""
    folder = tmp_path_factory.mktemp("no_model")
    (folder / "sitecustomize.py").write_text(NO_MODEL)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NANOVLLM")}
    return kept | {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder), "XDG_DATA_HOME": str(folder)}


def unpack(archive: Path, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    return folder


def expected(source: str, folder: Path) -> dict[str, dict]:
    """What check --json says of each task without a model."""
    file = folder / "exercise.py"
    file.write_text(source, "utf-8")
    chapter = find_chapter(4)
    return {task["task"]: task for task in record(chapter, file, report(chapter, file, None, 120.0, None))["tasks"]}


@pytest.mark.ci
def test_an_archive_works_alone(tmp_path, without_model):
    assert main(["student", str(tmp_path / "out"), "--assignment", "4", "10"]) == 0
    course = unpack(tmp_path / "out" / "ch04.zip", tmp_path / "alone") / "ch04"
    there = {path.name for path in course.rglob("*")}
    assert {"pyproject.toml", "LICENSE", "ch04_paged_attention"} <= there
    assert not there & {"solution.py", "teaching", "ch05_scheduler", "tests"}
    with zipfile.ZipFile(tmp_path / "out" / "ch10.zip") as archive:
        assert "ch10/chapters/ch06_prefill_decode/roofline.py" in archive.namelist(), "chapter 10 imports it"
    command = [sys.executable, "-m", "chapters", "check", "4"]
    done = subprocess.run(command, cwd=course, env=without_model, capture_output=True, text=True)
    assert done.stdout.count("not started") == 6 and done.returncode == 1, done.stderr
    assert main(["student", str(tmp_path / "out"), "--assignment", "4"]) == 2, "it is not new"
    assert main(["student", str(tmp_path / "other"), "--for", "otter"]) == 2, "which chapters?"


@pytest.mark.ci
def test_gradescope(tmp_path, without_model):
    assert main(["student", str(tmp_path / "out"), "--assignment", "4", "--for", "gradescope"]) == 0
    root = tmp_path / "autograder"
    unpack(tmp_path / "out" / "ch04" / "autograder.zip", root / "source")
    assert {"run_autograder", "setup.sh", "course"} <= {path.name for path in (root / "source").iterdir()}
    (root / "submission").mkdir()
    for source in (SOLUTION, WRONGS["free"]):
        told = expected(source, root / "submission")
        command = [sys.executable, str(root / "source" / "run_autograder")]
        subprocess.run(command, env=without_model | {"AUTOGRADER_ROOT": str(root)}, check=True)
        results = json.loads((root / "results" / "results.json").read_text("utf-8"))
        assert results["score"] == sum(task["checks_passed"] for task in told.values())
        assert "stay open" in results["output"], "the model's checks"
        for test in results["tests"]:
            task = told[test["name"]]
            assert (test["score"], test["max_score"]) == (task["checks_passed"], task["checks"])
            assert test["output"] == task["message"] and test["visibility"] == "visible"
    shutil.copy(root / "submission" / "exercise.py", root / "submission" / "b.py")
    (root / "submission" / "exercise.py").rename(root / "submission" / "a.py")
    subprocess.run(command, env={"AUTOGRADER_ROOT": str(root)}, check=True)
    assert "here are 2" in json.loads((root / "results" / "results.json").read_text("utf-8"))["output"]


@for_each_chapter
def test_notebooks(chapter):
    """The cells are exercise.py; those for nbgrader have our solution, too, and are graded."""
    names = EXERCISES[chapter.number]
    for for_nbgrader in (False, True):
        texts = ["".join(cell["source"]) for cell in json.loads(cells.notebook(chapter, for_nbgrader))["cells"]]
        [about, *marked] = [text for text in texts if text.startswith(("# Chapter", notebook.MARK))]
        defined = {node.name for node in ast.parse("\n".join(marked)).body if isinstance(node, ast.FunctionDef)}
        assert set(names) <= defined and chapter.title in about
        graded = [name for name in names for text in texts if f"check({chapter.number}, {name!r})" in text]
        assert graded == (names if for_nbgrader else [])
    ours = dict.fromkeys(line.strip() for line in (chapter.folder / "solution.py").read_text("utf-8").splitlines())
    text = "\n".join(marked)
    assert all(line in text for line in ours if line and not line.startswith(('"""', "def ")))


def test_cells_that_ran(monkeypatch):
    """Of cells with the same first line, the last one; no other cells."""
    ran = ["", "x = 1", "# exercise.py: a\nx = 1", "# exercise.py: b\ny = 1", "# exercise.py: a\nx = 2"]
    shell = type("Shell", (), {"user_ns": {"In": ran}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert notebook.exercise_in_cells() == "# exercise.py: a\nx = 2\n\n\n# exercise.py: b\ny = 1\n"


def test_what_a_grading_machine_installs():
    assert {"torch", "gguf", "accelerate"} <= {each.split(">")[0] for each in requirements()}


def handed_in(path: Path, source: str) -> str:
    """A notebook whose first cell has this file, and whose other cells have nothing."""
    written = json.loads(path.read_text("utf-8"))
    marked = [cell for cell in written["cells"] if "".join(cell["source"]).startswith(notebook.MARK)]
    for cell in marked:
        cell["source"] = "".join(cell["source"]).partition("\n")[0] + "\n"
    marked[0]["source"] += source
    return json.dumps(written)


def tool(name: str, *command: str, cwd: Path, env: dict[str, str]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([name, *command], cwd=cwd, env=env | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
@pytest.mark.skipif(not find_spec("otter"), reason='otter-grader is not installed: pip install -e ".[teach]"')
def test_otter(tmp_path, without_model):
    assert main(["student", str(tmp_path / "out"), "--assignment", "4", "--for", "otter"]) == 0
    given, submission = tmp_path / "out" / "ch04", tmp_path / "submission.ipynb"
    for source in (SOLUTION, *WRONGS.values()):
        told = expected(source, tmp_path)
        submission.write_text(handed_in(given / "ch04.ipynb", source), "utf-8")
        command = "run", "-a", str(given / "autograder.zip"), "-o", str(tmp_path), "--no-logo", str(submission)
        tool("otter", *command, cwd=tmp_path, env=without_model)
        results = json.loads((tmp_path / "results.json").read_text("utf-8"))
        tests = {test["name"]: test for test in results["tests"]}
        for name, task in told.items():
            assert (tests[name]["score"] == tests[name]["max_score"]) == task["passed"]
            assert task["message"].splitlines()[0] in tests[name]["output"]


@pytest.mark.ci
@pytest.mark.skipif(not find_spec("nbgrader"), reason='nbgrader is not installed: pip install -e ".[teach]"')
def test_nbgrader(tmp_path, without_model):
    course = tmp_path / "course"
    assert main(["student", str(course), "--assignment", "4", "--for", "nbgrader"]) == 0
    tool("nbgrader", "generate_assignment", "ch04", cwd=course, env=without_model)
    released = course / "release" / "ch04" / "ch04.ipynb"
    assert "num_needed" not in released.read_text("utf-8") and "check(4" not in released.read_text("utf-8")
    sources = {"right": SOLUTION, **WRONGS}
    for name, source in sources.items():
        (course / "submitted" / name / "ch04").mkdir(parents=True)
        (course / "submitted" / name / "ch04" / "ch04.ipynb").write_text(handed_in(released, source), "utf-8")
    tool("nbgrader", "autograde", "ch04", cwd=course, env=without_model)
    for name, source in sources.items():
        told = expected(source, tmp_path)
        graded = json.loads((course / "autograded" / name / "ch04" / "ch04.ipynb").read_text("utf-8"))
        for cell in graded["cells"]:
            if (which := cell["metadata"].get("nbgrader", {}).get("grade_id", "")).startswith("grade-"):
                task, outputs = told[which.removeprefix("grade-")], cell["outputs"]
                assert any(output["output_type"] == "error" for output in outputs) != task["passed"]
                assert task["message"].splitlines()[0] in json.dumps(outputs, ensure_ascii=False).replace('\\"', '"')
