"""Sheet, Histogram, Levels: a lab's results as data. A terminal and a page draw them, and story.json keeps them.

Chapters' texts quote tables as the terminal drew them; read() makes sheets of those again.
"""

import re
from dataclasses import dataclass, field

RULE = re.compile(r"[\s━─═╇┼╪┏┳┓┡┩└┴┘┌┬┐╞╡]+")
NUMBER = re.compile(r"[-+x<≤]?\s?[\d.,]+(\s?(%|x|µs|ms|s|[KMG]i?B|GB/s|B|M))?( \(measured\))?|-|\.\.\.|")
MEASURED = "(measured)"


@dataclass
class Sheet:
    """A column's heading says its unit. A table that is quoted in part may have no headings."""

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    title: str = ""

    @property
    def num_columns(self) -> int:
        return len(self.rows[0]) if self.rows else len(self.columns)

    def holds_numbers(self, column: int) -> bool:
        """All its cells are numbers, and at least one is not empty."""
        cells = [row[column].strip() for row in self.rows]
        return any(cells) and all(map(NUMBER.fullmatch, cells))

    def column(self, name: str) -> list[float]:
        """The numbers of a column, without their units."""
        at = self.columns.index(name)
        return [float(re.sub(r"[^\d.-]", "", row[at].split(MEASURED)[0])) for row in self.rows]


def read(printed: str) -> Sheet | None:
    """The table that was printed so; None for anything else. Headings over several lines are put together.

    A name in the first column that is indented below the others stays so.
    """
    columns: list[str] = []
    rows: list[list[str]] = []
    names: list[str] = []  # of the rows, as they were printed
    for line in printed.strip("\n").split("\n"):
        if RULE.fullmatch(line):
            continue
        cells = [cell.strip() for cell in re.split("[┃│]", line)]
        if line[0] in "┃│":  # with a frame
            cells = cells[1:-1]
        if len(cells) < 2 or re.search("[├└╭╰]", line):
            return None
        if "┃" in line:
            columns = [f"{a} {b}".strip() for a, b in zip(columns, cells, strict=True)] if columns else cells
        else:
            rows.append(cells)
            names.append(re.split("[┃│]", line.lstrip("┃│"))[0].rstrip())
    if not rows or any(len(row) != len(rows[0]) for row in rows) or (columns and len(columns) != len(rows[0])):
        return None
    sheet = Sheet(columns, rows)
    is_to_the_right = len({len(name) for name in names}) == 1  # the terminal has aligned the column so
    if not is_to_the_right and not sheet.holds_numbers(0):
        margin = min(len(name) - len(name.lstrip()) for name in names if name)
        for row, name in zip(rows, names, strict=True):
            row[0] = name[margin:]
    return sheet


BARS = " ▁▂▃▄▅▆▇█"


@dataclass
class Histogram:
    """How many numbers fall where, between low and high, in bins of one width. height: lines of a terminal."""

    title: str
    counts: list[int]
    low: float
    high: float
    num_outside: int = 0
    height: int = 5

    def __rich__(self) -> str:
        most = max(max(self.counts), 1)
        levels = [round(count / most * self.height * 8) for count in self.counts]
        lines = ["".join(BARS[min(max(n - row * 8, 0), 8)] for n in levels) for row in reversed(range(self.height))]
        left, right = f"{self.low:.3g}", f"{self.high:.3g}"
        middle = "0" if self.low == -self.high else ""
        axis = left + middle.center(len(levels) - len(left) - len(right)) + right
        outside = f"\n{self.num_outside:,} of {sum(self.counts) + self.num_outside:,} lie outside"
        return "\n".join([self.title, *lines, axis.rstrip()]) + outside * bool(self.num_outside)


@dataclass
class Levels:
    """Numbers on an axis, and the levels to which they are rounded, equally far apart. title: whose they are."""

    title: str
    numbers: list[float]
    levels: list[float]

    @property
    def met(self) -> list[float]:
        """The levels to which a number in the range of these may be rounded."""
        margin = (self.levels[1] - self.levels[0]) / 2
        return [level for level in self.levels if min(self.numbers) - margin < level < max(self.numbers) + margin]

    @property
    def step(self) -> str:
        return f"one every {self.levels[1] - self.levels[0]:.3g}"

    def __rich__(self) -> str:
        low, high, width = min(self.numbers), max(self.numbers), 84
        dots, marks = [0] * width, [" "] * width
        for number in self.numbers:
            dots[round((number - low) / (high - low or 1) * (width - 1))] += 1
        for level in self.met:
            at = round((level - low) / (high - low or 1) * (width - 1))
            marks[min(max(at, 0), width - 1)] = "|"
        line = "".join(" .:⁝#"[min(count, 4)] for count in dots)
        below = "".join(marks) if len(self.met) <= width // 2 else f"{len(self.met)} levels, {self.step}"
        axis = f"{f'{low:.3g}':<{width // 2}}{f'{high:.3g}':>{width // 2}}"
        return f"numbers {line}\nlevels  {below}\n        {axis}"
