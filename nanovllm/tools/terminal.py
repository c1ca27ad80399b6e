"""A conversation on a terminal: lines that can be edited, answers that wrap at words, typing that waits its turn."""

import re
import sys
from contextlib import suppress
from shutil import get_terminal_size
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

if sys.platform != "win32":
    import termios


class Questions:
    """Asks for lines: `with Questions(...) as you: you.ask()`.

    Where Python has readline, a line can be edited, and earlier ones recalled with the arrow keys. (Windows has none:
    its terminal edits lines itself.) What is typed between two questions does not show in the middle of what is printed
    then; it is there at the next question.
    """

    def __init__(self, console: Console, prompt: Text) -> None:
        with console.capture() as drawn:
            console.print(prompt, end="")
        self._prompt = drawn.get()
        self._before: list[Any] | None = None  # how the terminal was; None: there is none, or it is Windows'

    def __enter__(self) -> "Questions":
        if sys.stdin.isatty() and sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 (from now on, input() uses it)

                # readline has to know which characters of a prompt take no room.
                self._prompt = re.sub(r"(\x1b\[[0-9;]*m)", "\x01\\1\x02", self._prompt)
        if sys.platform != "win32" and sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            self._show_typing(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._show_typing(True)

    def ask(self) -> str:
        """A line, without its end. Raises EOFError and KeyboardInterrupt as input() does."""
        self._show_typing(True)
        try:
            return input(self._prompt)
        finally:
            self._show_typing(False)

    def _show_typing(self, shown: bool) -> None:
        if sys.platform != "win32" and self._before is not None:
            mode = list(self._before)
            if not shown:
                mode[3] &= ~termios.ECHO
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)


class WordWrap:
    """Prints a text as it grows. On a terminal, a word that does not fit goes to the next line.

    So a word is held back until white space follows. A line may also break beside a CJK character.
    """

    PIECES = re.compile(r"\n|[^\S\n]+|[\u2e80-\ud7ff\uf900-\uffef]|[^\s\u2e80-\ud7ff\uf900-\uffef]+")

    def __init__(self) -> None:
        self._wraps = sys.stdout.isatty()
        self._column = 0  # where the next character goes
        self._gap = ""  # white space, which a break replaces
        self._word = ""  # it may go on

    def write(self, text: str) -> None:
        if not self._wraps:
            print(text, end="", flush=True)
            return
        pieces = self.PIECES.findall(self._word + text)
        self._word = pieces.pop() if pieces and not pieces[-1].isspace() else ""
        for piece in pieces:
            self._put(piece)
        sys.stdout.flush()

    def _put(self, piece: str) -> None:
        if piece == "\n":
            print()
            self._column, self._gap = 0, ""
            return
        if not piece or piece.isspace():
            self._gap += piece.expandtabs()
            return
        columns = get_terminal_size().columns
        if self._column and self._column + cell_len(self._gap + piece) > columns:
            print()
            self._column, self._gap = 0, ""
        print(self._gap + piece, end="")
        self._column += cell_len(self._gap + piece)
        if self._column > columns:  # a long word, which the terminal has cut
            self._column %= columns
        self._gap = ""
