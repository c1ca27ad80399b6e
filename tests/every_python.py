"""Every Python of this machine, on PATH or in pyenv, runs without_torch.py: python tests/every_python.py

Each in a new environment with what that needs. Prints what became of each; one that does not run, or for which there
are no packages, is skipped. Exit code: 1 if one of them failed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPT = Path(__file__).with_name("without_torch.py")
PACKAGES = ("xxhash>=3.0", "rich>=13.0", "tomli>=2.0; python_version < '3.11'")
MINORS = range(10, 20)  # of Python 3


def main() -> int:
    with ThreadPoolExecutor() as side_by_side:
        outcomes = [outcome for of_minor in side_by_side.map(try_minor, MINORS) for outcome in of_minor]
    return int(any(outcome.startswith("failed") for outcome in outcomes))


def try_minor(minor: int) -> list[str]:
    """What became of each Python of this minor version, up to the first that is not skipped."""
    outcomes = []
    for python in pythons(minor):
        version, outcome = try_out(python)
        print(f"Python {version} ({python}): {outcome}", flush=True)
        outcomes.append(outcome)
        if not outcome.startswith("skipped"):
            break
    return outcomes


def pythons(minor: int) -> list[str]:
    """Those that may be Python 3.`minor`; a shim of pyenv is there whether the version is chosen or not."""
    root = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"))
    in_pyenv = sorted(root.glob(f"versions/3.{minor}.*/bin/python"), reverse=True)
    return [*filter(None, [shutil.which(f"python3.{minor}")]), *map(str, in_pyenv)]


def try_out(python: str) -> tuple[str, str]:
    """Its version, and "passed", "skipped: ..." or "failed: ..."."""
    code, version = call(python, "-c", "import platform; print(platform.python_version())")
    if code:
        return "?", "skipped: it does not run"
    with tempfile.TemporaryDirectory() as folder:
        code, said = call(python, "-m", "venv", folder)
        if code:
            return version, f"skipped: it makes no environment ({said})"
        own = str(Path(folder, "bin", "python"))
        code, said = call(own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES)
        if code:
            return version, f"skipped: no {', '.join(PACKAGES)} for it ({said})"
        code, said = call(own, str(SCRIPT), last_line=False)
    return version, f"failed: {said}" if code else "passed"


def call(*command: str, last_line: bool = True, timeout_s: float = 300) -> tuple[int, str]:
    """Exit code, and what was said last, or all of it."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        result = subprocess.run(command, text=True, timeout=timeout_s, **piped)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    said = result.stdout.strip()
    return result.returncode, said.splitlines()[-1] if said and last_line else said


if __name__ == "__main__":
    sys.exit(main())
