"""Assignments: a chapter's exercise to hand out, and what a platform needs to grade it. Each works alone.

    chNN.zip      the course with this chapter, for python -m chapters check
    colab         chNN/: chNN.ipynb and course.zip to hand out; for Colab, Kaggle or Jupyter
    otter         the same, and autograder.zip, made by otter-grader itself
    gradescope    as otter, with exercise.py in the place of the notebook
    nbgrader      a course's folder: nbgrader_config.py and source/chNN/, the teacher's notebook beside the course

Tests are hidden, and say what check says (hidden_test.py). What was handed in is text for them: a plugin sees to it
that it is not run in their process. Checks that need the demo model stay open where it cannot be fetched.
"""

import hashlib
import json
import os
import shutil
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chapters.course import ROOT, Chapter
from chapters.teaching.cells import STUB, hidden_test, notebook, requirements
from chapters.teaching.edition import write_edition

COURSE = ("nanovllm", "chapters")
INSTALLED = (*COURSE, "pyproject.toml", "README.md", "LICENSE")  # what pip needs, too
OTTER_TEST = '''"""Test of {name}, for otter-grader."""

from otter.test_files import test_case

OK_FORMAT = False
name = "{name}"
points = {points}


@test_case(hidden=True)
def test_task():
{test}
'''
PLUGIN = ("__init__.py", "exercise_cells.py", "teaching/__init__.py", "teaching/{platform}_plugin.py")  # of chapters
CONFIG = "nbgrader_config.py"
NBGRADER = """import sys
from pathlib import Path

from nbgrader.converters import Autograde
from nbgrader.preprocessors import Execute

sys.path.insert(0, str(Path(__file__).parent))
from chapters.teaching.nbgrader_plugin import AsText

c = get_config()
c.CourseDirectory.course_id = "nanovllm"
c.ClearSolutions.code_stub = {{"python": {stub!r}}}
c.ExecutePreprocessor.timeout = {seconds}
usual = Autograde.autograde_preprocessors.default()
c.Autograde.autograde_preprocessors = [AsText if each is Execute else each for each in usual]
"""
TIMEOUT_S = 1800  # of a cell that grades: a task's checks have 120 s each


def write_assignments(folder: Path, chapters: list[Chapter], platform: str | None) -> list[Path]:
    """What to hand out and what to upload. A course's folder of nbgrader may have other assignments, and keeps them.

    Raises ValueError if the folder is not new otherwise, or if a package is missing.
    """
    if platform == "nbgrader":
        _check_course_folder(folder, chapters)
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has something in it; name a new folder")
    if platform in ("otter", "gradescope") and find_spec("otter") is None:
        raise ValueError('this takes otter-grader:  pip install -e ".[teach]"')
    writers = {"colab": _colab, "otter": _otter, "nbgrader": _nbgrader, "gradescope": _gradescope, None: _alone}
    write = writers[platform]
    folder.mkdir(parents=True, exist_ok=True)
    if platform == "nbgrader":
        if not (folder / CONFIG).exists():  # a teacher may have added to it
            (folder / CONFIG).write_text(NBGRADER.format(stub=STUB, seconds=TIMEOUT_S), "utf-8")
        for source, name in _plugin(platform):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
    return [write(folder, f"ch{chapter.number:02}", chapter) for chapter in chapters]


def _check_course_folder(folder: Path, chapters: list[Chapter]) -> None:
    for source in (folder / "source" / f"ch{chapter.number:02}" for chapter in chapters):
        if source.exists():
            raise ValueError(f"{source} is there already; name another folder, or remove it to write it again")
    config = folder / CONFIG
    if not config.exists() and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has something in it, and no {CONFIG}; name a new folder")
    if config.exists() and "chapters.teaching.nbgrader_plugin" not in config.read_text("utf-8", "replace"):
        raise ValueError(f"{config} does not name our plugin, without which submissions run where they are graded")


