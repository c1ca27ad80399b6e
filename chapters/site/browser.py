"""What worker.js calls in the browser's Python: JSON in, JSON out. It runs in ordinary Python as well."""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chapters.course import find_chapter
from chapters.grading import BenchWithoutModel, Result, Task, grade
from chapters.site.player import Player

sys.dont_write_bytecode = True  # two versions of exercise.py in one second would be one to the import system


class Browser:
    """The lab on this page, and the grading of exercises. `folder`: where exercise.py is written."""

    def __init__(self, folder: Path = Path("/home/pyodide")) -> None:
        self.folder = folder
        self.player: Player | None = None

    def call(self, request: str, begins: Callable[[int], None] = lambda number: None) -> str:
        """{"do": METHOD, ...} -> what the method returns, or {"problem": TEXT} for what the user can mend."""
        arguments: dict[str, Any] = json.loads(request)
        method = arguments.pop("do")
        try:
            if method == "check":
                return json.dumps(self.check(**arguments, begins=begins))
            return json.dumps(getattr(self, method)(**arguments))
        except ValueError as error:
            return json.dumps({"problem": str(error)})

    # -- labs -----------------------------------------------------------------------------------------------------

    def lab(self, chapter: int) -> dict[str, Any]:
        """Begin a lab. What its page looks like is there already (labs.py)."""
        self.player = Player(find_chapter(chapter).module("page"))
        return self.player.view()

    def play(self, move: str, arguments: list[str]) -> dict[str, Any]:
        """A method of Player, then what there is to see."""
        assert self.player is not None, "lab comes first"
        getattr(self.player, move)(*arguments)
        return self.player.view()

    # -- exercises ------------------------------------------------------------------------------------------------

    def tasks(self, chapter: int) -> list[dict[str, Any]]:
        tasks: list[Task] = find_chapter(chapter).module("checks").TASKS
        return [{"name": task.name, "section": task.section, "titles": task.titles} for task in tasks]

    def check(
        self, chapter: int, source: str, task: int, begins: Callable[[int], None] = lambda number: None
    ) -> dict[str, Any]:
        """Grade one task of this text of exercise.py."""
        path = self.folder / "exercise.py"
        path.write_text(source, "utf-8")
        todo: Task = find_chapter(chapter).module("checks").TASKS[task]
        try:
            module = find_chapter(chapter).submission(path)
            function = getattr(module, todo.name, None)
        except BaseException as error:  # SystemExit, too: it is the student's file
            return _view(Result(todo, 0, f"exercise.py cannot be loaded: {_where(error, path)}"))
        if function is None:
            return _view(Result(todo, 0, f"exercise.py has no function {todo.name}"))
        return _view(grade(todo, function, BenchWithoutModel(), begins))


def _view(result: Result) -> dict[str, Any]:
    done = result.num_passed == len(result.task.checks)
    return {
        "status": "not started" if result.not_started else "passed" if done else "no",
        "num_passed": result.num_passed,
        "problem": result.problem,
        "open": list(result.open),
    }


def _where(error: BaseException, path: Path) -> str:
    """What was raised, and the last line of the student's file that led to it."""
    what = "".join(traceback.format_exception_only(error)).strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{what}\nline {frames[-1].lineno}: {frames[-1].line}" if frames else what
