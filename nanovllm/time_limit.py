"""Limits on the time and the memory of a call: a chat template is a program of the checkpoint, and may never end."""

import ctypes
import resource
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from time import monotonic
from typing import Any

LOOK_S = 0.02  # at the memory, so often


def call_with_limit(function: Callable[[], Any], limit_s: float, limit_mb: int, what: str) -> Any:
    """function(), with what it returns or raises; ValueError if that takes longer, or the process grows by more.

    It runs in a thread of its own, in which an exception is raised then: it ends at its next line of Python. Nothing
    can end a single operation in C, such as 9 ** 9 ** 9. Exceptions of signal handlers reach the caller as they are.
    """
    result: Future = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    thread = Thread(target=run, daemon=True)
    most, end = _num_bytes() + (limit_mb << 20), monotonic() + limit_s
    thread.start()
    try:
        thread.join(min(LOOK_S, limit_s))
        while not result.done() and _num_bytes() <= most and monotonic() < end:
            thread.join(LOOK_S)
        if _num_bytes() > most:
            raise ValueError(f"{what} takes more than {limit_mb} MB")
        if result.done():
            return result.result()
        raise ValueError(f"{what} has not ended after {limit_s:g} s")
    finally:
        if thread.ident and not result.done():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeoutError))


def _num_bytes() -> int:
    """Memory of this process; on macOS the most that it has had so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
