"""The other process of confined.py: has a child answer questions, and starts another one when the limits end it.

Run as a script: it imports what the answers need and nothing of this package. Arguments: the path of a script with a
function `answer`, and as JSON the seconds of a processor (a question), the bytes of memory and the niceness of a child.
"""

import json
import os
import runpy
import signal
import sys
from contextlib import suppress
from typing import Any

if sys.platform != "win32":
    import resource

del sys.path[0]  # this folder: its requests.py, for one, is not the package that others import
AGAIN = 3  # exit code of a child whose answers have left half of the memory taken: the next one begins anew


def main(script: str, limits: str) -> None:
    answer = runpy.run_path(script)["answer"]
    if sys.platform == "win32":  # which has no fork, and none of these limits: confined.py ends what takes too long
        return child(answer, *json.loads(limits))
    while True:
        if (pid := os.fork()) == 0:
            child(answer, *json.loads(limits))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            return
        if status != AGAIN:
            print("null", flush=True)


def child(answer: Any, seconds: float, max_bytes: int, niceness: int) -> None:
    """A line on stdout for each line on stdin. Or be ended by the system: nobody's code is asked."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust tells of the memory that it did not get
    at_rest = num_bytes()
    if sys.platform != "win32":
        os.nice(niceness)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(ValueError):  # macOS bounds no memory: there the time has to do
            resource.setrlimit(resource.RLIMIT_AS, (at_rest + max_bytes,) * 2)
    for line in sys.stdin:
        end_after(seconds)
        found = json.dumps(attempt(answer, json.loads(line)))
        end_after(0)
        print(found, flush=True)
        if num_bytes() - at_rest > max_bytes // 2:
            os._exit(AGAIN)
    os._exit(0)


def end_after(seconds: float) -> None:
    """Of a processor; 0: never."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def attempt(answer: Any, question: list[Any]) -> tuple[Any, str]:
    """(result, error)."""
    try:
        return answer(*question), ""
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error.__context__ or error, MemoryError):
            os._exit(1)
        return None, str(error) or type(error).__name__


def num_bytes() -> int:
    """Of addresses that are in use; 0 where nobody says."""
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    return 0


main(*sys.argv[1:])
