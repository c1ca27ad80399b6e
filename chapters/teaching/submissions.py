"""Submissions: whose is which file, in a folder as a class or a learning platform hands it over.

    ada/exercise.py                                                 the student ada; --chapters says of which chapter
    ada/ch04/exercise.py, ada/ch04_paged_attention/exercise.py      chapter 4; so does a whole copy of the course
    ada_ch04.py, ada-ch04.py                                        chapter 4
    Ada Lovelace_12345_assignsubmission_file_/exercise.py           Moodle: Ada Lovelace
    lovelaceada_123_456_exercise.py, lovelaceada_LATE_123_456_...   Canvas: lovelaceada
    ada/ch04/ch04.ipynb, ada_ch04.ipynb                             a notebook: the cells that are exercise.py

An archive, or a notebook without such cells, is the student that its name says, with nothing to grade. Other files are
left alone. Of students of one name, the platform's number is a part of the name: Ada Lovelace (12345). A number in
parentheses after the chapter is a browser's, and says nothing: ada_ch04 (1).py.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from chapters.course import EXERCISES
from chapters.exercise_cells import MARK, code_in, exercise_of
from chapters.submission import readable

MOST_BYTES = 1 << 20
MOST_BYTES_OF_NOTEBOOKS = 1 << 24  # which have pictures, too
HANDED_IN = {".py", ".ipynb", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"}
MOODLE = re.compile(r"^(.+?)_(\d+)_assignsubmission_.+$")  # and the student's number
CANVAS = re.compile(r"^([^_]+)(?:_LATE)?_(\d+)_\d+_.+$")
CHAPTER = re.compile(r"(?:^|[_\- ])ch(\d\d)(?![^\W_])", re.IGNORECASE)
COPY = re.compile(r"(?<=ch\d\d) ?\(\d+\)$", re.IGNORECASE)  # a browser's, of a name that is there already
UNREAD = f"it is neither a .py file nor a notebook with cells that begin with {MARK}"


@dataclass(frozen=True)
class Submission:
    """problem: why there is nothing to grade."""

    student: str
    chapter: int
    file: str  # in the folder of the class
    source: bytes = b""
    problem: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source + self.problem.encode()).hexdigest()[:16]


def find_submissions(folder: Path, chapters: list[int]) -> list[Submission]:
    """In order of students. chapters: which ones (none named: all). A student's folder without a file, and a file that
    cannot be read, is a submission for each of them with nothing to grade.

    Raises ValueError if the folder is none, or if a file does not say of which chapter it is.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found, nothing_in = list[Submission](), list[Path]()
    for entry in sorted(filter(_is_handed_in, folder.iterdir())):
        files = list(_files(entry))
        found += [_submission(folder, file, _student_of(entry), chapters) for file in files]
        nothing_in += [] if files else [entry]
    there = sorted({each.chapter for each in found})
    found = [each for each in found if not chapters or each.chapter in chapters]
    if there and not found:
        raise ValueError(f"{folder} has no submissions of these chapters; it has some of {', '.join(map(str, there))}")
    if not found:
        raise ValueError(f"{folder} has no submissions: neither folders of students nor .py files nor notebooks")
    handed_in = sorted({each.chapter for each in found} & EXERCISES.keys())
    for entry in nothing_in:
        problem = "there is no exercise.py" if entry.is_dir() else UNREAD
        for number in [int(match[1]) for match in CHAPTER.finditer(entry.name)] or handed_in:
            if not chapters or number in chapters:
                found.append(Submission(_student_of(entry), number, readable(entry.name), problem=problem))
    return sorted(_told_apart(found), key=lambda each: each.file)


def others_in(folder: Path) -> list[str]:
    """Names of what is beside the submissions."""
    return [readable(entry.name) for entry in sorted(folder.iterdir()) if not _is_handed_in(entry)]


def _is_handed_in(entry: Path) -> bool:
    return not entry.name.startswith((".", "__")) and (entry.is_dir() or _suffix(entry) in HANDED_IN)


