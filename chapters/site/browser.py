"""What worker.js calls in the browser's Python: JSON in, JSON out. It runs in ordinary Python as well."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chapters.course import find_chapter
from chapters.grading import Bench, Result, Task, grade
from chapters.player import Player
from chapters.submission import NotLoaded, find_function


class Browser:
    """The lab on this page, and the grading of exercises. `folder`: where exercise.py is written."""

    def __init__(self, folder: Path = Path("/home/pyodide")) -> None:
        self.folder = folder
        self.player: Player | None = None
        self.lesson: Any = None

    def call(self, request: str, begins: Callable[[int], None] = lambda number: None) -> str:
        """{"do": METHOD, ...} -> what the method returns. For a link that is wrong: {"problem": TEXT}."""
        arguments: dict[str, Any] = json.loads(request)
        method = arguments.pop("do")
        if method == "check":
            return json.dumps(self.check(**arguments, begins=begins))
        try:
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

    def learn(self, chapter: int, act: str, values: dict[str, str]) -> dict[str, Any]:
        """A button or slider of a lesson with the model, once worker.js has that (model/lessons.py)."""
        if self.lesson is None:
            from chapters.site.model.lessons import begin_lesson

            self.lesson = begin_lesson(chapter)
        return self.lesson.do(act, values)

    # -- exercises ------------------------------------------------------------------------------------------------

    def check(
        self, chapter: int, source: str, task: int, begins: Callable[[int], None] = lambda number: None
    ) -> dict[str, Any]:
        """Grade one task of this text of exercise.py."""
        todo: Task = find_chapter(chapter).module("checks").TASKS[task]
        path = self.folder / "exercise.py"  # a check may read it
        path.write_bytes(source.encode("utf-8", "surrogatepass"))
        try:
            function = find_function(find_chapter(chapter).submission(path), todo.name)
        except NotLoaded as error:
            return _view(Result(todo, 0, str(error)))
        return _view(grade(todo, function, Bench(), begins, str(path)))


def _view(result: Result) -> dict[str, Any]:
    """Where no check could be run here, a task is open, whatever the function does."""
    num_checks = len(result.task.checks)
    done = "no" if result.num_passed < num_checks else "open" if len(result.open) == num_checks else "passed"
    return {
        "status": "not started" if result.not_started else done,
        "num_passed": result.num_passed,
        "problem": result.problem,
        "section": result.section,
        "open": list(result.open),
    }
