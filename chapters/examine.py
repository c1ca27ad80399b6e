"""Examine: grade a file in a process of its own (child.py), whose word counts only when it is complete.

A submission may end its process, crash it, wait for ever, catch whatever is raised in it, print without end, or start
processes of its own. Each costs the task in which it happens; the next task is graded in a new process.
"""

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from site import getuserbase
from typing import Any

from chapters.course import ROOT, Chapter
from chapters.grading import Result, Task
from chapters.submission import LIMIT_S, file_of, how_it_ended, readable
from nanovllm.files.hub import cache_folder

assert sys.platform != "win32", "examine_here.py does without groups of processes"

LOADING_LIMIT_S = 900.0  # for what is not the student's: loading the engine, before the submission is
PREPARING_S = 60.0  # beside the limit of a check, to clean up before one, and to load an engine that was left unsound
MOST_PRINTED_BYTES = 10_000  # kept of a task; the last ones
MOST_MESSAGE_BYTES = 1 << 20
MARK = "NANOVLLM_EXAMINED"  # environment variable of all processes that a submission starts


@dataclass(frozen=True)
class Place:
    """Where a submission is graded that must not touch what is ours: with a copy of the course, in a folder of its own.

    The folder is its working directory and its HOME, and what it writes elsewhere is refused where the system can do
    that (wall.py).
    """

    course: Path
    folder: Path
    students_course: Path

    @property
    def orders(self) -> dict[str, str]:
        """Arguments of child.main()."""
        return {"folder": str(self.folder), "course": str(self.students_course)}

    @property
    def environment(self) -> dict[str, str]:
        here = dict.fromkeys(("HOME", "TMPDIR", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(self.folder))
        kept = {"XDG_CACHE_HOME": str(cache_folder().parent), "PYTHONUSERBASE": getuserbase()}  # kernels, packages
        return here | kept | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}  # others have the other cores


def examine(
    chapter: Chapter, file: Path, model: str | None, limit_s: float = LIMIT_S, place: Place | None = None
) -> Generator[Result, None, None]:
    """The results of the chapter's tasks. Checks that need a model stay open where there is none.

    Raises ValueError if the checks or the model cannot be loaded. A process runs until the generator is closed.
    """
    try:
        tasks: list[Task] = chapter.module("checks").TASKS
    except ModuleNotFoundError as error:
        raise ValueError(f"the checks of chapter {chapter.number} need {error.name}, which is not installed") from None
    num_done = 0
    while num_done < len(tasks):
        child = _Child(place, chapter_number=chapter.number, file=str(file), model=model, first_task=num_done)
        try:
            for result in _follow(child, tasks[num_done:], file, limit_s):
                num_done += 1
                yield result
        finally:
            child.end()


def _follow(child: "_Child", tasks: list[Task], file: Path, limit_s: float) -> Generator[Result, None, None]:
    """Results up to the first task that the child does not bring to its end."""
    phase, number = "loading", 0
    for position, task in enumerate(tasks):
        begun = time.monotonic()
        try:
            while True:
                longer_s = {"loading": LOADING_LIMIT_S, "preparing": limit_s + PREPARING_S}
                message = child.read(longer_s.get(phase, limit_s))
                if "result" in message:
                    break
                if "refused" in message:
                    raise ValueError(message["refused"])
                if phase == "loading":  # what our own code has to say: a warning
                    print(child.take_printed(), end="", file=sys.stderr)
                    child.go_on()
                    begun = time.monotonic()
                phase, number = message["phase"], message.get("check", 0)
        except _Lost as lost:
            if phase == "loading":
                raise ValueError(f"the engine cannot be loaded: {lost}\n{child.take_printed()}") from None
            failed, problem, section = [task], str(lost), getattr(task.checks[number], "section", task.section)
            if phase == "importing":
                failed, problem, section = tasks[position:], f"{file_of(file)} cannot be loaded: {lost}", ""
            for each in failed:
                seconds, begun = time.monotonic() - begun, time.monotonic()
                yield Result(each, number, problem, section=section, seconds=seconds, printed=child.take_printed())
            return
        phase, number, seconds = "preparing", 0, time.monotonic() - begun
        result = Result(task, **message["result"], seconds=seconds, printed=child.take_printed())
        child.go_on()
        yield result


