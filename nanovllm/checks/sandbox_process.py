"""The process of a sandbox (sandbox.py): its child answers questions, until the system ends it for taking too much.

The next child, a copy of this process, needs no time to begin. Run as a program: it imports what the answers need and
nothing else. Arguments: the path of a script with a function `answer`, the CPU seconds of an answer, the bytes of
memory that answers may add, the niceness, and folders of packages that the script imports.
"""

import json
import os
import runpy
import signal
import sys
from contextlib import suppress
from typing import Any, TextIO

if sys.platform != "win32":
    import resource

AGAIN = 3  # exit code of a child whose answers have left half of the memory taken


def main(script: str, seconds: float, max_bytes: int, niceness: int) -> None:
    """A line on stdout for each line on stdin: what the child says, or "null" for an answer that took too much.

    What the script and its answers print is no reply: it goes nowhere.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answer = runpy.run_path(script)["answer"]
    if sys.platform == "win32":  # it has no fork, and no limits: sandbox.py ends what takes too long
        return child(answer, replies, seconds, max_bytes, niceness)
    else:
        while True:
            if (pid := os.fork()) == 0:
                child(answer, replies, seconds, max_bytes, niceness)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status == 0:
                return
            if status != AGAIN:
                print("null", file=replies, flush=True)


def child(answer: Any, replies: TextIO, seconds: float, max_bytes: int, niceness: int) -> None:
    """A line of replies for each line on stdin: JSON of [result, error]. Does not return."""
    os.dup2(1, 2)  # Rust complains there about memory that it did not get
    at_rest = num_bytes()
    if sys.platform != "win32":
        os.nice(niceness)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(ValueError):  # macOS does not limit memory
            resource.setrlimit(resource.RLIMIT_AS, (at_rest + max_bytes,) * 2)
    for line in sys.stdin:
        end_after(seconds)
        reply = attempt(answer, json.loads(line))
        end_after(0)
        print(reply, file=replies, flush=True)
        if num_bytes() - at_rest > max_bytes // 2:
            os._exit(AGAIN)
    os._exit(0)


def end_after(seconds: float) -> None:
    """End this process after so much CPU time; 0: never."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def attempt(answer: Any, question: list[Any]) -> str:
    """JSON of [result, error]. A result that JSON cannot hold is an error."""
    try:
        return json.dumps([answer(*question), ""])
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(error.__context__ or error, MemoryError):
            os._exit(1)
        return json.dumps([None, str(error) or type(error).__name__])


def num_bytes() -> int:
    """The size of the address space; 0 where the system does not say."""
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    return 0


script, seconds, max_bytes, niceness, *folders = sys.argv[1:]
sys.path += folders
main(script, float(seconds), int(max_bytes), int(niceness))
