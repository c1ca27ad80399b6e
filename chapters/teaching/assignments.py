"""Assignments: a chapter's exercise to hand out, and what a platform needs to grade it. Each works alone.

    chNN.zip      the course with this chapter, for python -m chapters check
    otter         chNN/: chNN.ipynb and course.zip to hand out; autograder.zip, made by otter-grader itself
    nbgrader      a course's folder: nbgrader_config.py and source/chNN/, the teacher's notebook beside the course
    gradescope    chNN/: exercise.py and course.zip to hand out; autograder.zip for a programming assignment

All of them grade with examine.py, so that they say what check says. Checks that need the demo model stay open where it
cannot be fetched.
"""

import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chapters.course import Chapter
from chapters.teaching.cells import GRADE, STUB, notebook
from chapters.teaching.edition import REPOSITORY, write_edition

COURSE = ("nanovllm", "chapters")
INSTALLED = (*COURSE, "pyproject.toml", "README.md", "LICENSE")  # what pip needs, too
HERE = Path(__file__).parent
OTTER_TEST = '''"""Test of {name}, for otter-grader: students see what it says."""

from otter.test_files import test_case

OK_FORMAT = False
name = "{name}"
points = {points}


@test_case(hidden=False)
def test_task():
    {check}
'''
NBGRADER = """c = get_config()
c.CourseDirectory.course_id = "nanovllm"
c.ClearSolutions.code_stub = {{"python": {stub!r}}}
c.ExecutePreprocessor.timeout = {seconds}
"""
TIMEOUT_S = 1800  # of a cell that grades: a chapter's checks have 120 s each


def write_assignments(folder: Path, chapters: list[Chapter], platform: str | None) -> list[Path]:
    """What to hand out and what to upload. Raises ValueError if the folder is not new, or a package is missing."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has something in it; name a new folder")
    write = {"otter": _otter, "nbgrader": _nbgrader, "gradescope": _gradescope, None: _alone}[platform]
    folder.mkdir(parents=True, exist_ok=True)
    if platform == "nbgrader":
        (folder / "nbgrader_config.py").write_text(NBGRADER.format(stub=STUB, seconds=TIMEOUT_S), "utf-8")
    return [write(folder, f"ch{chapter.number:02}", chapter) for chapter in chapters]


def _alone(folder: Path, name: str, chapter: Chapter) -> Path:
    with _course(chapter, name, INSTALLED) as course:
        return _zip(folder / f"{name}.zip", course)


def _gradescope(folder: Path, name: str, chapter: Chapter) -> Path:
    _hand_out(folder / name, chapter)
    shutil.copyfile(chapter.folder / "exercise.py", folder / name / "exercise.py")
    with _course(chapter, "course", INSTALLED) as course:
        (course / "chapter").write_text(f"{chapter.number}\n", "utf-8")
        for source, target in (("run_autograder.py", "run_autograder"), ("setup.sh", "setup.sh")):
            shutil.copyfile(HERE / source, course / target)
            (course / target).chmod(0o755)
        return _zip(folder / name / "autograder.zip", course)


def _otter(folder: Path, name: str, chapter: Chapter) -> Path:
    try:
        from otter.generate import main as generate
    except ModuleNotFoundError:
        raise ValueError('this takes otter-grader:  pip install -e ".[teach]"') from None
    _hand_out(folder / name, chapter)
    (folder / name / f"{name}.ipynb").write_text(notebook(chapter), "utf-8")
    target = (folder / name / "autograder.zip").resolve()
    with _course(chapter, "files", COURSE) as course:
        (course / "tests").mkdir()
        for task in chapter.module("checks").TASKS:
            check = GRADE.format(number=chapter.number, name=task.name).replace("\n\n", "\n    ")
            test = OTTER_TEST.format(name=task.name, points=len(task.checks), check=check)
            (course / "tests" / f"{task.name}.py").write_text(test, "utf-8")
        config = {"show_hidden": True, "assignment_name": None}
        (course / "otter_config.json").write_text(json.dumps(config), "utf-8")
        (course / "requirements.txt").write_text("\n".join(requirements()), "utf-8")
        before = Path.cwd()
        os.chdir(course / "files")  # otter names files as they are seen from here
        try:
            generate(
                tests_dir="../tests",
                output_path=str(target),
                config="../otter_config.json",
                requirements="../requirements.txt",
                no_environment=True,
                files=list(COURSE),
            )
        finally:
            os.chdir(before)
    return target


def _nbgrader(folder: Path, name: str, chapter: Chapter) -> Path:
    source = folder / "source" / name
    write_edition(source, COURSE, [chapter])
    (source / f"{name}.ipynb").write_text(notebook(chapter, for_nbgrader=True), "utf-8")
    return source


def _hand_out(folder: Path, chapter: Chapter) -> None:
    folder.mkdir(parents=True)
    with _course(chapter, "course", INSTALLED) as course:
        _zip(folder / "course.zip", course)


@contextmanager
def _course(chapter: Chapter, name: str, parts: tuple[str, ...]) -> Iterator[Path]:
    """A folder with a folder of this name, which has the course with this chapter."""
    with tempfile.TemporaryDirectory() as folder:
        write_edition(Path(folder, name), parts, [chapter])
        yield Path(folder)


def _zip(target: Path, folder: Path) -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            archive.write(path, path.relative_to(folder).as_posix())  # with its rights
    return target


def requirements() -> list[str]:
    """What the engine and its demo model need, by pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    extra = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extra["demo"], *extra["gguf"]]
    return [each for each in wanted if not each.startswith("nanovllm[")]
