"""Runner: code that a student wrote, in a process of its own, with one thread and a clock.

A Run starts Python and has it call a function of ours: exercises are checked so (examine.py), policies serve a trace,
and repaired engines are tried (capstone/). The function's first argument is tell(phase, number), which says how far it
is; what it returns is the result. Each is a line of JSON behind a secret that only the two processes know. All else
that is written to stdout or stderr is what the student's code printed.

This ends what never ends, and keeps a crash from being ours. It is no wall: the code runs with its user's rights, next
to the function that judges it. Marks are for a container (INSTRUCTOR.md).

Standard library only.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any, NamedTuple, NoReturn

from chapters.submission import RETURNS, NoInput, readable

MOST_PRINTED_BYTES = 4000  # that are shown; the last ones
MOST_SAID_BYTES = 1 << 20  # in a line; what is longer is not ours
MOST_UNHEARD = 8  # lines; then the process waits
MOST_CHARACTERS = 10_000  # of a text in a line; our checks say less
FOREIGN = "something was written into the grader's own pipe"
ROOT = Path(__file__).parent.parent


class Lost(Exception):
    """The process will say nothing any more. The message says why."""


class Phase(NamedTuple):
    """What is being done; each has a clock of its own."""

    name: str
    number: int


class Run:
    """target: "module:function", called with tell() and these arguments, which are JSON."""

    def __init__(self, target: str, **arguments: Any) -> None:
        others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != str(ROOT)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *others]), "OMP_NUM_THREADS": "1"}
        env.pop("PYTHONOPTIMIZE", None)  # the engine's invariants are assertions
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "chapters.runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=env,
        )
        self._secret = secrets.token_hex(16)
        self._said = Queue[bytes](MOST_UNHEARD)
        self._printed, self._num_printed = b"", 0
        self._threads = [Thread(target=self._listen, daemon=True), Thread(target=self._take_printed, daemon=True)]
        for thread in self._threads:
            thread.start()
        assert self._process.stdin is not None  # stays open: when it closes, this process is gone, and that one ends
        orders = {"secret": self._secret, "target": target, "arguments": arguments}
        with suppress(OSError):
            self._process.stdin.write(json.dumps(orders).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, limit_s: float) -> Any:
        """A Phase that begins, or what the function has returned, its texts as readable() makes them: the student's
        code may have sent it. Raises Lost if that takes longer than this, or if the process has ended."""
        try:
            line = self._said.get(timeout=limit_s)
        except Empty:
            why = "does it wait for something, or is there a loop that never ends?"
            more = f"A machine that is slow or busy needs more time: --limit {10 * limit_s:g}"
            raise Lost(f"it was not done after {limit_s:g} s: {why} {more}") from None
        if not line:
            raise Lost(self._how_it_ended())
        secret, _, message = line.partition(b" ")
        if secret.decode("ascii", "replace") == self._secret:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                said = _readable_in(json.loads(message))
                return Phase(*said["phase"]) if "phase" in said else said["result"]
        raise Lost(FOREIGN)

    def printed(self) -> str:
        """What the code has printed, the end of it."""
        self._threads[1].join(0.2)  # what it has started may hold the pipe open for ever
        printed, num_bytes = self._printed, self._num_printed
        cut = f"... ({num_bytes:,} bytes in all)\n" if num_bytes > len(printed) else ""
        return cut + readable(printed.decode("utf-8", "replace"), 2 * MOST_PRINTED_BYTES)

    def end(self) -> None:
        """End the process and its group."""
        with suppress(OSError):  # it may have ended
            if sys.platform == "win32":
                command = ["taskkill", "/F", "/T", "/PID", str(self._process.pid)]
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        line = ours = f"{self._secret} ".encode()
        while line.startswith(ours):  # after a line that is not, nothing is believed
            line = self._process.stdout.readline(MOST_SAID_BYTES)
            self._said.put(line)

    def _take_printed(self) -> None:
        stderr: IO[bytes] | None = self._process.stderr
        assert stderr is not None
        while data := os.read(stderr.fileno(), 1 << 16):
            self._num_printed += len(data)
            self._printed = (self._printed + data)[-MOST_PRINTED_BYTES:]

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "the grader's own pipe was closed"
        if code >= 0:
            return f"the program was ended with exit code {code} before it was done; {RETURNS}"
        name, memory = signal.strsignal(-code), ""
        if sys.platform != "win32" and code == -signal.SIGKILL:
            memory = "; perhaps it needed too much memory"
        return f"the program was ended by signal {-code} ({name}) before it was done{memory}"


def _readable_in(said: Any) -> Any:
    """The same JSON with readable texts."""
    if isinstance(said, str):
        return readable(said, MOST_CHARACTERS)
    if isinstance(said, list):
        return [_readable_in(each) for each in said]
    if isinstance(said, dict):
        return {name: _readable_in(each) for name, each in said.items()}
    return said


# -- the process -------------------------------------------------------------------------------------------------------


def main() -> None:
    orders = json.loads(sys.stdin.readline())
    module, _, name = orders["target"].partition(":")
    channel, parent = os.dup(1), os.dup(0)
    os.dup2(2, 1)  # what is printed is not said
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = NoInput()
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    send = _sender(channel, orders.pop("secret"))
    target = getattr(import_module(module), name)
    send(result=target(lambda phase, number=0: send(phase=[phase, number]), **orders["arguments"]))
    sys.stderr.flush()
    os._exit(0)  # whatever threads and exit handlers the code has left


def _sender(channel: int, secret: str) -> Callable[..., None]:
    write = os.write  # the student's code may replace it

    def send(**message: Any) -> None:
        line = memoryview(f"{secret} {json.dumps(message)}\n".encode())
        while line:
            line = line[write(channel, line) :]

    return send


def _end_with(parent: int) -> NoReturn:
    """The parent writes nothing more. Its pipe is closed only when it is gone, however it went."""
    with suppress(OSError):
        while os.read(parent, 1):
            pass
    os._exit(1)


if __name__ == "__main__":
    main()
