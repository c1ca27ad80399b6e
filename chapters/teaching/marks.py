"""Marks: one row for each student of a class, for the gradebook of a learning platform.

The roster is what Moodle or Canvas exports of a class, or any table with a line for each student. The marks are that
table, with a column in percent for each chapter: the platform finds its own columns again. Whoever has handed in
nothing has 0.
"""

import csv
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chapters.course import TITLES

POINTS = "points possible"  # Canvas has a second line that says how many points there are
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes a text that begins so
FIRST = ("first name", "firstname", "given name", "vorname")
LAST = ("surname", "last name", "lastname", "family name", "nachname")


class Roster:
    """columns, lines: as they are in the file. Raises ValueError for what is no such table."""

    def __init__(self, path: Path) -> None:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read()
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        table = csv.DictReader(text.splitlines(), delimiter=delimiter)
        self.columns = list(table.fieldnames or ())
        self.lines = [{name: line.get(name) or "" for name in self.columns} for line in table]
        if not self.lines:
            raise ValueError(f"{path} has no lines; a roster has a line of names of columns, and one for each student")
        self._lines_of: dict[str, set[int]] = {}
        for number, line in enumerate(self.lines):
            for name in names_of(line):
                self._lines_of.setdefault(name, set()).add(number)

    def line_of(self, student: str) -> int | None:
        """The line of this student, by whatever the line says: a name, an address, a number. None if there is none.

        Raises ValueError if there are several.
        """
        found = self._lines_of.get(letters(student), set())
        if len(found) > 1:
            lines = " and ".join(str(number + 2) for number in sorted(found))
            raise ValueError(f"the roster has {student} in lines {lines}: which of them has handed in this file?")
        return next(iter(found), None)


def names_of(line: dict[str, str]) -> set[str]:
    """What a submission's folder may call the student of this line."""
    cells = {column.strip().casefold(): cell.strip() for column, cell in line.items()}
    if any(cell.casefold() == POINTS for cell in cells.values()):
        return set()
    first, last = (next((cells[name] for name in names if cells.get(name)), "") for names in (FIRST, LAST))
    names = {*cells.values(), f"{first} {last}", f"{last} {first}"}  # Moodle's folders, and Canvas's: lovelaceada
    for cell in cells.values():
        if "@" in cell:
            names.add(cell.partition("@")[0])
        if re.fullmatch(r"[^,@]+, [^,@]+", cell):  # Canvas: Lovelace, Ada
            names.add(" ".join(reversed(cell.split(", "))))
    return {letters(name) for name in names} - {""}


def letters(name: str) -> str:
    """Without case, accents, blanks and signs."""
    plain = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in plain if c.isalnum())


def write_marks(path: Path, roster: Roster | None, rows: Iterable[dict[str, str]]) -> list[str]:
    """rows: of the table (table.py). Returns the students who are not on the roster, and so not in the file.

    Without a roster, those who have handed in something are the class.
    """
    marks: dict[str, dict[int, str]] = {}
    for row in rows:
        marks.setdefault(row["student"], {})[int(row["chapter"])] = row["percent"]
    chapters = sorted({number for of_student in marks.values() for number in of_student})
    headings = {number: f"Chapter {number}: {TITLES[number]} (%)" for number in chapters}
    if roster is None:
        lines = [{"student": as_text(student)} | _cells(headings, found) for student, found in marks.items()]
        _write(path, ["student", *headings.values()], lines)
        return []
    numbers = {student: roster.line_of(student) for student in marks}
    found_in = {number: marks[student] for student, number in numbers.items() if number is not None}
    lines = []
    for number, line in enumerate(roster.lines):
        is_points = any(cell.strip().casefold() == POINTS for cell in line.values())
        lines.append(
            line
            | (dict.fromkeys(headings.values(), "100") if is_points else _cells(headings, found_in.get(number, {})))
        )
    _write(path, [*roster.columns, *headings.values()], lines)
    return [student for student, number in numbers.items() if number is None]


def as_text(value: Any) -> str:
    """For a cell: on one line, and no formula."""
    text = " | ".join(str(value).splitlines())
    return f"'{text}" if text.startswith(FORMULA) else text


def as_it_was(cell: str) -> str:
    """What as_text() was given, on one line."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA) else cell


def _cells(headings: dict[int, str], found: dict[int, str]) -> dict[str, str]:
    return {heading: found.get(number, "0") for number, heading in headings.items()}


def _write(path: Path, columns: list[str], lines: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(lines)
