"""What the commands write for a person: text of files and users as it is, on streams that may be closed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Screen(Console):
    """A console that shows text as it is: no markup, no emoji codes, no colours that nobody asked for."""

    def __init__(self, file: Any = None, *, stderr: bool = False) -> None:
        super().__init__(file=file, stderr=stderr, markup=False, emoji=False, highlight=False)

    def working(self, text: str) -> Status:
        return self.status(Text(text))

    def on_broken_pipe(self) -> None:
        raise  # what it means is for the command to say, where rich would end the process


class Forgiving:
    """A stream on which no result depends: what cannot be written there, for nobody reads it, is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _silenced_if_broken(self._stream):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _silenced_if_broken(self._stream):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def standard_streams() -> Iterator[None]:
    """While a command runs: a stream that the shell has closed reads or writes nothing (Python has None there), any
    text can be written to stdout, and messages that cannot be written to stderr are dropped."""
    before = sys.stdin, sys.stdout, sys.stderr
    # In this order each gets the number that the shell has left free; a file that is opened later must not.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = cast(TextIO, Forgiving(sys.stderr or open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with _silenced_if_broken(sys.stdout):
            sys.stdout.flush()
        sys.stdin, sys.stdout, sys.stderr = before


@contextmanager
def _silenced_if_broken(stream: TextIO) -> Iterator[None]:
    """What is left in a broken stream's buffer goes nowhere, or the interpreter would fail to flush it at its end."""
    try:
        yield
    except (OSError, ValueError):  # ValueError: it is closed
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
