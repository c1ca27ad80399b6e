"""Worker: the process in which a student's code runs; python -m chapters.worker is for child.py alone.

It is two: a keeper, which runs no code of the student's, and its child, which does. So what a submission does to its
parent it does to the keeper, and whatever it starts belongs to the keeper in the end (on Linux), and ends with it. The
keeper ends all of them as soon as the grader, at the other end of its pipe, is gone.

There are no checks here, and no expected answers: calls come over a wire (wire.py), and what the function returns goes
back.
"""

import builtins
import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Thread
from types import GeneratorType, ModuleType
from typing import Any

from chapters.submission import NoInput, NotLoaded, describe, find_function
from chapters.wire import CALLABLE, Broken, Wire

assert sys.platform != "win32", "see examine.py"


class FarError(Exception):
    """What was raised on the checks' side, while the student's code had called it. number: of the error there."""

    number = 0


class StudentsWire(Wire):
    """The end of the student's process."""

    def __init__(self, read_fd: int, write_fd: int, code: "StudentsCode") -> None:
        super().__init__(read_fd, write_fd, 1)
        self.code = code

    def serve(self, what: str, *arguments: Any) -> Any:
        if what == "forget":
            return self.forget()
        if what == "load":
            return self.code.load()
        if what == "find":
            return self.code.find(*arguments)
        if what == "look":
            return dict(self.objects[arguments[0]])
        if what == "measure":
            return self.code.measure(*arguments)
        if what == "run":
            return self.code.run(*arguments)
        return super().serve(what, *arguments)

    def ask(self, what: str, *arguments: Any) -> Any:
        """Tensors that come as an answer are the student's: they are not kept here, so that a tile can be let go."""
        found = super().ask(what, *arguments)
        for each in found if isinstance(found, tuple) else (found,):
            number = self.numbers.get(id(each), -1)
            if type(self.sent.get(number)) is tuple:
                del self.sent[number], self.objects[number], self.numbers[id(each)]
        self.roots = [root for root in self.roots if root is not found]
        return found

    def stays_here(self, thing: Any) -> str:
        if isinstance(thing, (GeneratorType, Iterator)):
            return "iterator"
        if isinstance(thing, CALLABLE) or callable(thing):
            return "function"
        raise TypeError(f"a {type(thing).__name__} was handed over; the checks take numbers, texts, lists and the like")

    def error_to_send(self, error: BaseException) -> Any:
        if isinstance(error, FarError):
            return ("back", error.number)
        if isinstance(error, NotImplementedError):
            return ("raised", "NotImplementedError", "")
        known = next(cls.__name__ for cls in type(error).__mro__ if vars(builtins).get(cls.__name__) is cls)
        return ("raised", known, describe(error, self.code.file))

    def error_from(self, value: Any) -> BaseException:
        number, kind, text = value
        cls = getattr(builtins, kind)
        with suppress(TypeError):  # bases whose objects are laid out differently
            made: Any = type(kind, (FarError, cls), {})(text)
            made.number = number
            return made
        made = FarError(text)
        made.number = number
        return made


class StudentsCode:
    """The submission. It is loaded when the grader says so, and asked for one function after another."""

    def __init__(self, chapter_number: int, file: str) -> None:
        from chapters.course import find_chapter

        self.chapter, self.file = find_chapter(chapter_number), file
        self.module: ModuleType | None = None
        self.function: Any = None
        self.replaced: list[tuple[Any, str, Any]] = []  # (class, name, what was there) of the checks' patches
        with suppress(Exception):  # all that it may import: not on the student's time
            self.chapter.module("exercise")

    def load(self) -> str:
        """Why it cannot be loaded; empty if it can."""
        try:
            self.module = self.chapter.submission(Path(self.file))
        except NotLoaded as error:
            return str(error)
        return ""

    def find(self, name: str) -> str:
        try:
            assert self.module is not None
            self.function = find_function(self.module, name)
        except NotLoaded as error:
            return str(error)
        return ""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], patches: list[Any] | None) -> Any:
        """patches: what the checks have put into the engine's classes, if that has changed: (class, name, how it is
        stored, function or None: the student's)."""
        if patches is not None:
            for owner, name, ours in self.replaced:
                setattr(owner, name, ours)
            classes = [(_class(owner), *others) for owner, *others in patches]
            self.replaced = [(owner, name, vars(owner)[name]) for owner, name, _, _ in classes]
            for owner, name, stored, function in classes:
                setattr(owner, name, self._method(stored, function))
        torch: Any = sys.modules.get("torch")  # None where nothing has imported it
        with nullcontext() if torch is None else torch.no_grad():
            return self.function(*args, **kwargs)

    def measure(self, args: tuple[Any, ...]) -> int:
        """The most bytes of tensors that were alive at once while the function ran."""
        from chapters.ch10_optimization_stack.tiles import Memory

        with Memory() as memory:
            self.function(*args)
        return memory.peak_bytes

    def _method(self, stored: str, function: Any) -> Any:
        called = self.function if function is None else function

        def method(*args: Any, **kwargs: Any) -> Any:
            return called(*args, **kwargs)

        return {"function": method, "staticmethod": staticmethod(method), "classmethod": classmethod(method)}[stored]


def _class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    return getattr(importlib.import_module(module), qualname)


def main(chapter_number: int, file: str, folder: str | None, channels: list[tuple[int, int]]) -> None:
    """folder: where the code may write (None: wherever its user may). channels: pairs of pipes, to read and to write;
    each is for a thread of the grader."""
    sys.stdin = NoInput()
    with suppress(OSError):  # where there is such a thing: if memory runs out, this process is to go, and no other
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
    code = StudentsCode(chapter_number, file)
    if folder is not None:
        from chapters.wall import wall_in  # not above: for Windows it has nothing

        os.chdir(folder)
        wall_in(folder, may_read=readable_places(folder))
    for read_fd, write_fd in channels[1:]:
        Thread(target=serve, args=(read_fd, write_fd, code), daemon=True).start()
    serve(*channels[0], code)


def readable_places(folder: str) -> list[str]:
    """What a solution may need: Python, its packages, the system's libraries, this copy of the course. Not what else
    lies on the grader's disk, such as the solutions."""
    from nanovllm.files.hub import cache_folder

    course = str(Path(__file__).parents[1])
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc", "/dev", "/proc", "/sys", "/opt"]
    packages = [path for path in sys.path if "-packages" in path or path.endswith(".zip")]
    return [course, folder, sys.prefix, sys.base_prefix, str(cache_folder()), *packages, *system]


def serve(read_fd: int, write_fd: int, code: StudentsCode) -> None:
    with suppress(Broken):
        StudentsWire(read_fd, write_fd, code).listen()
    os._exit(1)


# -- the keeper -------------------------------------------------------------------------------------------------------


def keep(child: int, grader: int) -> None:
    """Wait for the child, end all that it has left, and end as it did. At once, when the grader is gone: its pipe is
    this one."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(grader, 1):
                pass
        end_all(child)
        os._exit(1)

    Thread(target=watch, daemon=True).start()
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
    orders = json.loads(sys.argv[1])
    watched, own = orders.pop("keeper"), [fd for pair in orders["channels"] for fd in pair]
    with suppress(OSError, AttributeError):  # Linux: orphans of the child become this process's children
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    if pid := os.fork():
        for fd in (0, 1, 2, *own):  # they are the child's, and end with it
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        keep(pid, watched)
    os.close(watched)
    os.setsid()
    sys.argv[1:] = []
    main(**orders)
