"""Marks: one row for each student of a class, for the gradebook of a learning platform.

The roster is what Moodle or Canvas exports of a class, or any table with a line for each student. The marks are that
table, with a column in percent for each chapter: the platform finds its own columns again. Whoever has handed in
nothing has 0; of several files for a chapter, the best counts.
"""

import csv
import io
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chapters.course import TITLES
from chapters.submission import readable
from chapters.teaching.submissions import Submission

POINTS = "points possible"  # Canvas has a second line that says how many points there are
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes a text that begins so
MOST_CHARACTERS = 32_000  # of a cell; a spreadsheet takes no more
FIRST = ("first name", "firstname", "given name", "vorname")
LAST = ("surname", "last name", "lastname", "family name", "nachname")
# Columns whose numbers are students'. In others a number may be a mark.
OF_STUDENTS = re.compile(r"\bid\b|ident|n[uú]m|^n[or]\b|name|login|user|matr|student|kennung|code|学号|學號|番号|학번")
NUMBER = re.compile(r"\d+")
SEPARATOR = re.compile(r"sep=(.)[\r\n]")  # Excel's first line, for itself
ACCENTS = re.compile("[\u0300-\u036f]")  # of Latin, Greek and Cyrillic; the marks of other scripts are vowels


class Roster:
    """columns, lines: the cells as they are in the file; delimiter: what is between them. Raises ValueError for what is
    no such table."""

    def __init__(self, path: Path) -> None:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text: export it as CSV in UTF-8") from None
        separator = SEPARATOR.match(text)
        first_line = io.StringIO(text, newline="").readline()
        self.delimiter = separator[1] if separator else max(",;\t", key=first_line.count)
        table = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter, strict=True)
        try:
            if separator:
                next(table)
            rows = [(table.line_num, row) for row in table if row]
        except csv.Error as error:
            raise ValueError(f"{path}, line {table.line_num}: {error}") from None
        if len(rows) < 2:
            raise ValueError(f"{path} has no lines; a roster has a line of names of columns, and one for each student")
        (_, self.columns), *rows = rows
        width = len(self.columns)
        for number, row in rows:
            if any(row[width:]):
                raise ValueError(f"{path}, line {number}: it has more cells than there are columns, {width}")
        self.lines = [(row + [""] * width)[:width] for _, row in rows]
        self._line_numbers = [number for number, _ in rows]  # in the file
        self._lines_of: dict[str, set[int]] = {}
        self._lines_without_accents: dict[str, set[int]] = {}
        for number, line in enumerate(self.lines):
            for name in names_of(zip(self.columns, line, strict=True)):
                self._lines_of.setdefault(letters(name), set()).add(number)
                self._lines_without_accents.setdefault(without_accents(name), set()).add(number)

    def line_of(self, student: str) -> int | None:
        """The line of this student, by whatever the line says: a name, an address, a number. None if there is none.
        Lines with the same accents come first.

        Raises ValueError if there are several.
        """
        found = self._lines_of.get(letters(student)) or self._lines_without_accents.get(without_accents(student), set())
        if len(found) > 1:
            lines = " and ".join(str(self._line_numbers[number]) for number in sorted(found))
            what = "name what was handed in after a login, an address or a number of one of them"
            raise ValueError(f"the roster has {student} in lines {lines}: {what}")
        return next(iter(found), None)

    def check(self, submissions: Iterable[Submission]) -> None:
        """Raises ValueError if marks of these have no place: whose they are is not clear, or a column is taken."""
        for each in submissions:
            self.line_of(each.student)
            if each.chapter in TITLES and (heading := heading_of(each.chapter)) in self.columns:
                raise ValueError(f"the roster has a column {heading} already: remove or rename it")


def names_of(line: Iterable[tuple[str, str]]) -> set[str]:
    """What a submission's folder may call the student of this line: (column, cell) and so on."""
    cells = [(column.strip().casefold(), cell.strip()) for column, cell in line]
    if any(cell.casefold() == POINTS for _, cell in cells):
        return set()
    first, last = (next((cell for column, cell in cells if column in names and cell), "") for names in (FIRST, LAST))
    names = {f"{first} {last}", f"{last} {first}"}  # Moodle's folders, and Canvas's: lovelaceada
    of_students = {cell for column, cell in cells if OF_STUDENTS.search(column)}
    names |= of_students | {cell for _, cell in cells if not letters(cell).isdigit()}
    for _, cell in cells:
        if "@" in cell:
            names.add(cell.partition("@")[0])
        if re.fullmatch(r"[^,@]+, [^,@]+", cell):  # Canvas: Lovelace, Ada
            names.add(" ".join(reversed(cell.split(", "))))
    numbers = {number for cell in of_students for number in NUMBER.findall(cell)}
    names |= {f"{name} {number}" for name in names for number in numbers}  # of several with this name (submissions.py)
    return {name for name in names if letters(name)}


def letters(name: str) -> str:
    """Without case, blanks and signs."""
    plain = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in plain if c.isalnum() or unicodedata.category(c).startswith("M"))


def without_accents(name: str) -> str:
    return ACCENTS.sub("", letters(name))


def write_marks(path: Path, roster: Roster | None, rows: Iterable[dict[str, str]]) -> list[str]:
    """rows: of the table (table.py). Returns sentences about students who are not on the roster, and so not in the
    file, and about those with several files for a chapter, of which the best counts.

    Without a roster, those who have handed in something are the class.
    """
    percents: dict[str | int, dict[int, list[str]]] = {}  # of a line of the roster, or of who is on none: of all files
    names: dict[str | int, str] = {}
    for row in rows:
        number = roster.line_of(row["student"]) if roster is not None else None
        key = row["student"] if number is None else number
        names.setdefault(key, row["student"])
        of_student = percents.setdefault(key, {})
        if (chapter := int(row["chapter"])) in TITLES:
            of_student.setdefault(chapter, []).append(row["percent"])
    told = [f"not on the roster, and not in the marks: {name}" for name in names if roster and isinstance(name, str)]
    for key, of_student in percents.items():
        for chapter, found in of_student.items():
            if len(found) > 1:
                told.append(f"{names[key]} has handed in {len(found)} files for chapter {chapter}: the best one counts")
    marks = {
        key: {chapter: max(found, key=float) for chapter, found in of_student.items()}
        for key, of_student in percents.items()
    }
    chapters = sorted({number for of_student in marks.values() for number in of_student})
    headings = map(heading_of, chapters)
    if roster is None:
        columns = ["student"]
        lines = [[as_text(names[key]), *_cells(chapters, found)] for key, found in marks.items()]
    else:
        columns, lines = roster.columns, []
        for number, line in enumerate(roster.lines):
            is_points = any(cell.strip().casefold() == POINTS for cell in line)
            lines.append([*line, *(["100"] * len(chapters) if is_points else _cells(chapters, marks.get(number, {})))])
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=roster.delimiter if roster else ",").writerows([[*columns, *headings], *lines])
    return told


def heading_of(chapter: int) -> str:
    return f"Chapter {chapter}: {TITLES[chapter]} (%)"


def as_text(value: Any) -> str:
    """For a cell: on one line, cut if it is very long, and no formula."""
    text = readable(" | ".join(str(value).splitlines()), MOST_CHARACTERS)
    return f"'{text}" if text.startswith(FORMULA) else text


def as_it_was(cell: str) -> str:
    """What as_text() was given, on one line."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA) else cell


def _cells(chapters: list[int], found: dict[int, str]) -> list[str]:
    return [found.get(number, "0") for number in chapters]
