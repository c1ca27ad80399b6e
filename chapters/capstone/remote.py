"""Remote: a policy in a process of its own (policy_process.py), asked over a pipe, once a step.

Its answers are lines of JSON that anybody may have written: nothing of them is believed here beyond their form.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any

from chapters.capstone.views import Setup
from chapters.submission import readable

MOST_ANSWER_BYTES = 1 << 20
MOST_PRINTED = 4000  # characters that are shown of what a policy prints; the last ones
PR_SET_DUMPABLE = 4


class Refused(Exception):
    """The policy did what no policy does. The message says what was found."""


class Remote:
    """limit_s: of wall time, for all its answers together and for what this process does between them."""

    def __init__(self, source: str, name: str, setup: Setup, limit_s: float) -> None:
        self.limit_s, self.is_late = limit_s, False
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (close() does)
        folder = Path(__file__).resolve().parent
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(folder / "policy_process.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            start_new_session=True,
            cwd=tempfile.gettempdir(),
            env={"SYSTEMROOT": os.environ["SYSTEMROOT"]} if sys.platform == "win32" else {},
        )
        self._timer = Timer(limit_s, self._end_late)
        self._timer.daemon = True
        self._timer.start()
        orders = {"name": Path(name).name, "source": source, "setup": setup, "seconds": int(limit_s) + 1}
        self.answer(orders)

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Raises Refused."""
        assert self.process.stdin and self.process.stdout
        line = b""
        with suppress(OSError):  # it has ended
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline(MOST_ANSWER_BYTES)
        if not line.endswith(b"\n"):
            raise Refused(self._why_nothing(len(line)))
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Refused(f"its answer is no JSON: {readable(error, 200)}") from None
        if not isinstance(found, dict):
            raise Refused("something was written into the pipe that its answers go through")
        if "refused" in found:
            raise Refused(
                f"{readable(found['refused'], 400)}. A policy decides by what it is given, and touches nothing else"
            )
        if "problem" in found:
            raise Refused(readable(found["problem"]))
        return found

    def _why_nothing(self, num_bytes: int) -> str:
        if self.is_late:
            return f"it was not done after {self.limit_s:g} s: is there a loop that never ends?"
        if num_bytes >= MOST_ANSWER_BYTES:
            return f"one answer has more than {MOST_ANSWER_BYTES:,} bytes"
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(2)
            cause = f"exit code {code}" if code >= 0 else f"signal {-code}, perhaps for too much time or memory"
            return f"its process has ended, with {cause}"
        return "its process has closed the pipe that its answers go through"

    def _end_late(self) -> None:
        self.is_late = True
        self._kill()

    def _kill(self) -> None:
        with suppress(OSError):
            if sys.platform == "win32":
                self.process.kill()
            else:
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> str:
        """End it. Returns what it has printed."""
        self._timer.cancel()
        self._kill()
        for pipe in filter(None, (self.process.stdin, self.process.stdout)):
            with suppress(OSError):  # what has not been read any more
                pipe.close()
        self.process.wait()
        with self._printed as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * MOST_PRINTED))
            return readable(file.read().decode("utf-8", "replace")[-MOST_PRINTED:], MOST_PRINTED)


@contextmanager
def closed_to_others() -> Iterator[None]:
    """On Linux no other process of the same user may read this one's memory for a while (root still may)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        if prctl is not None:
            prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
