"""A sandbox: another process answers what may take minutes or gigabytes.

A chat template, a grammar and a regular expression are programs by whoever wrote them. A few characters can cost
minutes and gigabytes ({{ 'x' * 2000000000 }}; {"type": "integer", "multipleOf": 20000003}), and Python cannot end an
operation in C. The system can end a process: sandbox_process.py asks it to.
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

WAIT_S = 20.0  # until a process is killed from here: a machine may be busy, or Windows, which has no such limits

if sys.platform == "win32":
    KILLED = 1
else:
    KILLED = -signal.SIGKILL

Process = subprocess.Popen[bytes]


class TooMuch(ValueError):
    """The answer took more than it may."""


class Sandbox:
    """Answers of one script, which is run in a process of its own and has a function `answer`. Any thread may ask.

    seconds   CPU time of one answer
    max_mb    memory above what the process has at rest (macOS does not enforce it: there only the seconds count;
              Windows enforces neither: there it is WAIT_S)
    lanes     the most processes; each answers one question at a time
    niceness  5 lets the computing of other answers go first
    """

    def __init__(self, script: Path, *, seconds: float, max_mb: int, lanes: int = 1, niceness: int = 0) -> None:
        self.script = script
        self.seconds = seconds
        self.max_mb = max_mb
        self.lanes = lanes
        self.niceness = niceness
        self._forget_processes()
        if hasattr(os, "register_at_fork"):  # not in a browser or on Windows
            os.register_at_fork(after_in_child=self._forget_processes)  # they are the parent's

    def _forget_processes(self) -> None:
        self._free = BoundedSemaphore(self.lanes)
        self.idle: list[Process] = []

    def start(self) -> None:
        """Begin now, so that the first question does not wait for the process to start."""
        with self._free:
            if not self.idle:
                self.idle.append(self._start())

    def ask(self, *question: Any) -> Any:
        """script.answer(*question), sent as JSON. Raises TooMuch, or ValueError with the text of its exception."""
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
            reply = b""
            try:
                reply = _exchange(process, line)
            finally:  # after an exception such as Ctrl-C, no answer is left for the next question to read
                timer.cancel()
                if reply:
                    self.idle.append(process)
                else:
                    end(process)
        if not reply and process.returncode != KILLED:  # what went wrong is on stderr
            raise RuntimeError(f"the process of {self.script.name} has ended by itself: {process.returncode}")
        if not reply or (answer := json.loads(reply)) is None:
            raise TooMuch(f"takes more than {self.seconds:g} s of a processor or {self.max_mb} MB")
        result, problem = answer
        if problem:
            raise ValueError(problem)
        return result

    def _start(self) -> Process:
        program = Path(__file__).with_name("sandbox_process.py")
        limits = [str(self.seconds), str(self.max_mb << 20), str(self.niceness)]
        # It finds the same packages as this process does. A session of its own: Ctrl-C does not reach it.
        return subprocess.Popen(
            [sys.executable, str(program), str(self.script), *limits],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )


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
