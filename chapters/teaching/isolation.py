"""Where a submission runs while a class is graded: in a container, or as a process of the teacher's.

Either way it is `python -m chapters check --json` with a copy of the course, and what counts is the one line that it
prints, with the exit code that belongs to it.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from site import getuserbase
from threading import Thread
from typing import IO, Any

from chapters.teaching.course_copy import let_all_read
from nanovllm.files.hub import resolve_checkpoint

ENGINES = ("docker", "podman")
MEMORY_GB = 6  # of a submission: Python, PyTorch, and the engine with the demo model take less than one and a half
# In blocks of 512 bytes and in KiB: no core files, files of at most 256 MiB, so much memory of its own.
LIMITS = f"ulimit -c 0; ulimit -f {256 << 11}; ulimit -d {MEMORY_GB << 20} 2>/dev/null; "
WARNING = (
    "Without --container a submission runs with your rights: it can read your files, use the network, and leave "
    "processes and files behind. What was handed in by strangers belongs in a container (chapters/INSTRUCTOR.md)."
)
MOST_BYTES = 1 << 20  # of each of its streams that are kept, the last ones; a verdict is shorter
CLOSING_S = 10.0  # what it has started may hold its streams open for ever
REFUSED = "the checks could not be run"  # which may be the machine's fault
# Exit codes, without a verdict, of a Python that has no course and of a docker that starts no container. A submission's
# own exit code is another process's: a verdict tells it.
NOT_BEGUN = (1, 125, 126, 127)


class NoRecord(Exception):
    """A submission has come to no verdict. The message says what was seen of it."""


@dataclass
class Process:
    """Of this user, without the environment's variables. Limits are the shell's."""

    def readable(self, model: str, base: Path) -> str:
        """Where it lies on this machine. A hub's model is downloaded here: each submission has a home of its own, and
        would download it anew. Raises FileNotFoundError."""
        return str(resolve_checkpoint(model))

    def command(self, name: str, course: Path, work: Path, check: list[str], model: str | None) -> list[str]:
        python = [sys.executable, "-m", "chapters", *check, "--file", str(work / "exercise.py")]
        return ["sh", "-c", f'{LIMITS} exec "$@"', "sh", *python, *(["--model", model] if model else ["--no-model"])]

    def environment(self, work: Path) -> dict[str, str]:
        here = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(work))
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
        return kept | here | {"PYTHONUSERBASE": getuserbase(), "PYTHONDONTWRITEBYTECODE": "1"}

    def stop(self, name: str) -> None:
        """Of a command that was killed, nothing is left but what it has hidden."""


@dataclass
class Container:
    """Without a network, with a file system that is read-only but for /tmp, as nobody."""

    engine: str
    image: str

    @classmethod
    def of(cls, image: str) -> "Container":
        """Raises ValueError if no engine answers, or if it has no such image."""
        for engine in filter(shutil.which, ENGINES):
            if subprocess.run([engine, "info"], capture_output=True).returncode == 0:
                if subprocess.run([engine, "image", "inspect", image], capture_output=True).returncode != 0:
                    raise ValueError(f"{engine} has no image {image}; see chapters/teaching/Dockerfile")
                return cls(engine, image)
        found = [engine for engine in ENGINES if shutil.which(engine)]
        why = f"{' and '.join(found)} is here, but does not answer" if found else "neither is here"
        raise ValueError(f"--container needs docker or podman: {why}")

    def readable(self, model: str, base: Path) -> str:
        """A copy that the container's nobody can read: files of a cache may be their owner's alone, or links."""
        if not Path(model).is_dir():
            raise ValueError(f"--container has no network: --model must be a folder, found {model}")
        copy = base / "model"
        shutil.copytree(model, copy)
        let_all_read(copy)
        return str(copy)

    def command(self, name: str, course: Path, work: Path, check: list[str], model: str | None) -> list[str]:
        mounts = {course: "/course", work: "/submission"} | ({Path(model): "/model"} if model else {})
        options = ["--rm", "--name", name, "--network", "none", "--read-only", "--tmpfs", "/tmp:exec,size=1g"]
        options += ["--memory", f"{MEMORY_GB}g", "--pids-limit", "256", "--user", "65534:65534"]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--workdir", "/course"]
        for path, there in mounts.items():
            options += ["--volume", f"{path}:{there}:ro"]
        for variable in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
            options += ["--env", f"{variable}=/tmp"]
        python = ["python", "-m", "chapters", *check, "--file", "/submission/exercise.py"]
        python += ["--model", "/model"] if model else ["--no-model"]
        return [self.engine, "run", *options, self.image, *python]

    def environment(self, work: Path) -> dict[str, str]:
        return dict(os.environ)  # of the engine's client; the container gets nothing of it

    def stop(self, name: str) -> None:
        subprocess.run([self.engine, "rm", "--force", name], capture_output=True)


class Running:
    """The submissions that are being checked, so that they can be ended."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()

    def record(
        self, place: Process | Container, course: Path, work: Path, check: list[str], model: str | None, limit_s: float
    ) -> dict[str, Any]:
        """What `check --json` says of work/exercise.py (report.record). Raises NoRecord."""
        name = f"nanovllm-{secrets.token_hex(8)}"
        process = subprocess.Popen(
            place.command(name, course, work, check, model),
            cwd=course,
            env=place.environment(work),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.add(process)
        streams = [(process.stdout, bytearray()), (process.stderr, bytearray())]
        threads = [Thread(target=_keep_end, args=stream, daemon=True) for stream in streams]
        for thread in threads:
            thread.start()
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise NoRecord(f"it was not done after {limit_s:g} s") from None
        finally:
            _kill(process)
            place.stop(name)
            self._processes.discard(process)
        for thread in threads:
            thread.join(CLOSING_S)
        out, err = (bytes(kept).decode("utf-8", "replace") for _, kept in streams)
        lines = out.splitlines()
        if process.returncode in (0, 1) and len(lines) == 1:  # check has come to its end, and nobody wrote beside it
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                found = dict(json.loads(lines[0]))
                if found["passed"] == (process.returncode == 0):
                    return found
        what = f"its process has ended with code {process.returncode}, and {len(lines)} lines in the place of a verdict"
        has_not_begun = process.returncode == 2 or (process.returncode in NOT_BEGUN and not lines)
        raise NoRecord(f"{REFUSED if has_not_begun else what}: {err.strip()[-500:]}")

    def end(self) -> None:
        for process in [*self._processes]:
            _kill(process)


def _keep_end(stream: IO[bytes], kept: bytearray) -> None:
    with stream:
        while data := os.read(stream.fileno(), 1 << 16):
            kept += data
            del kept[:-MOST_BYTES]


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """And its group."""
    if sys.platform != "win32":  # where a class is not graded (grade.py)
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