def _told_apart(found: list[Submission]) -> list[Submission]:
    """Where the platform gives different numbers to students of one name, the number is a part of it.

    In one chapter: Moodle numbers the students of each assignment anew.
    """
    numbers: dict[tuple[str, int], set[str]] = {}
    for each in found:
        numbers.setdefault((each.student, each.chapter), set()).add(_number_of(each))
    told_apart = []
    for each in found:
        number = _number_of(each)
        is_one_of_several = number and len(numbers[each.student, each.chapter]) > 1
        told_apart.append(replace(each, student=f"{each.student} ({number})") if is_one_of_several else each)
    return told_apart


def _number_of(submission: Submission) -> str:
    """What the platform calls the student; empty if it is no platform's file."""
    name = submission.file.partition("/")[0]
    match = MOODLE.match(name) or CANVAS.match(name)
    return match[2] if match else ""


def _files(entry: Path) -> Iterator[Path]:
    """A student's notebooks or exercise.py, of one chapter or of several; else the only .py file that there is.

    Notebooks come first, because a copy of the course, with its skeletons, may lie beside them.
    """
    inside = sorted(entry.rglob("*")) if entry.is_dir() else [entry]
    inside = [path for path in inside if not _is_hidden(path.relative_to(entry))]
    if notebooks := [path for path in inside if _suffix(path) == ".ipynb" and _has_exercise(path)]:
        yield from notebooks
        return
    files = [path for path in inside if _suffix(path) == ".py"]
    exercises = [path for path in files if path.name.lower() == "exercise.py"]
    yield from exercises or (files if len(files) == 1 else [])


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _has_exercise(notebook: Path) -> bool:
    try:
        return notebook.stat().st_size > MOST_BYTES_OF_NOTEBOOKS or bool(_exercise(notebook.read_bytes()))
    except (OSError, ValueError):
        return False


def _exercise(notebook: bytes) -> str:
    """exercise.py, as the cells of a notebook; empty if it has none. Raises ValueError if it is no notebook."""
    try:
        return exercise_of(code_in(json.loads(notebook)))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("it is not a notebook") from error


def _student_of(entry: Path) -> str:
    name = Path(entry.name)
    while not entry.is_dir() and _suffix(name) in HANDED_IN:  # .tar.gz
        name = name.with_suffix("")
    return student_of(name.name)


def student_of(name: str) -> str:
    for pattern in (MOODLE, CANVAS):
        if match := pattern.match(name):
            return readable(match[1])
    return readable(CHAPTER.sub("", COPY.sub("", name)).strip("_- ") or name)


def _submission(folder: Path, file: Path, student: str, chapters: list[int]) -> Submission:
    name = file.relative_to(folder)
    said = [int(match[1]) for part in reversed(name.with_suffix("").parts) for match in CHAPTER.finditer(part)]
    if not said and len(chapters) != 1:
        raise ValueError(f"of which chapter is {readable(name)}? Name one with --chapters")
    chapter, problem, source = (said or chapters)[0], "", b""
    most_bytes = MOST_BYTES_OF_NOTEBOOKS if _suffix(file) == ".ipynb" else MOST_BYTES
    if chapter not in EXERCISES:
        problem = f"there is no chapter {chapter}"
    elif file.is_symlink() or not file.is_file():
        problem = "it is not a file"
    elif file.stat().st_size > most_bytes:
        problem = f"it has {file.stat().st_size:,} bytes; {most_bytes:,} are read"
    else:
        try:
            source = file.read_bytes()
            if _suffix(file) == ".ipynb":
                source = _exercise(source).encode("utf-8", "replace")
        except OSError as error:
            problem = f"it cannot be read: {error.strerror}"
        if len(source) > MOST_BYTES:
            problem, source = f"its cells have {len(source):,} bytes; {MOST_BYTES:,} are read", b""
    return Submission(student, chapter, readable(name.as_posix()), source, problem)
