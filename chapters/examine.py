"""Examine: check a student's file, each task in a process of its own (runner.py)."""

import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from chapters.course import EXERCISES, Chapter, find_chapter
from chapters.grading import Bench, Result, Task, believe_classes_there_are, grade
from chapters.runner import FOREIGN, Lost, Phase, Run
from chapters.submission import LIMIT_S, NotLoaded, file_of, find_function, readable

THEIRS = ("importing", "checking")  # phases on the student's time
FIELDS = {"num_passed": int, "problem": str, "not_started": bool, "open": list, "section": str, "refused": str}
PREPARING_S = 900.0  # for what is not the student's: Python, and the engine with its model


class NotExamined(ValueError):
    """The checks could not begin, which need not be the file's fault."""


def examine(
    chapter: Chapter, file: Path, model: str | None, limit_s: float = LIMIT_S, only: str = "", num_jobs: int = 0
) -> Generator[Result, None, None]:
    """The results of the chapter's tasks, in their order; num_jobs are checked at a time (0: as the machine can).

    limit_s: of wall time, for one check. only: the name of a single task. Checks that need a model stay open where
    there is none. Raises ValueError if there is no such task or the checks cannot be imported, and NotExamined if the
    engine or the model cannot be loaded.
    """
    try:
        tasks: list[Task] = chapter.module("checks").TASKS
    except ModuleNotFoundError as error:
        raise ValueError(f"the checks of chapter {chapter.number} need {error.name}, which is not installed") from None
    if only and only not in EXERCISES[chapter.number]:
        names = ", ".join(EXERCISES[chapter.number])
        raise ValueError(f"chapter {chapter.number} has no task {readable(only)}; it has {names}")
    tasks = [task for task in tasks if not only or task.name == only]
    yield from examine_tasks(
        tasks,
        file,
        limit_s=limit_s,
        num_jobs=num_jobs,
        target="chapters.examine:check_task",
        number=chapter.number,
        model=model,
    )


def examine_tasks(
    tasks: list[Task], file: Path, *, limit_s: float, num_jobs: int, target: str, **arguments: Any
) -> Generator[Result, None, None]:
    """As examine(), with the function `target` in place of check_task(), which it is like."""
    num_jobs = num_jobs or min(2, os.cpu_count() or 1)  # an engine in each
    examination = _Examination(file, limit_s, target, arguments)
    with ThreadPoolExecutor(num_jobs) as pool:
        try:
            found: list[Future[Result]] = [pool.submit(examination.of, task) for task in tasks]
            for each in found:
                yield each.result()
        finally:
            examination.end()


class _Examination:
    def __init__(self, file: Path, limit_s: float, target: str, arguments: dict[str, Any]) -> None:
        self.file, self.limit_s, self.target, self.arguments = file, limit_s, target, arguments
        self.runs: list[Run] = []
        self.has_ended = False
        self.not_loaded = ""  # why no task can be checked: to import the file has no end

    def of(self, task: Task) -> Result:
        begun = monotonic()
        if self.not_loaded or self.has_ended:
            return Result(task, 0, self.not_loaded)
        run = Run(self.target, name=task.name, file=str(self.file), **self.arguments)
        self.runs.append(run)
        try:
            if self.has_ended:  # meanwhile: end() may have missed this one
                return Result(task, 0)
            result = self._follow(run, task)
        finally:
            run.end()
        return Result(task, **result, seconds=monotonic() - begun, printed=run.printed())

    def _follow(self, run: Run, task: Task) -> dict[str, Any]:
        """Fields of its Result."""
        phase = Phase("starting", 0)
        num_checks = len(task.checks)
        try:
            while isinstance(heard := run.hear(self.limit_s if phase.name in THEIRS else PREPARING_S), Phase):
                if not isinstance(heard.number, int) or not 0 <= heard.number < num_checks:
                    raise Lost(FOREIGN)
                phase = heard
            if not _is_outcome(heard, num_checks):
                raise Lost(FOREIGN)
        except Lost as lost:
            if phase.name == "importing":
                self.not_loaded = f"{file_of(self.file)} cannot be loaded: {lost}"
                return {"num_passed": 0, "problem": self.not_loaded}
            if phase.name == "checking":
                section = getattr(task.checks[phase.number], "section", task.section)
                return {"num_passed": phase.number, "problem": str(lost), "section": section}
            raise NotExamined(f"the engine cannot be loaded: {lost}\n{run.printed()}") from None
        if "refused" in heard:
            raise NotExamined(heard["refused"])
        is_done = heard.get("num_passed") == num_checks and phase == Phase("checking", num_checks - 1)
        if not heard.get("problem") and not is_done:
            return {"num_passed": 0, "problem": "the checks have not come to their end"}
        return dict(heard)

    def end(self) -> None:
        self.has_ended = True
        for run in self.runs:
            run.end()


def _is_outcome(heard: Any, num_checks: int) -> bool:
    """Is it as check_file() returns it? The submission's code may have sent something else."""
    if not isinstance(heard, dict) or not all(isinstance(value, FIELDS.get(name, ())) for name, value in heard.items()):
        return False
    return "refused" in heard or heard.get("num_passed") in range(len(heard.get("open", [])), num_checks + 1)


def check_task(tell: Callable[..., None], number: int, name: str, file: str, model: str | None) -> dict[str, Any]:
    """In the process of a Run: load the file, check this task. Returns fields of its Result."""
    chapter = find_chapter(number)
    [task] = [task for task in chapter.module("checks").TASKS if task.name == name]
    if model is not None:  # the checks will import these: their classes are believed if they are there before the file
        for path in chapter.folder.glob("checks_*.py"):
            chapter.module(path.stem)
    return check_file(
        tell, task, file, lambda path: find_function(chapter.submission(path), name), partial(Bench, model)
    )


def check_file(
    tell: Callable[..., None],
    task: Task,
    file: str,
    load: Callable[[Path], Any],
    make_bench: Callable[[Callable[[], None]], Bench],
) -> dict[str, Any]:
    """load(path): what the checks are given. make_bench(loads): see Bench. Returns fields of a Result."""
    path = Path(file).resolve()
    if path.parent.is_dir():
        os.chdir(path.parent)
    with suppress(OSError):  # load() says more
        believe_classes_there_are(path.read_bytes())
    tell("importing")
    try:
        function = load(path)
    except NotLoaded as error:
        return {"num_passed": 0, "problem": str(error)}
    bench = make_bench(lambda: tell("loading"))
    try:
        result = grade(task, function, bench, lambda check: tell("checking", check), str(path))
    except Exception as error:  # not of the student's code
        return {"refused": f"the engine cannot be loaded: {readable(error)}"}
    return {each: value for each, value in vars(result).items() if each not in ("task", "seconds", "printed")}
