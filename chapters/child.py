"""Child: the process in which examine.py has one submission graded; python -m chapters.child is for it alone.

What this process has to say goes to what was its standard output; what the student's code prints goes to stderr. Code
that looks for the grader in this process's memory, in order to forge a result, is not stopped.
"""

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


def main(chapter_number: int, file: str, model: str | None, first_task: int, token: str) -> None:
    """Grade this file, from this task on."""
    process, channel = os.getpid(), os.dup(1)
    os.dup2(2, 1)
    go_on = Semaphore(0)
    Thread(target=listen, args=(os.dup(0), go_on), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = NoInput()
    with suppress(OSError):  # where there is such a thing: if memory runs out, this process is to go, and no other
        Path("/proc/self/oom_score_adj").write_text("1000")

    def say(**message: Any) -> None:
        if os.getpid() != process:  # the student's code has forked, and this is the copy
            os._exit(0)
        line = memoryview(f"{json.dumps([token, message])}\n".encode())
        while line:
            line = line[os.write(channel, line) :]

    chapter, bench = find_chapter(chapter_number), Bench(model)
    tasks: list[Task] = chapter.module("checks").TASKS
    try:
        bench.prepare()
    except Exception as error:
        return say(refused=f"the engine cannot be loaded: {readable(error)}")
    say(phase="importing")
    go_on.acquire()
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
    while os.read(stdin, 1):
        go_on.release()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(**json.loads(sys.stdin.readline()))
