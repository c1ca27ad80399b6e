"""Copies of the course to grade with: whatever a submission does to its copy, the next one finds the course unharmed.

A copy is a student's edition without tests, compiled, and checked before and after each submission: also for whether
somebody has written in it and put back what was there.
"""

import compileall
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

from chapters.course import Chapter
from chapters.teaching.edition import write_edition


class Copies:
    """base: a folder for them. chapters: to grade. Threads may ask side by side, each for copies of its own."""

    def __init__(self, base: Path, chapters: Iterable[Chapter]) -> None:
        self._template, self._chapters, self._lock = base / "template", list(chapters), Lock()
        self._digests: dict[Path, bytes] = {}  # of the template and of each copy, when it was new
        self._write_template()

    def restore(self, copy: Path) -> None:
        """Make this folder a copy again, if it is none."""
        if self.is_unharmed(copy):
            return
        with self._lock:
            if not self.is_unharmed(self._template):
                self._write_template()
            remove(copy)
            shutil.copytree(self._template, copy)
            self._digests[copy] = digest_of(copy)

    def is_unharmed(self, copy: Path) -> bool:
        try:
            return digest_of(copy) == self._digests.get(copy)
        except (OSError, RecursionError):  # something in it cannot be read, or is deeper than any course
            return False

    def _write_template(self) -> None:
        remove(self._template)
        write_edition(self._template, ("nanovllm", "chapters"), self._chapters)
        compileall.compile_dir(self._template, quiet=2)
        let_all_read(self._template)
        self._digests[self._template] = digest_of(self._template)


def digest_of(folder: Path) -> bytes:
    """Of the folder, all names in it and all contents, with the times when they were changed, which nobody can set."""
    found = hashlib.sha256()
    for path in (folder, *sorted(folder.rglob("*"))):
        seen = path.lstat()
        about = f"{path.relative_to(folder)}\0{seen.st_mode}\0{seen.st_ctime_ns}\0"
        found.update(about.encode("utf-8", "surrogateescape"))
        if path.is_file() and not path.is_symlink():
            found.update(path.read_bytes())
    return found.digest()


def let_all_read(folder: Path) -> None:
    """This folder and what is in it, so that a container's nobody may: whatever this user's umask is."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def remove(folder: Path) -> None:
    """And all that is in it, whatever rights it has taken away from itself, and however deep it is. Never raises."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):  # shutil.rmtree() has a deepest folder
        if os.path.lexists(folder):
            subprocess.run([*command, str(folder)], stderr=subprocess.DEVNULL)