def _alone(folder: Path, name: str, chapter: Chapter) -> Path:
    with _course(chapter, name, INSTALLED) as course:
        return _zip(folder / f"{name}.zip", course)


def _colab(folder: Path, name: str, chapter: Chapter) -> Path:
    _hand_out_notebook(folder / name, chapter)
    return folder / name


def _otter(folder: Path, name: str, chapter: Chapter) -> Path:
    sha256 = _hand_out_notebook(folder / name, chapter)
    return _autograder(folder / name, chapter, sha256)


def _gradescope(folder: Path, name: str, chapter: Chapter) -> Path:
    sha256 = _hand_out(folder / name, chapter)
    (folder / name / "exercise.py").write_bytes((chapter.folder / "exercise.py").read_bytes())
    return _autograder(folder / name, chapter, sha256)


def _autograder(folder: Path, chapter: Chapter, sha256: str) -> Path:
    """otter's, beside the course.zip that it grades with."""
    from otter.generate import main as generate

    target = (folder / "autograder.zip").resolve()
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "tests").mkdir()
        for task in chapter.module("checks").TASKS:
            test = textwrap.indent(hidden_test(chapter, task.name, sha256), "    ")
            source = OTTER_TEST.format(name=task.name, points=len(task.checks), test=test)
            (Path(temporary) / "tests" / f"{task.name}.py").write_text(source, "utf-8")
        config: dict[str, Any] = {"show_hidden": True, "force_public_test_summary": False, "assignment_name": None}
        config["plugins"] = ["chapters.teaching.otter_plugin.AsText"]
        (Path(temporary) / "otter_config.json").write_text(json.dumps(config), "utf-8")
        (Path(temporary) / "requirements.txt").write_text("\n".join(requirements()), "utf-8")
        before = Path.cwd()
        os.chdir(folder)  # otter names files as they are seen from here
        try:
            generate(
                tests_dir=f"{temporary}/tests",
                output_path=str(target),
                config=f"{temporary}/otter_config.json",
                requirements=f"{temporary}/requirements.txt",
                no_environment=True,
                files=["course.zip"],
            )
        finally:
            os.chdir(before)
    with zipfile.ZipFile(target, "a") as archive:  # beside the program that otter runs there
        for ours, there in _plugin("otter"):
            archive.write(ours, there)
    return folder / "autograder.zip"


def _plugin(platform: str) -> list[tuple[Path, str]]:
    """Its files: where they are here, and where it looks for them."""
    return [(ROOT / name, f"chapters/{name}") for name in (each.format(platform=platform) for each in PLUGIN)]


def _nbgrader(folder: Path, name: str, chapter: Chapter) -> Path:
    source = folder / "source" / name
    write_edition(source, COURSE, [chapter])
    with _course(chapter, "course", INSTALLED) as course:
        archive = _zip(source / "course.zip", course)
    (source / f"{name}.ipynb").write_text(notebook(chapter, _sha256(archive)), "utf-8")
    return source


def _hand_out_notebook(folder: Path, chapter: Chapter) -> str:
    """course.zip and a notebook named as the folder; the archive's SHA-256."""
    sha256 = _hand_out(folder, chapter)
    (folder / f"{folder.name}.ipynb").write_text(notebook(chapter), "utf-8")
    return sha256


def _hand_out(folder: Path, chapter: Chapter) -> str:
    """course.zip; its SHA-256."""
    folder.mkdir(parents=True)
    with _course(chapter, "course", INSTALLED) as course:
        return _sha256(_zip(folder / "course.zip", course))


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def _course(chapter: Chapter, name: str, parts: tuple[str, ...]) -> Iterator[Path]:
    """A folder with a folder of this name, which has the course with this chapter."""
    with tempfile.TemporaryDirectory() as folder:
        write_edition(Path(folder, name), parts, [chapter])
        yield Path(folder)


def _zip(target: Path, folder: Path) -> Path:
    shutil.make_archive(str(target.with_suffix("")), "zip", folder)
    return target
