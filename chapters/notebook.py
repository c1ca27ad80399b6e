"""Notebook: an exercise in a notebook's cells, checked as `python -m chapters check` checks exercise.py.

check() is for whoever writes them. Marks come from elsewhere (teaching/cells.py).
"""

import tempfile
from pathlib import Path

from chapters.course import find_chapter
from chapters.exercise_cells import exercise_of
from chapters.report import record, report
from chapters.submission import LIMIT_S


class NotPassed(Exception):
    """What the student is told."""


def check(number: int, name: str) -> None:
    """Check a task of this chapter. Raises NotPassed."""
    from chapters.__main__ import find_model

    chapter = find_chapter(number)
    model, why_not = find_model(None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "exercise.py")
        file.write_text(exercise_in_cells(), "utf-8")
        [result] = report(chapter, file, model, LIMIT_S, None, name)
    [task] = record(chapter, file, [result])["tasks"]
    if not task["passed"]:
        said = [f"{task['checks_passed']} of {task['checks']} checks passed", task["message"]]
        raise NotPassed("\n".join([*said, *([why_not] if result.open else [])]))
    print(f"{name}: passed, {task['checks']} checks")


def exercise_in_cells() -> str:
    """What the cells say that this notebook has run, as typed: what is graded is read from the file."""
    from IPython import get_ipython  # which runs them

    return exercise_of(get_ipython().history_manager.input_hist_raw)
