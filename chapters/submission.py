"""Submission: a student's exercise.py as a module, and what is said when it, or an error that it raises, is odd.

Nothing here trusts the file: it may be no Python, end the program while it is imported, or raise errors whose own
methods fail. What takes for ever is for the caller's clock. Standard library only: a browser uses this file, too.
"""

import io
import linecache
import sys
import tokenize
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

LIMIT_S = 120.0  # for one check, and for the import of the submission
RETURNS = "a solution returns, and does not end the program"


class NoInput(io.StringIO):
    """sys.stdin where a submission runs: nobody can answer."""

    def read(self, size: int | None = -1) -> str:
        raise EOFError("there is no input: a check hands over all that your function needs")

    readline = read  # typeshed has bytes


class NotLoaded(Exception):
    """The submission has nothing to grade. The message says why."""


def load_submission(source: bytes | str, name: str, module_name: str = "submission") -> ModuleType:
    """The module that this source is, imported again. `name`: its file's, for messages. Raises NotLoaded."""
    try:
        text = source if isinstance(source, str) else _decode(source)
        lines = io.StringIO(text, newline=None).readlines()
        linecache.cache[name] = (len(text), None, lines, name)  # tracebacks quote this text, whatever the disk has
        module = module_from_spec(ModuleSpec(module_name, None))
        module.__file__ = name
        sys.modules[module_name] = module  # where dataclasses look their module up
        exec(compile(text, name, "exec", dont_inherit=True), vars(module))
    except BaseException as error:  # SystemExit, too: it is the student's file
        raise NotLoaded(f"{file_of(name)} cannot be loaded: {describe(error, name)}") from None
    return module


def find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    """The submission's function of this name. Raises NotLoaded."""
    function = vars(module).get(name)
    if function is None:
        raise NotLoaded(f"{file_of(module.__file__)} has no function {name}")
    if not callable(function):
        raise NotLoaded(f"{name} in {file_of(module.__file__)} is no function: it is of type {kind_of(function)}")
    return function


def describe(error: BaseException, name: str) -> str:
    """What was raised, and the last line of the file of this name that led to it, else the last line of all.

    Never raises, whatever the error's own methods do.
    """
    try:
        return "\n".join(filter(None, (_what(error), _where(error, name))))
    except BaseException:
        return "an error that fails itself when it is asked what it is"


def not_started(error: BaseException) -> str:
    """Which function is still to be written, if the error says no more than that; empty for any other error.

    PyTorch, too, raises NotImplementedError, and says what it cannot do.
    """
    if type(error) is not NotImplementedError or error.args:
        return ""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    code = frame.f_code
    return f"{getattr(code, 'co_qualname', code.co_name)}() in {file_of(code.co_filename)}, line {line}"


def is_of_ours(error: BaseException, name: str) -> bool:
    """Was it raised when nothing ran that stands in the file of this name?"""
    return all(frame.f_code.co_filename != name for frame, _ in traceback.walk_tb(error.__traceback__))


def raised_by_checks(error: BaseException) -> bool:
    """Was it raised in a file of the course, such as a check?"""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and Path(files[-1]).is_relative_to(Path(__file__).parent)


def readable(value: Any, most_characters: int = 2000) -> str:
    """str(value) for any terminal: cut, without control characters and lone surrogates. Never raises."""
    try:
        text = str.__str__(str(value))  # not a class made from str, whose methods are the student's
    except BaseException as error:
        text = f"<{kind_of(error)} when it was made into text>"
    if len(text) > most_characters:
        text = f"{text[:most_characters]}... ({len(text):,} characters)"
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _decode(source: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    except SyntaxError:  # it says nothing of the line
        encoding = "utf-8"
    try:
        return source.decode(encoding)
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{source[error.start]:02x} in line {line}"
        raise SyntaxError(f"it is not {encoding} text ({found}); save the file as UTF-8") from None


def _what(error: BaseException) -> str:
    message = readable(error.msg if isinstance(error, SyntaxError) else error)
    what = f"{kind_of(error)}: {message}" if message else kind_of(error)
    return f"{what}\n{RETURNS}" if isinstance(error, SystemExit) else what


def _where(error: BaseException, name: str) -> str:
    file, number = "", 0
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        file, number = error.filename, error.lineno
    else:
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == name or file != name:
                file, number = frame.f_code.co_filename, line
    if file == __file__ or not file:  # the file itself could not be read
        return ""
    text = linecache.getline(file, number).strip()[:200]
    return f"{file_of(file)}, line {number}" + (f": {readable(text)}" if text else "")


def file_of(path: object) -> str:
    """The last part of a path."""
    return readable(str(path).replace("\\", "/").rsplit("/", 1)[-1])


def kind_of(value: object) -> str:
    """The name of its type, whatever that says of itself."""
    name = type.__dict__["__name__"].__get__(type(value))  # a metaclass may have one of its own
    return readable(str.__str__(name))


def full_kind_of(value: object) -> str:
    """The same, with its module if that is not Python's own: "numpy.bool"."""
    module = type.__dict__["__module__"].__get__(type(value))
    return kind_of(value) if module == "builtins" else f"{readable(module, 100)}.{kind_of(value)}"
