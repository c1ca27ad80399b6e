"""A bound on what a grammar may cost.

llguidance compiles in one call, which nothing can end, and a few characters can be worth minutes and gigabytes:
{"type": "integer", "multipleOf": 20000003}. So a grammar is first tried in another process (process.py), where the
system ends what has taken too much. What passes costs as much again in this process, and not more.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any

SECONDS, MAX_MB = 2.0, 32  # of a processor; above what the process has at rest
WAIT_S = 20.0  # until the process is ended from here: a machine may be busy, or have no such limits
# llguidance's own, for this process, too: an ordinary grammar needs a tenth.
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 500_000, "step_max_items": 10_000, "max_lexer_states": 50_000}


class Trial:
    """One other process, started at the first grammar. It tries one at a time; threads wait for their turn."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a process that was forked from one with questions of its own."""
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def convert(self, text: str) -> str:
        """A grammar in Lark's or in GBNF notation, in Lark's. Raises ValueError."""
        return self._ask("convert", text)

    def compile(self, source: str) -> None:
        """Raises ValueError for a grammar that is broken or takes too much."""
        self._ask("compile", source)

    def _ask(self, kind: str, text: str) -> str:
        with self._lock:
            process, self._process = self._process, None
            if process is None or process.poll() is not None:
                process = _start()
            timer = Timer(WAIT_S, _kill, [process])
            timer.start()
            try:
                answer = _answer(process, json.dumps([kind, text]))
                if answer:
                    self._process = process
            finally:
                timer.cancel()
                if self._process is None:
                    _end(process)
        if not answer or (found := json.loads(answer)) is None:
            raise ValueError(
                f"a grammar may take {SECONDS:g} s of a processor and {MAX_MB} MB to compile, and this one takes more "
                f"({len(text)} characters): use smaller numbers (multipleOf, lengths, repetitions) or fewer parts"
            )
        result, error = found
        if error:
            raise ValueError(error)
        return result


trial = Trial()
os.register_at_fork(after_in_child=trial.forget)


def _start() -> "subprocess.Popen[bytes]":
    command = [sys.executable, str(Path(__file__).with_name("process.py")), str(SECONDS), str(MAX_MB << 20)]
    # It finds the same llguidance as this process does. Ctrl-C is for this process only.
    process = subprocess.Popen(
        [*command, json.dumps(LIMITS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    if process.stdout.readline() != b"ready\n":  # type: ignore[union-attr]
        _end(process)
        raise RuntimeError(f"the process that tries grammars does not start: {' '.join(command)}")
    return process


def _answer(process: "subprocess.Popen[bytes]", question: str) -> bytes:
    """A line, or b"" if the process has ended."""
    try:
        process.stdin.write(question.encode() + b"\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        return process.stdout.readline()  # type: ignore[union-attr]
    except BrokenPipeError:
        return b""


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """It, and the child that it may have."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: "subprocess.Popen[bytes]") -> None:
    _kill(process)
    process.communicate()
