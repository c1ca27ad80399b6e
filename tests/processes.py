"""Programs, and engines with ranks, of which nothing is left when a test ends, however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from nanovllm import LLM

LIMIT_S = 600  # for what hangs; no machine is so busy that a test needs as long


# Programs one after another, each in a fork of a Python that has imported what takes long, and nothing of nanovllm. The
# last one, which may be the only one, needs no fork.
FORKS = """
import json, os, sys
first, *programs = json.load(sys.stdin)
exec(first)
import torch, safetensors.torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast
while programs:
    folder, program, *arguments = programs.pop(0)
    print("\\f", flush=True)
    if not programs or (child := os.fork()) == 0:
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.argv = ["", *arguments]
        exec(program, {})
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
"""


def run_programs(*programs: tuple[Path | str, ...], first: str = "") -> list[str]:
    """What each (folder, program, *arguments) prints that is run in this folder, from which it imports.

    On Linux they share the time that importing torch and transformers takes. first: a program that runs before that.
    """
    if sys.platform != "linux" and len(programs) > 1:
        return [run_programs(program, first=first)[0] for program in programs]
    given = json.dumps([first, *([str(folder), *rest] for folder, *rest in programs)])
    command = [sys.executable, "-c", FORKS]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split("\f\n")[1:]


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
