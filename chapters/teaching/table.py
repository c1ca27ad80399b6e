"""Table: the rows of a class, graded side by side and written as they come."""

import csv
import math
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chapters.course import EXERCISES, find_chapter
from chapters.submission import kind_of, readable
from chapters.teaching.course_copy import Copies, let_all_read, remove
from chapters.teaching.isolation import REFUSED, Container, NoRecord, Process, Running
from chapters.teaching.marks import as_it_was, as_text
from chapters.teaching.similar import same_code, similar_pairs
from chapters.teaching.submissions import Submission
from chapters.teaching.suspicious import fast_flags, flags_of

MOST_TASKS = max(map(len, EXERCISES.values()))
OF_A_TASK = ("task", "checks_passed", "checks", "message", "seconds")
COLUMNS = ["student", "chapter", "file", "sha256", "passed", "tasks_passed", "tasks", "checks_passed", "checks"]
COLUMNS += ["percent", "seconds", "model", "limit", "suspicious", "note"]  # limit: of a check, in seconds
COLUMNS += [f"{name}_{i}" for i in range(1, MOST_TASKS + 1) for name in OF_A_TASK]
SAME = "the same code as "  # in the column of what is suspicious
STARTING_S, CHECKS_A_TASK = 300.0, 3  # for a task: to start, and the limit of a check so many times
FORGED = "what was printed in the place of a verdict is none"
HARMED = "it has changed the course while it was graded, so nothing that came of it counts"


class Grader:
    """Raises ValueError if the file is another table."""

    def __init__(
        self, path: Path, submissions: list[Submission], model: str | None, limit_s: float, place: Process | Container
    ) -> None:
        self._rows = read_rows(path)
        self.path, self.model, self.limit_s, self.place = path, model, limit_s, place
        self._with = {"model": model or "", "limit": f"{limit_s:g}"}
        rows = {key_of(row): row for row in self._rows}
        found = [(each, rows.get(key_of(row_of(each)))) for each in submissions]
        self.todo = [each for each, row in found if row is None or is_worth_another_try(row, model, limit_s)]
        self.num_known = len(submissions) - len(self.todo)
        self.num_again = len(self.todo) - sum(row is None for _, row in found)
        self._stopped, self._running = Event(), Running()

    def run(self, num_jobs: int, console: Console) -> None:
        """Each job has a copy of the course, and a place for the submission that it grades."""
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        if not self.todo:
            return
        base = Path(tempfile.mkdtemp(prefix="grading-"))
        try:
            base.chmod(0o755)  # a container's nobody reads it
            self.model = self.model and self.place.readable(self.model, base)
            copies, free = Copies(base, map(find_chapter, _by_chapter(self.todo))), SimpleQueue[Path]()
            for number in range(num_jobs):
                free.put(base / f"course-{number}")
            write(self.path, COLUMNS, self._rows)  # without what was cut off
            with (
                self.path.open("a", encoding="utf-8", newline="") as file,
                ThreadPoolExecutor(num_jobs) as pool,
                Progress(*columns, console=console, transient=True) as progress,
            ):
                table, shown = csv.DictWriter(file, COLUMNS, restval=""), progress.add_task("", total=len(self.todo))
                running: set[Future[dict[str, Any]]] = set()
                try:
                    running = {pool.submit(self._grade, each, copies, free) for each in self.todo}
                    while running:
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        for each in done:
                            row = each.result()
                            table.writerow({name: as_text(value) for name, value in row.items()})
                            progress.update(shown, advance=1, description=as_text(row["student"]))
                        file.flush()
                finally:  # it may be that it was interrupted
                    self._stopped.set()
                    for each in running:
                        each.cancel()
                    self._running.end()
        finally:
            remove(base)

    def _grade(self, submission: Submission, copies: Copies, free: "SimpleQueue[Path]") -> dict[str, Any]:
        row = row_of(submission)
        if submission.problem:
            return row
        course = free.get()
        try:
            copies.restore(course)
            try:
                row |= self._with
                fill(row, self._record(submission, course))
            except NoRecord as error:
                row["note"] = str(error)
            flags = flags_of(submission.source, submission.chapter)
            if not copies.is_unharmed(course):
                row |= NOTHING | {"note": HARMED}
                flags.insert(0, HARMED)
            row["suspicious"] = readable("; ".join(flag for flag in [*flags, row.get("suspicious")] if flag))
        except Exception as error:  # whatever one submission leads to, the others are graded
            row = row_of(submission) | {"note": f"{REFUSED}: {kind_of(error)}: {readable(error)}"}
        finally:
            free.put(course)
        return row

    def _record(self, submission: Submission, course: Path) -> dict[str, Any]:
        """Raises NoRecord."""
        if self._stopped.is_set():
            raise NoRecord("the grader was stopped")
        folder = Path(tempfile.mkdtemp(prefix="graded-"))  # of this submission alone, with a folder in it: ".."
        try:
            work = folder / "work"
            work.mkdir()
            (work / "exercise.py").write_bytes(submission.source)
            let_all_read(folder)
            check = ["check", str(submission.chapter), "--json", "--limit", f"{self.limit_s:g}", "--jobs", "1"]
            limit_s = (STARTING_S + CHECKS_A_TASK * self.limit_s) * len(EXERCISES[submission.chapter])
            return self._running.record(self.place, course, work, check, self.model, limit_s)
        finally:
            remove(folder)


NOTHING = {"passed": "no", "tasks_passed": 0, "checks_passed": 0, "percent": 0}