class _Lost(Exception):
    """The child will give no result. The message says why."""


class _Child:
    """The process. `orders` are arguments of child.main()."""

    def __init__(self, place: Place | None, **orders: Any) -> None:
        self.token, self.mark = secrets.token_hex(16), secrets.token_hex(16)
        ours, course = str(ROOT.parent), str(place.course if place else ROOT.parent)
        others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != ours]
        own = {"PYTHONPATH": os.pathsep.join([course, *others]), MARK: self.mark}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "chapters.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=course if place else None,  # where Python looks for modules first: not where a submission writes
            env=os.environ | (place.environment if place else {}) | own,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.channel, self.stderr = self.process.stdout.fileno(), self.process.stderr.fileno()
        self.said, self.printed, self.num_printed = b"", b"", 0
        self.selector = selectors.DefaultSelector()
        for fd in (self.channel, self.stderr):
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ)
        self._write(
            json.dumps(orders | {"token": self.token} | (place.orders if place else {"folder": None, "course": None}))
        )

    def read(self, limit_s: float) -> dict[str, Any]:
        """The next message. Raises _Lost if none comes within this time."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self.said:
            left = deadline - time.monotonic()
            if left <= 0:
                why = "does it wait for something, or is there a loop that never ends?"
                raise _Lost(f"it was not done after {limit_s:g} s: {why}")
            for key, _ in self.selector.select(left):
                self._take(key.fd)
        line, self.said = self.said.split(b"\n", 1)
        with suppress(ValueError, TypeError):
            token, message = json.loads(line)
            if token == self.token:
                return message
        raise _Lost("something was written into the grader's own pipe")

    def go_on(self) -> None:
        """What was printed up to now is taken: the next task may begin."""
        self._write("")

    def _write(self, line: str) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it has ended, which read() finds out
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def _take(self, fd: int) -> bool:
        """Read what is there; False if there is nothing now."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if fd == self.stderr:
            self.printed, self.num_printed = (self.printed + data)[-MOST_PRINTED_BYTES:], self.num_printed + len(data)
            if not data:
                with suppress(KeyError):
                    self.selector.unregister(fd)
        elif not data:
            raise _Lost(how_it_ended(self.process))
        else:
            self.said += data
            if len(self.said) > MOST_MESSAGE_BYTES:
                raise _Lost("something was written into the grader's own pipe")
        return bool(data)

    def take_printed(self) -> str:
        """What has been printed since it was last asked for."""
        for _ in range(16):  # what a pipe can hold; more comes from what is running on
            if not self._take(self.stderr):
                break
        cut = f"... ({self.num_printed:,} bytes in all)\n" if self.num_printed > len(self.printed) else ""
        text = cut + readable(self.printed.decode("utf-8", "replace"), 2 * MOST_PRINTED_BYTES)
        self.printed, self.num_printed = b"", 0
        return text

    def end(self) -> None:
        """Kill it, and whatever it has started: its process group, and on Linux those that have left the group."""
        self.process.terminate()  # its keeper ends the rest
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with suppress(ProcessLookupError, PermissionError):  # macOS: no permission to kill one that has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        for _ in range(100):  # each time those are found that were started meanwhile
            if not sum(_kill_marked(folder, self.mark) for folder in Path("/proc").glob("[0-9]*")):
                break
        for pipe in filter(None, (self.process.stdin, self.process.stdout, self.process.stderr)):
            with suppress(BrokenPipeError):
                pipe.close()
        self.selector.close()
        self.process.wait()


def _kill_marked(folder: Path, mark: str) -> bool:
    with suppress(OSError):
        if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
            os.kill(int(folder.name), signal.SIGKILL)
            return True
    return False
