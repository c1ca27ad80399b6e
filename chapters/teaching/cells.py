"""Cells: a chapter's exercise as a notebook, with a cell for each task.

The first lines of the cells are those that exercise_cells.py looks for. For nbgrader the cells have our solution
between the marks that it cuts at, and there are cells that grade.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

from chapters.course import EXERCISES, ROOT, Chapter
from chapters.exercise_cells import MARK

HOW = f"""Cells that begin with `{MARK}` are your `exercise.py`: write the functions, run the cells. Add cells as you
like; one that is to be graded, too, begins with `{MARK}:` and a name of its own. If two begin with the same line, only
one of them counts: keep one. The cells with `check` say what is still missing; marks come from where it is handed in.

Before you hand in, restart the kernel, run all cells from the top, and save. `check` reads what you have run, and the
marks are for what is saved, from the top down: a cell that you deleted, or ran before one above it, is still there for
`check`, and not for the marks.

The course comes with this notebook: the folders `chapters` and `nanovllm`, or an archive, `course.zip`. Put it into the
same folder. On Colab the first cell has a button to upload the archive."""
CHECK = """# What is still missing? (This cell gives no mark.)
from chapters.notebook import check

check({number}, {name!r})"""
HIDDEN = Path(__file__).with_name("hidden_test.py")
FIRST = Path(__file__).with_name("first_cell.py")
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = "...  # YOUR CODE HERE"  # instead of what is between them: as a statement it does nothing, in a function or not


def hidden_test(chapter: Chapter, name: str, sha256: str) -> str:
    """Python that raises NotPassed if this task of what was handed in does not pass. sha256: of course.zip."""
    values = f"CHAPTER, TASK, SHA256 = {chapter.number}, {name!r}, {sha256!r}"
    text = re.sub(r"^CHAPTER, TASK, SHA256 = .*$", values, HIDDEN.read_text("utf-8"), count=1, flags=re.MULTILINE)
    return f"{text}\n\ngrade()"


def first_cell(chapter: Chapter) -> str:
    """Python that makes the course ready where the chapter's notebook is opened."""
    torch = next(each for each in requirements() if each.startswith("torch"))
    others = [each for each in requirements() if each != torch]
    text = FIRST.read_text("utf-8").replace('CHAPTER = "ch04_paged_attention"', f"CHAPTER = {chapter.folder.name!r}")
    text = text.replace("PACKAGES: list[str] = []", f"PACKAGES = {others!r}")
    text = text.replace('TORCH = "torch"', f"TORCH = {torch!r}")
    return f"{text}\n\nget_ready()"


def requirements() -> list[str]:
    """What the engine and its demo model need, by pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))["project"]
    extra = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extra["demo"], *extra["gguf"]]
    return [each for each in wanted if not each.startswith("nanovllm[")]


def notebook(chapter: Chapter, sha256: str = "") -> str:
    """As JSON (nbformat 4.5). sha256: of the course.zip beside it, if it is nbgrader's."""
    for_nbgrader = bool(sha256)
    exercise, ours = (_parts(chapter, name) for name in ("exercise", "solution"))
    cells = [_text("about", f"# Chapter {chapter.number}: {chapter.title}\n\n{exercise.pop('')}\n\n{HOW}")]
    cells.append(_code("first", first_cell(chapter), None))
    others = "\n".join([f"{MARK}: the beginning", exercise.pop("others")])
    if for_nbgrader:
        others = f"{others}\n\n{BEGIN}\n{ours['others']}\n{END}"
    cells.append(_code("beginning", others, {"solution": True} if for_nbgrader else None))
    for name, skeleton in exercise.items():
        source = _with_solution(skeleton, ours[name]) if for_nbgrader else skeleton
        cells.append(_code(f"task-{name}", f"{MARK}: {name}\n{source}", {"solution": True} if for_nbgrader else None))
        cells.append(_code(f"check-{name}", CHECK.format(number=chapter.number, name=name), None))
        if for_nbgrader:
            hidden = f"### BEGIN HIDDEN TESTS\n{hidden_test(chapter, name, sha256)}\n### END HIDDEN TESTS"
            num_points = len(next(task for task in chapter.module("checks").TASKS if task.name == name).checks)
            graded = {"grade": True, "locked": True, "points": num_points}
            cells.append(_code(f"grade-{name}", f"# {name} is graded here\n{hidden}", graded))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}, indent=1)


def _parts(chapter: Chapter, name: str) -> dict[str, str]:
    """The module's docstring (""), each task's function, and all else ("others")."""
    text = (chapter.folder / f"{name}.py").read_text("utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    about, body = ast.get_docstring(tree) or "", tree.body[1:]
    tasks, end = dict[str, str](), tree.body[0].end_lineno or 0
    others: list[str] = []
    for node in body:  # comments before it are its own
        part = "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno or 0
        if isinstance(node, ast.FunctionDef) and node.name in EXERCISES[chapter.number]:
            tasks[node.name] = part.strip("\n")
        else:
            others.append(part)
    return {"": about, "others": "\n".join(others).strip("\n"), **tasks}


def _with_solution(skeleton: str, ours: str) -> str:
    """The skeleton with our body before its last line, which raises NotImplementedError."""
    [function] = ast.parse(ours).body
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:] if ast.get_docstring(function) else function.body
    docstring_end = function.body[0].end_lineno if body is not function.body else None
    first = docstring_end if docstring_end is not None else _end_of_signature(ours, function)
    lines = ours.splitlines()[first:]
    returns = isinstance(body[-1], ast.Return | ast.Raise)
    *before, last = skeleton.splitlines()
    assert last.strip() == "raise NotImplementedError"
    return "\n".join([*before, f"    {BEGIN}", *lines, *([] if returns else ["    return"]), f"    {END}", last])


def _end_of_signature(source: str, function: ast.FunctionDef) -> int:
    """Lines before the body, whose first lines may be comments."""
    lines, last = source.splitlines(), function.returns.end_lineno if function.returns else function.lineno
    return next(i for i in range((last or 1) - 1, len(lines)) if lines[i].rstrip().endswith(":")) + 1


def _text(name: str, source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source.splitlines(keepends=True)}


def _code(name: str, source: str, graded: dict[str, Any] | None) -> dict[str, Any]:
    """graded: what nbgrader is to know of it."""
    metadata: dict[str, Any] = {}
    if graded is not None:
        default = {
            "schema_version": 3,
            "grade_id": name,
            "grade": False,
            "solution": False,
            "locked": False,
            "task": False,
        }
        metadata["nbgrader"] = default | graded
    of_code: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
    return of_code | {"id": name, "metadata": metadata, "source": source.splitlines(keepends=True)}
