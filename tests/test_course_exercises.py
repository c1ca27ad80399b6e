"""The exercises: skeletons, our solutions, and wrong solutions that grading must catch."""

import importlib
import inspect
import io
import re

import pytest
from course_text import CHAPTERS, for_each_chapter, text_of
from rich.console import Console

from chapters.grading import Bench, grade, grade_all


@for_each_chapter
def test_skeleton_is_not_started(chapter, checkpoint):
    bench, tasks = Bench(str(checkpoint())), chapter.module("checks").TASKS
    assert 2 <= len(tasks) <= 4
    for task in tasks:
        function = getattr(chapter.module("exercise"), task.name)
        assert len(function.__doc__) > 200, "the contract is in the docstring"
        assert grade(task, function, bench).not_started
        assert task.section in re.findall(r"^## (.*)$", text_of(chapter), re.MULTILINE), "the section to read again"


@pytest.fixture(scope="module")
def demo_bench(demo_checkpoint):
    return Bench(str(demo_checkpoint))


@for_each_chapter
def test_solution_passes(chapter, demo_bench):
    console = Console(file=io.StringIO(), width=100)
    results = grade_all(chapter.module("checks").TASKS, chapter.module("solution"), demo_bench, console)
    assert all(result.passed for result in results), console.file.getvalue()


def wrong_solutions():
    for chapter in CHAPTERS:
        module = importlib.import_module(f"wrong_solutions.{chapter.folder.name[:4]}")
        for task in chapter.module("checks").TASKS:
            for function, hint in module.WRONG[task.name]:
                yield pytest.param(task, function, hint, id=f"{chapter.folder.name[:4]}-{function.__name__}")


@pytest.fixture(scope="module")
def bench(checkpoint):
    return Bench(str(checkpoint()))


@pytest.mark.parametrize(("task", "function", "hint"), list(wrong_solutions()))
def test_wrong_solution_is_caught(task, function, hint, bench):
    result = grade(task, function, bench)
    assert not result.passed and not result.not_started
    assert hint in result.problem, result.problem


@for_each_chapter
def test_three_wrong_solutions_for_each_task(chapter):
    module = importlib.import_module(f"wrong_solutions.{chapter.folder.name[:4]}")
    for task in chapter.module("checks").TASKS:
        assert len({function for function, _ in module.WRONG[task.name]}) >= 3


@for_each_chapter
def test_signatures_agree(chapter):
    for task in chapter.module("checks").TASKS:
        ours, theirs = (getattr(chapter.module(name), task.name) for name in ("solution", "exercise"))
        assert inspect.signature(ours) == inspect.signature(theirs)
