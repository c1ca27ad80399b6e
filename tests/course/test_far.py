"""The student's function in a process of its own: the checks say of it what they say of it beside them."""

import sys

import pytest

from chapters.grading import Bench
from tests.course.course_text import CHAPTERS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="examine_here.py does without processes")


# Functions of these chapters work on block managers and schedulers, the largest objects that cross over.
MOST = (4, 5, 7)
for_each_chapter = pytest.mark.parametrize(
    "chapter",
    [pytest.param(c, id=f"ch{c.number:02}", marks=() if c.number in MOST else pytest.mark.ci) for c in CHAPTERS],
)


@pytest.fixture(scope="module")
def bench(checkpoint):
    return Bench(str(checkpoint()))


def results_of(chapter, file, bench):
    from chapters.child import Student, graded

    student = Student(chapter.number, str(file), None, None)
    try:
        assert student.ask("load") == ""
        for task in chapter.module("checks").TASKS:
            assert student.ask("find", task.name) == ""
            yield graded(task, student, bench, lambda **message: None, str(file))
    finally:
        student.end()


@for_each_chapter
def test_solutions_pass(chapter, bench):
    for result in results_of(chapter, chapter.folder / "solution.py", bench):
        assert result.passed, f"{result.task.name}, {result.task.titles[result.num_passed]}: {result.problem}"


@for_each_chapter
def test_skeletons_are_not_started(chapter, bench):
    assert all(result.not_started for result in results_of(chapter, chapter.folder / "exercise.py", bench))
