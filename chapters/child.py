"""Child: the process in which examine.py has one submission graded; python -m chapters.child is for it alone.

The checks run here, with the engine and all that is expected. The student's code does not: it runs in a process of its
own (worker.py), which is asked for a function's result and has nothing else to say. So a submission that looks for the
grader in memory finds none, and what it writes into a pipe is an answer like another, and has to be right.

What this process has to say goes to what was its standard output; what the student's code prints goes to stderr.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

from chapters.course import find_chapter
from chapters.expect import Kept, Wrong
from chapters.grading import Bench, Result, Task, grade
from chapters.patching import patches
from chapters.submission import StudentError, how_it_ended, readable
from chapters.wire import Broken, Checked, name_of

assert sys.platform != "win32", "see examine.py"

NUM_CHANNELS = 8  # threads of the checks that may call the student's function at the same time
PR_SET_DUMPABLE = 4
FROM_STUDENT = "something was written into the grader's own pipe"


class Student:
    """The process with the student's code, and its function as the checks see it. Ends when this process does."""

    def __init__(self, chapter_number: int, file: str, folder: str | None, course: str | None) -> None:
        """course: the copy of the course that it imports (None: this one)."""
        self._orders = chapter_number, file, folder, course
        pipes = [(os.pipe(), os.pipe()) for _ in range(NUM_CHANNELS)]
        keeper, self.alive = os.pipe()
        theirs = [(to_student[0], from_student[1]) for to_student, from_student in pipes]
        orders = {"chapter_number": chapter_number, "file": file, "folder": folder}
        orders |= {"channels": theirs, "keeper": keeper}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "chapters.worker", json.dumps(orders)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            pass_fds=[keeper, *(fd for pair in theirs for fd in pair)],
            cwd=course,
            env=os.environ | ({"PYTHONPATH": course} if course else {}),
        )
        for fd in (keeper, *(fd for pair in theirs for fd in pair)):
            os.close(fd)
        self._free = [StudentsEnd(from_student[0], to_student[1], 0) for to_student, from_student in pipes]
        self._wires: dict[int, StudentsEnd] = {}  # of threads
        self._fds = [fd for to_student, from_student in pipes for fd in (from_student[0], to_student[1])]
        self.name = ""  # of the function
        self.lost = ""  # why there will be no more answers

    def wire(self) -> "StudentsEnd":
        thread = threading.get_ident()
        if thread not in self._wires:
            self._wires[thread] = self._free.pop(0)
        return self._wires[thread]

    def ask(self, what: str, *arguments: Any) -> Any:
        """Raises StudentError when the process is lost."""
        if self.lost:
            raise StudentError(self.lost)
        try:
            return self.wire().ask(what, *arguments)
        except Broken as broken:
            self.lost = self._why(str(broken))
            raise StudentError(self.lost) from None

    def begin_check(self) -> None:
        for wire in self._wires.values():
            wire.ask("forget")
            wire.forget()
        main = threading.main_thread().ident
        self._free += [wire for thread, wire in self._wires.items() if thread != main]
        self._wires = {thread: wire for thread, wire in self._wires.items() if thread == main}

    def again(self) -> "Student":
        """A new process like this one."""
        other = start(*self._orders)
        other.name = self.name
        return other

    def function(self, name: str) -> "StudentsFunction":
        self.name = name
        return StudentsFunction(self)

    def _why(self, broken: str) -> str:
        if "pipe is closed" not in broken:
            return f"{FROM_STUDENT}: {readable(broken, 300)}"
        return how_it_ended(self.process)

    def end(self) -> None:
        """Its keeper ends the rest when the pipe is closed."""
        with suppress(OSError):
            os.close(self.alive)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)


class StudentsEnd(Checked):
    """This end of a channel to the student's process."""

    def forget(self) -> None:
        super().forget()
        self.patched: list[Any] | None = None  # not told yet

    def new_patches(self, function: Any) -> list[Any] | None:
        """What has been put into the engine's classes; None if it is what it was at the last call."""
        now = [(name_of(owner), name, *_stored(value)) for owner, name, value in patches()]
        if now == self.patched:
            return None
        self.patched = now
        return [(*names, None if value is function else value) for *names, value in now]

    def error_to_send(self, error: BaseException) -> Any:
        number = len(self.errors)
        self.errors[number] = error
        known = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins")
        return (number, known, readable(error, 300))

    def error_from(self, value: Any) -> BaseException:
        kind, what, *text = value
        if kind == "back" and type(what) is int and what in self.errors:
            return self.errors[what]
        return StudentError.like(str(what), readable(text[0], 4000) if text else "")


