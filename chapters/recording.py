"""Recording: what a lab told when it was last recorded, as data in the chapter's folder (story.json)."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from chapters.sheet import MEASURED, Sheet, read

QUOTE = re.compile(r"^```text lab\n(.*?)^```$", re.MULTILINE | re.DOTALL)
Told = tuple[str, Any]  # part, say or print, and a text; table, histogram or levels, and its fields


class Recording:
    """Empty for a chapter whose lab needs no recording: it runs on the page. told: what is not in its folder yet."""

    def __init__(self, folder: Path, told: list[Told] | None = None) -> None:
        path = folder / "story.json"
        if told is None:
            told = [tuple(each) for each in json.loads(path.read_text("utf-8"))] if path.exists() else []
        self.told = told

    def part(self, title: str) -> list[Told]:
        """What was told under this heading. Raises LookupError."""
        starts = [at for at, (kind, _) in enumerate(self.told) if kind == "part"] + [len(self.told)]
        for start, end in pairwise(starts):
            if self.told[start][1] == title:
                return self.told[start + 1 : end]
        raise LookupError(f"the recorded lab has no part {title!r}")

    def sheets(self, title: str) -> list[Sheet]:
        """The tables under this heading."""
        return [Sheet(**what) for kind, what in self.part(title) if kind == "table"]

    def says(self, title: str) -> str:
        """The paragraphs under this heading."""
        return "\n".join(what for kind, what in self.part(title) if kind == "say")


def write(folder: Path, told: list[Told]) -> None:
    """JSON with a line for each thing that was told, and for each row of a table."""
    lines = []
    for kind, what in told:
        if kind == "table":
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in what["rows"])
            head = json.dumps({name: what[name] for name in ("title", "columns")}, ensure_ascii=False)
            lines.append(f'["table", {head[:-1]}, "rows": [\n  {rows}]}}]')
        else:
            lines.append(json.dumps([kind, what], ensure_ascii=False))
    (folder / "story.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


def quotes(folder: Path) -> list[str]:
    """What the chapter's text quotes from its lab. Its measured figures are those that the text speaks of."""
    text = (folder / "README.md").read_text("utf-8")
    return [block.rstrip() for quote in QUOTE.findall(text) for block in re.split(r"\n\s*\n", quote)]


def lines_of(kind: str, what: Any) -> list[str]:
    """Words and numbers of what was told, a line for each row of a table; a paragraph is one."""
    if kind == "table":
        lines = [" ".join(row) for row in [what["columns"], *what["rows"]]]
    else:
        lines = what.split("\n") if isinstance(what, str) else [what["title"]]
    return list(map(bare, lines))


def bare(line: str) -> str:
    """Without what draws tables and bars, and without the mark of what was measured."""
    return " ".join(re.sub("[─-▟]", " ", line.replace(MEASURED, " ")).split())


def quoted_sheet(folder: Path, *columns: str) -> Sheet:
    """The first quoted table that has these columns. Raises LookupError."""
    for sheet in filter(None, map(read, quotes(folder))):
        if set(columns) <= set(sheet.columns):
            return sheet
    raise LookupError(f"{folder.name}/README.md quotes no table with {columns}")