def row_of(submission: Submission) -> dict[str, Any]:
    """Of one with nothing to grade."""
    tasks = EXERCISES.get(submission.chapter, [])
    row = {"student": submission.student, "chapter": submission.chapter, "file": submission.file}
    row |= {"sha256": submission.digest, "tasks": len(tasks)} | NOTHING
    return row | {"note": submission.problem, **{f"task_{i}": name for i, name in enumerate(tasks, start=1)}}


def fill(row: dict[str, Any], found: dict[str, Any]) -> None:
    """What report.record() says of it. Raises NoRecord if it has not come from there."""
    if not is_record(found, row["chapter"]):
        raise NoRecord(FORGED)
    tasks = found["tasks"]
    row["suspicious"] = "; ".join(fast_flags(tasks))
    row |= {"passed": "yes" if found["passed"] else "no", "seconds": found["seconds"], "note": ""}
    row["tasks_passed"] = sum(task["passed"] for task in tasks)
    row |= {name: sum(task[name] for task in tasks) for name in ("checks_passed", "checks")}
    points = sum(task["checks"] for task in tasks if task["passed"])  # as on otter, nbgrader and Gradescope
    row["percent"] = f"{100 * points / row['checks']:.1f}".removesuffix(".0")
    for i, task in enumerate(tasks, start=1):
        row |= {f"{name}_{i}": task[name] for name in OF_A_TASK}


def is_record(found: dict[str, Any], chapter: int) -> bool:
    """Is it as report.record() says it of this chapter, and does it agree with itself?"""
    expected = [(task.name, len(task.checks)) for task in find_chapter(chapter).module("checks").TASKS]
    try:
        tasks = [(task["task"], task["checks"]) for task in found["tasks"]]
        passed = [task["checks_passed"] == task["checks"] for task in found["tasks"]]
        return (
            tasks == expected
            and [task["passed"] for task in found["tasks"]] == passed
            and found["passed"] == all(passed)
            and all(task["checks_passed"] in range(task["checks"] + 1) for task in found["tasks"])
            and all(isinstance(task["message"], str) for task in found["tasks"])
            and all(math.isfinite(each["seconds"]) for each in (found, *found["tasks"]))
        )
    except (TypeError, KeyError, OverflowError):
        return False


def is_worth_another_try(row: dict[str, str], model: str | None, limit_s: float) -> bool:
    """Was it the machine's fault, or has it not passed with less than this: without this model, or in less time?"""
    if row["note"].startswith(REFUSED):
        return True
    if row["passed"] == "yes" or not row["limit"]:  # without a limit: there was nothing to grade
        return False
    return float(row["limit"]) < limit_s or (model is not None and row["model"] != as_text(model))


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(as_text(row[name]) for name in ("student", "chapter", "file", "sha256"))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Of an earlier run; a row that was cut off when it was being written is none. Raises ValueError."""
    if not path.exists():
        return []
    with suppress(csv.Error), path.open(encoding="utf-8", errors="replace", newline="") as file:  # cut in a letter
        table = csv.DictReader(file)
        if table.fieldnames is None or list(table.fieldnames) == COLUMNS:
            return [row for row in table if None not in row.values() and None not in row]
    raise ValueError(f"{path} is another table; name a new file")


def sort_rows(path: Path, submissions: list[Submission], chapters: list[int]) -> list[dict[str, str]]:
    """A row for each submission, in their order; rows of files that have changed or gone since are dropped.

    chapters: that were graded (none named: all). The table keeps its rows of other chapters, which are not returned.
    """
    rows = {key_of(row): row for row in read_rows(path)}
    of_others = [row for row in rows.values() if chapters and row["chapter"] not in map(str, chapters)]
    kept = [rows[key] for each in submissions if (key := key_of(row_of(each))) in rows]
    equal = _equal(submissions)
    for row in kept:
        others = [f"{SAME}{who}" for who in equal.get(f"{row['chapter']}: {as_it_was(row['file'])}", ())]
        flags = [flag for flag in as_it_was(row["suspicious"]).split("; ") if flag and not flag.startswith(SAME)]
        row["suspicious"] = as_text("; ".join(others + flags))
    write(path, COLUMNS, [*of_others, *kept])
    return kept


def _by_chapter(submissions: list[Submission]) -> dict[int, list[Submission]]:
    """Those with something to grade."""
    found: dict[int, list[Submission]] = {}
    for each in submissions:
        if not each.problem:
            found.setdefault(each.chapter, []).append(each)
    return dict(sorted(found.items()))


def _equal(submissions: list[Submission]) -> dict[str, list[str]]:
    """chapter: file -> those with the same code, our solution among them."""
    found: dict[str, list[str]] = {}
    for number, of_chapter in _by_chapter(submissions).items():
        folder = find_chapter(number).folder
        sources = [(f"{number}: {each.file}", each.source) for each in of_chapter]
        sources.append(("our solution.py", (folder / "solution.py").read_bytes()))
        found |= same_code(sources, (folder / "exercise.py").read_bytes())
    return found


def write_pairs(path: Path, submissions: list[Submission]) -> int:
    """Those of each chapter that look alike, with our solution as one of them."""
    pairs: list[dict[str, Any]] = []
    for number, of_chapter in _by_chapter(submissions).items():
        folder = find_chapter(number).folder
        sources = [(as_text(f"{each.student}: {each.file}"), each.source) for each in of_chapter]
        sources.append(("our solution.py", (folder / "solution.py").read_bytes()))
        for similarity, one, other in similar_pairs(sources, (folder / "exercise.py").read_bytes()):
            pairs.append({"chapter": number, "similarity": f"{similarity:.2f}", "one": one, "other": other})
    write(path, ["chapter", "similarity", "one", "other"], pairs)
    return len(pairs)


def write(path: Path, columns: list[str], rows: Iterable[dict[str, Any]]) -> None:
    """At once: no moment has half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)
    temporary.replace(path)
