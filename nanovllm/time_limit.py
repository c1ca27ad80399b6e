"""A limit on the time of a call: a chat template is a program of the checkpoint, and may never end."""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any


def call_with_limit(function: Callable[[], Any], limit_s: float, what: str) -> Any:
    """function(), with what it returns or raises; ValueError if that takes longer.

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
    thread.start()
    try:
        thread.join(limit_s)
        if result.done():
            return result.result()
        raise ValueError(f"{what} has not ended after {limit_s:g} s")
    finally:
        if thread.ident and not result.done():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeoutError))
