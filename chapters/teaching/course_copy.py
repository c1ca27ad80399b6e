"""Copies of the course to grade with: whatever a submission does to its copy, the next one finds the course unharmed.

A copy is a student's edition without tests, compiled, and checked before and after each submission.
"""

import compileall
import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

from chapters.course import Chapter
from chapters.teaching.edition import write_edition


class Copies:
    """base: a folder for them. chapters: to grade. Threads may ask side by side, each for copies of its own."""

    def __init__(self, base: Path, chapters: Iterable[Chapter]) -> None:
        self._template, self._chapters, self._lock = base / "template", list(chapters), Lock()
        self._write_template()
        self._digest = digest_of(self._template)

    def restore(self, copy: Path) -> None:
        """Make this folder a copy again, if it is none."""
        if self.is_unharmed(copy):
            return
        with self._lock:
            if digest_of(self._template) != self._digest:
                self._write_template()
                self._digest = digest_of(self._template)
            remove(copy)
            shutil.copytree(self._template, copy)

    def is_unharmed(self, copy: Path) -> bool:
        return digest_of(copy) == self._digest

    def _write_template(self) -> None:
        remove(self._template)
        write_edition(self._template, ("nanovllm", "chapters"), self._chapters)
        compileall.compile_dir(self._template, quiet=2)


def digest_of(folder: Path) -> bytes:
    """Of all names in it and of all contents; of what cannot be read, the name."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode}\0".encode("utf-8", "surrogateescape"))
        if path.is_file() and not path.is_symlink():
            found.update(path.read_bytes())
    return found.digest()


def remove(folder: Path) -> None:
    """And all that is in it, whatever rights it has taken away from itself."""

    def give_rights(*_: object) -> None:
        for path in (folder, *folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)

    if folder.exists():
        shutil.rmtree(folder, onerror=give_rights)
