"""Programs, and engines with ranks, of which nothing is left when a test ends, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from nanovllm import LLM

LIMIT_S = 600  # for what hangs; no machine is so busy that a test needs as long


def wait_for(condition: Callable[[], object]) -> None:
    """Until it has come true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Processes:
    def __init__(self, ends: ExitStack) -> None:
        self._ends = ends

    def start(self, *command: str, **options: Any) -> subprocess.Popen:
        """Start Python with these arguments, in a session of its own, which is killed when the test ends."""
        pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen([sys.executable, *command], start_new_session=True, **pipes | options)
        self._ends.callback(_kill, process)
        return process

    def run(self, *command: str, stdin: str = "", **options: Any) -> tuple[int, str, str]:
        """The same, to its end. Returns the exit code, and what was written to stdout and to stderr."""
        process = self.start(*command, stdin=subprocess.PIPE, **options)
        out, err = process.communicate(stdin, timeout=LIMIT_S)
        return process.returncode, out, err

    def llm(self, model: os.PathLike, size: int, **options: Any) -> LLM:
        """An engine of `size` ranks, which are killed when the test ends."""
        llm = LLM(str(model), tensor_parallel_size=size, **options)
        self._ends.callback(llm.engine.model_runner._end)
        return llm


def _kill(process: subprocess.Popen) -> None:
    with process, suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
