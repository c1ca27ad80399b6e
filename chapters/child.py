"""Child: the process in which examine.py has one submission graded; python -m chapters.child is for it alone.

It is two: a keeper, which runs no code of the student's, and its child, which grades. So what a submission does to its
parent it does to the keeper, and whatever it starts belongs to the keeper in the end (on Linux), and ends with it.

What the child has to say goes to what was its standard output; what the student's code prints goes to stderr. Code that
looks for the grader in memory or among the processes, in order to forge a result or to harm it, is not stopped.
"""

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

from chapters.course import find_chapter
from chapters.grading import Bench, Result, Task, grade
from chapters.submission import NoInput, NotLoaded, find_function, readable

assert sys.platform != "win32", "see examine.py"


def main(chapter_number: int, file: str, model: str | None, first_task: int, token: str, folder: str | None) -> None:
    """Grade this file, from this task on. folder: where its code may write (None: wherever its user may)."""
    channel = os.dup(1)
    getpid, write, dumps = os.getpid, os.write, json.dumps  # the student's code may put others in their place
    process = getpid()
    os.dup2(2, 1)
    go_on = Semaphore(0)
    Thread(target=listen, args=(os.dup(0), go_on), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = NoInput()
    with suppress(OSError):  # where there is such a thing: if memory runs out, this process is to go, and no other
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")

    def say(**message: Any) -> None:
        if getpid() != process:  # the student's code has forked, and this is the copy
            os._exit(0)
        line = memoryview(f"{dumps([token, message])}\n".encode())
        while line:
            line = line[write(channel, line) :]

    chapter, bench = find_chapter(chapter_number), Bench(model)
    tasks: list[Task] = chapter.module("checks").TASKS
    try:
        bench.prepare()
    except Exception as error:
        return say(refused=f"the engine cannot be loaded: {readable(error)}")
    say(phase="importing")
    go_on.acquire()
    if folder is not None:
        from chapters.wall import wall_in  # not above: for Windows it has nothing

        os.chdir(folder)
        wall_in(folder)
    problem = ""
    try:
        module = chapter.submission(Path(file))
    except NotLoaded as error:
        problem = str(error)
    for task in tasks[first_task:]:
        say(phase="preparing")
        try:
            if problem:
                raise NotLoaded(problem)
            function = find_function(module, task.name)
            result = grade(task, function, bench, lambda number: say(phase="checking", check=number), file)
        except NotLoaded as error:
            result = Result(task, 0, str(error))
        done = {name: value for name, value in vars(result).items() if name not in ("task", "seconds", "printed")}
        say(result=done)
        go_on.acquire()


def listen(stdin: int, go_on: Semaphore) -> None:
    """The parent says when to go on. The pipe is closed only when the parent is gone, however it went."""
    with suppress(OSError):  # the student's code has closed it
        while os.read(stdin, 1):
            go_on.release()
    os.killpg(0, signal.SIGKILL)


def keep(child: int) -> None:
    """Wait for the child, end all that it has left, and end as it did. SIGTERM: now."""

    def stop(number: int, frame: object) -> None:
        end_all(child)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    for fd in (0, 1, 2):  # the pipes are the child's: they end with it
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    while True:
        pid, status = os.wait()  # also those that were left to this process
        if pid == child:
            break
    end_all(child)
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def end_all(child: int) -> None:
    """Kill the child's group, and, where this process inherits orphans, until none is left."""
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            for pid in children_of(os.getpid()):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            os.wait()


def children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text("utf-8", "replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    orders = json.loads(sys.stdin.readline())
    with suppress(OSError, AttributeError):  # Linux: orphans of the child become this process's children
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    if pid := os.fork():
        keep(pid)
    os.setsid()
    main(**orders)
