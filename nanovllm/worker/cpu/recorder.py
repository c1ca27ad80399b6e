"""Recorder: calls of C functions, made, or only written down while a step is recorded (chapter 10)."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Call = tuple[Callable[[ctypes.Structure], None], ctypes.Structure]  # a C function and its struct of arguments


class Recorder:
    """Makes the calls of one library's C functions, or writes them down."""

    def __init__(self) -> None:
        self._calls: list[Call] | None = None

    def call(self, function: Callable[[ctypes.Structure], None], args: ctypes.Structure) -> None:
        """Call the function; while a step is recorded, append the call to the record instead: nothing is computed."""
        if self._calls is None:
            function(args)
        else:
            self._calls.append((function, args))

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Meanwhile calls are written down, in the list."""
        self._calls = []
        try:
            yield self._calls
        finally:
            self._calls = None
