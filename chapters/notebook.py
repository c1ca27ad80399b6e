"""Notebook: an exercise in a notebook's cells, checked as `python -m chapters check` checks exercise.py.

check() is for whoever writes them. Marks come from elsewhere (teaching/cells.py).
"""

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from chapters.course import find_chapter
from chapters.exercise_cells import exercise_of
from chapters.report import record, report
from chapters.submission import LIMIT_S


class NotPassed(Exception):
    """What the student is told."""


def check(number: int, name: str) -> None:
    """Check a task of this chapter. Raises NotPassed."""
    [task] = (task for task in graded(number, exercise_in_cells()) if task["task"] == name)
    if not task["passed"]:
        raise NotPassed(f"{task['checks_passed']} of {task['checks']} checks passed\n{task['message']}")
    print(f"{name}: passed, {task['checks']} checks")


def exercise_in_cells() -> str:
    """What the cells say that this notebook has run, as typed: what is graded is read from the file."""
    from IPython import get_ipython  # which runs them

    return exercise_of(get_ipython().history_manager.input_hist_raw)


@lru_cache(maxsize=1)  # a chapter has several tasks
def graded(number: int, source: str) -> list[dict[str, Any]]:
    from chapters.__main__ import find_model

    chapter = find_chapter(number)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "exercise.py")
        file.write_text(source, "utf-8")
        return record(chapter, file, report(chapter, file, find_model(None)[0], LIMIT_S, None))["tasks"]
