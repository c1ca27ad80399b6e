"""What strangers send over HTTP is tried in another process first: it may take minutes or gigabytes.

A grammar and a regular expression are programs by whoever wrote them. A few characters can cost minutes and gigabytes
({"type": "integer", "multipleOf": 20000003}), and Python cannot end an operation in C. The system can end a process:
sandbox_process.py asks it to.

Whom to trust is decided here. A script's own grammars, the adapters that it names and its checkpoint's chat template
run in its process, as in vLLM, PEFT and transformers. A server calls guard(), and what its process is then asked goes
through a sandbox, whoever has asked. (Of templates it takes none from a client.)
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Timer
from typing import Any

WAIT_S = 20.0  # until a process is killed from here: a machine may be busy, or Windows, which has no such limits

if sys.platform == "win32":
    KILLED = 1
else:
    KILLED = -signal.SIGKILL

Process = subprocess.Popen[bytes]
_guards = False


def guard() -> None:
    """From now on, this process answers strangers."""
    global _guards
    _guards = True


def is_guarding() -> bool:
    return _guards


class TooMuch(ValueError):
    """The answer took more than it may."""


class Sandbox:
    """The function `answer` of a module, in a process of its own once strangers may ask. Any thread may call it.

    seconds   CPU time of one answer
    max_mb    memory above what the process has at rest (macOS does not enforce it: there only the seconds count;
              Windows enforces neither: there it is WAIT_S)
    niceness  5 lets the computing of other answers go first
    packages  those that the module imports, beside the standard library
    """

    def __init__(
        self, module: str, *, seconds: float, max_mb: int, niceness: int = 0, packages: tuple[str, ...] = ()
    ) -> None:
        self.module = module
        self.seconds = seconds
        self.max_mb = max_mb
        self.niceness = niceness
        self.packages = packages
        self._forget_process()
        if hasattr(os, "register_at_fork"):  # not in a browser or on Windows
            os.register_at_fork(after_in_child=self._forget_process)  # it is the parent's

    def _forget_process(self) -> None:
        self._lock = Lock()
        self.process: Process | None = None

    def answer(self, *question: Any) -> Any:
        """answer(*question), here or in the sandbox. Raises ValueError with the text of its exception, or TooMuch."""
        if is_guarding():
            return self.ask(*question)
        try:
            return importlib.import_module(self.module).answer(*question)
        except BaseException as error:  # a panic in Rust is not an Exception
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ValueError(str(error) or type(error).__name__) from error
            raise

    def ask(self, *question: Any) -> Any:
        """answer(*question) in the sandbox; question and answer travel as JSON. Raises ValueError, or TooMuch."""
        try:
            line = json.dumps(question).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"only what JSON can hold is taken: {error}") from None
        with self._lock:
            process = self.process
            if process is None or process.poll() is not None:
                process = self._start()
            self.process = None  # after an exception such as Ctrl-C, no answer is left for the next question to read
            timer = Timer(WAIT_S, _kill, [process])
            timer.start()
            reply = b""
            try:
                reply = _exchange(process, line)
            finally:
                timer.cancel()
                if reply:
                    self.process = process
                else:
                    end(process)
        if not reply and process.returncode != KILLED:  # what went wrong is on stderr
            raise RuntimeError(f"the process of {self.module} has ended by itself: {process.returncode}")
        if not reply or (answer := json.loads(reply)) is None:
            raise TooMuch(self.too_much())
        result, problem = answer
        if problem:
            raise ValueError(problem)
        return result

    def too_much(self) -> str:
        return f"takes more than {self.seconds:g} s of a processor or {self.max_mb} MB"

    def _start(self) -> Process:
        program = Path(__file__).with_name("sandbox_process.py")
        limits = [str(self.seconds), str(self.max_mb << 20), str(self.niceness)]
        # Isolated (-I): no folder of a script's or a variable's may hold a module with a name of the standard library.
        # A session of its own: Ctrl-C does not reach it.
        return subprocess.Popen(
            [sys.executable, "-I", str(program), _origin(self.module), *limits, *self._folders()],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _folders(self) -> list[str]:
        """Where the packages are installed."""
        return [str(Path(_origin(package)).parents[1]) for package in self.packages]


def _origin(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    return spec.origin


def end(process: Process) -> None:
    with suppress(subprocess.TimeoutExpired):  # if it has ended by itself, its exit code says why
        process.wait(0.1)
    _kill(process)
    process.communicate()


def _kill(process: Process) -> None:
    """It, and the child that it may have."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _exchange(process: Process, line: bytes) -> bytes:
    """The line that answers, or b"" if the process has ended."""
    assert process.stdin and process.stdout
    reply = b""
    with suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
        reply = process.stdout.readline()
    return reply if reply.endswith(b"\n") else b""