class StudentsFunction:
    """Called by the checks, and by the engine in whose classes the checks have put it."""

    def __init__(self, student: Student) -> None:
        self.student = student
        self.__name__ = student.name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else _bound(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wire = self.student.wire()
        known = len(wire.errors)
        found = self.student.ask("run", args, kwargs, wire.new_patches(self))
        for error in list(wire.errors.values())[known:]:
            if isinstance(error, Wrong):  # what a check has found does not go away by being caught
                raise error
        return found

    def elsewhere(self, *args: Any) -> Any:
        """What it returns in a new process, where Python's hash() of a text is another one."""
        other = self.student.again()
        try:
            for what in (("load",), ("find", self.student.name)):
                if problem := other.ask(*what):
                    raise StudentError(problem)
            return StudentsFunction(other)(*args)
        finally:
            other.end()

    def kept(self, memory: Kept) -> Any:
        """A copy of what it has put there."""
        number = self.student.wire().numbers.get(id(memory))
        return {} if number is None else self.student.ask("look", number)

    def peak_bytes(self, *args: Any) -> int:
        """The most memory that the tensors it makes take at once. This is the student's process's own word."""
        return int(self.student.ask("measure", args))


def _bound(function: StudentsFunction, instance: Any) -> Any:
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(instance, *args, **kwargs)

    return method


def _stored(value: Any) -> tuple[str, Any]:
    if isinstance(value, (staticmethod, classmethod)):
        return type(value).__name__, value.__func__
    return "function", value


def main(
    chapter_number: int,
    file: str,
    model: str | None,
    first_task: int,
    token: str,
    folder: str | None,
    course: str | None,
) -> None:
    """Grade this file, from this task on. folder: where its code may write (None: wherever its user may).

    course: of the student's process (None: as this one's).
    """
    channel = os.dup(1)
    os.dup2(2, 1)
    go_on = Semaphore(0)
    os.set_inheritable(channel, False)
    Thread(target=listen, args=(os.dup(0), go_on), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGTERM, end)

    def say(**message: Any) -> None:
        line = memoryview(f"{json.dumps([token, message])}\n".encode())
        while line:
            line = line[os.write(channel, line) :]

    chapter, bench = find_chapter(chapter_number), Bench(model)
    tasks: list[Task] = chapter.module("checks").TASKS
    try:
        bench.prepare()
    except Exception as error:
        return say(refused=f"the engine cannot be loaded: {readable(error)}")
    if folder is not None:
        from chapters.wall import wall_in  # not above: for Windows it has nothing

        os.chdir(folder)
        wall_in(folder)
    student = start(chapter_number, file, folder, course)
    student.ask("forget")  # it answers when it has imported what it needs
    say(phase="importing")
    go_on.acquire()
    problem = _asked(student, "load")
    if student.lost:
        problem = f"{Path(file).name} cannot be loaded: {student.lost}"
    for task in tasks[first_task:]:
        say(phase="preparing")
        if student.lost and not problem:  # a task has cost it
            student.end()
            student = start(chapter_number, file, folder, course)
            problem = _asked(student, "load")
        missing = problem or _asked(student, "find", task.name)
        result = Result(task, 0, missing) if missing else graded(task, student, bench, say, file)
        done = {name: value for name, value in vars(result).items() if name not in ("task", "seconds", "printed")}
        say(result=done)
        go_on.acquire()


def graded(task: Task, student: Student, bench: Bench, say: Any, file: str) -> Result:
    def begins(number: int) -> None:
        if not student.lost:
            with suppress(Broken):
                student.begin_check()
        say(phase="checking", check=number)

    result = grade(task, student.function(task.name), bench, begins, file)
    if student.lost and not result.problem:  # whatever the checks have made of it
        return Result(task, result.num_passed - 1, student.lost, section=task.section)
    if student.lost:
        return Result(task, result.num_passed, student.lost, section=result.section)
    return result


def _asked(student: Student, *what: str) -> str:
    try:
        return str(student.ask(*what))
    except StudentError as error:
        return error.text


# -- ending -----------------------------------------------------------------------------------------------------------

STARTED: list[Student] = []


def start(chapter_number: int, file: str, folder: str | None, course: str | None) -> Student:
    with open_to_others():
        STARTED.append(Student(chapter_number, file, folder, course))
    return STARTED[-1]


@contextmanager
def open_to_others() -> Iterator[None]:
    """On Linux no other process of the same user may read this one's memory, except while it starts one."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    yield
    if prctl is not None:
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def end(*_: object) -> None:
    for student in STARTED:
        student.end()
    os._exit(1)


def listen(stdin: int, go_on: Semaphore) -> None:
    """The parent says when to go on. The pipe is closed only when the parent is gone, however it went."""
    while os.read(stdin, 1):
        go_on.release()
    end()


if __name__ == "__main__":
    main(**json.loads(sys.stdin.readline()))
    for each in STARTED:
        each.end()
    sys.stdout.flush()
