"""Grade a file in this process, where examine.py cannot work: Windows has no groups of processes that end together.

A submission that never ends is ended by Ctrl-C, and one that ends its process ends this one.
"""

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from chapters.course import Chapter
from chapters.grading import Bench, Result, grade
from chapters.submission import NotLoaded, find_function, readable


def examine_here(chapter: Chapter, file: Path, model: str | None) -> Generator[Result, None, None]:
    """See examine()."""
    try:
        tasks, bench = chapter.module("checks").TASKS, Bench(model)
    except ModuleNotFoundError as error:
        raise ValueError(f"the checks of chapter {chapter.number} need {error.name}, which is not installed") from None
    try:
        bench.prepare()
    except Exception as error:
        raise ValueError(f"the engine cannot be loaded: {readable(error)}") from None
    problem = ""
    try:
        module = chapter.submission(file)
    except NotLoaded as error:
        problem = str(error)
    for task in tasks:
        begun = time.monotonic()
        try:
            if problem:
                raise NotLoaded(problem)
            result = grade(task, find_function(module, task.name), bench, file=str(file))
        except NotLoaded as error:
            result = Result(task, 0, str(error))
        yield replace(result, seconds=time.monotonic() - begun)
