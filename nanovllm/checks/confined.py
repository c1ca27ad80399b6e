"""Confined: questions whose answer may take minutes or gigabytes, asked of another process.

A grammar and a chat template are programs of whoever wrote them. A few characters of one can be worth minutes and
gigabytes ({"type": "integer", "multipleOf": 20000003}; {{ 'x' * 2000000000 }}), and an operation in C cannot be ended
from Python. So another process answers (confined_process.py), where the system ends what has taken too much.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import BoundedSemaphore, Timer
from typing import Any

WAIT_S = 20.0  # until a process is ended from here: a machine may be busy, or have no such limits
if sys.platform == "win32":
    KILLED = 1
else:
    KILLED = -signal.SIGKILL

Process = subprocess.Popen[bytes]


class TooMuch(ValueError):
    """The answer took more than it may."""


class Confined:
    """Answers of one script, which is named by its path and has a function `answer`. Threads may ask side by side.

    seconds   of a processor that one answer may take
    max_mb    memory above what the process has at rest (on macOS, which bounds none, the seconds have to do; on
              Windows, which bounds neither, WAIT_S)
    lanes     processes, at most: each answers one question at a time
    niceness  of an answer: 5 lets those who are being answered already come first
    """

    def __init__(self, script: Path, *, seconds: float, max_mb: int, lanes: int = 1, niceness: int = 0) -> None:
        self.script, self.seconds, self.max_mb, self.lanes, self.niceness = script, seconds, max_mb, lanes, niceness
        self.forget()
        if hasattr(os, "register_at_fork"):  # not in a browser, where nothing is asked either
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """In a process that was forked from one with questions of its own."""
        self._free = BoundedSemaphore(self.lanes)
        self.idle: list[Process] = []

    def ask(self, *question: Any) -> Any:
        """script.answer(*question); what travels is JSON. Raises TooMuch, or ValueError with its exception's text."""
        try:
            line = json.dumps(question).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"only what JSON can hold is taken: {error}") from None
        with self._free:
            process = self.idle.pop() if self.idle else self._start()
            if process.poll() is not None:
                process = self._start()
            timer = Timer(WAIT_S, _kill, [process])
            timer.start()
            answer = b""
            try:
                answer = _answer(process, line)
            finally:  # whatever interrupts this leaves no answer behind for the next question
                timer.cancel()
                if answer:
                    self.idle.append(process)
                else:
                    end(process)
        if not answer and process.returncode != KILLED:  # its own error is on stderr
            raise RuntimeError(f"the process of {self.script.name} has ended by itself: {process.returncode}")
        if not answer or (found := json.loads(answer)) is None:
            raise TooMuch(f"takes more than {self.seconds:g} s of a processor or {self.max_mb} MB")
        result, problem = found
        if problem:
            raise ValueError(problem)
        return result

    def start(self) -> None:
        """Begin now, so that the first question does not wait for the process."""
        with self._free:
            if not self.idle:
                self.idle.append(self._start())

    def _start(self) -> Process:
        limits = self.seconds, self.max_mb << 20, self.niceness
        program = Path(__file__).with_name("confined_process.py")
        command = [sys.executable, str(program), str(self.script), json.dumps(limits)]
        # It finds the same packages as this process does. Ctrl-C is for this process only.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, env=env, start_new_session=True, **pipes)  # type: ignore[call-overload]


def _answer(process: Process, question: bytes) -> bytes:
    """A whole line, or b"" if the process has ended."""
    assert process.stdin and process.stdout
    answer = b""
    with suppress(BrokenPipeError):
        process.stdin.write(question)
        process.stdin.flush()
        answer = process.stdout.readline()
    return answer if answer.endswith(b"\n") else b""


def _kill(process: Process) -> None:
    """It, and the child that it may have."""
    with suppress(ProcessLookupError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def end(process: Process) -> None:
    with suppress(subprocess.TimeoutExpired):  # has it ended by itself? Its exit code says why
        process.wait(0.1)
    _kill(process)
    process.communicate()
