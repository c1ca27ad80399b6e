"""Wrong solutions of the exercises, by chapter: typical mistakes, and a piece of what the student must be told.

They are few: each is told something else, or told it by another check.

WRONG of chNN.py lists them for each task. Each is an Edit of the chapter's solution.py, so that one reads what the
mistake is and nothing else.
"""

import ast
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.course import Chapter


@dataclass(frozen=True)
class Edit:
    """One change of the solution.

    old and new are a part of one line, or whole lines at any indentation. old occurs exactly once: in the task's
    function, or, if the function has none of it, in the file (its helpers, its constants). section: what the student is
    told to read again, where that is another heading than the task's.
    """

    name: str
    old: str
    new: str
    hint: str
    section: str = ""

    def apply(self, source: str, task_name: str) -> str:
        """The source of the wrong solution. Raises AssertionError if it is not clear which text is meant."""
        old, new = (textwrap.dedent(text).strip("\n") if "\n" in text else text for text in (self.old, self.new))
        first, *rest = old.split("\n")
        pattern = re.escape(first)
        if rest:
            lines = [rf"\n(?P=indent){re.escape(line)}" if line else r"\n" for line in rest]
            pattern = rf"(?m)^(?P<indent> *){pattern}{''.join(lines)}$"
        start, end = _span(source, task_name)
        found = [match for match in re.finditer(pattern, source) if start <= match.start() < end]
        found = found or list(re.finditer(pattern, source))
        assert len(found) == 1, f"the old text of {self.name} occurs {len(found)} times in {task_name}:\n{old}"
        [match] = found
        line = source[source.rfind("\n", 0, match.start()) + 1 :]
        indent = match["indent"] if rest else re.match(" *", line)[0]
        new = textwrap.indent(new, indent)
        return source[: match.start()] + (new if rest else new.removeprefix(indent)) + source[match.end() :]

    def function(self, chapter: Chapter, task_name: str, folder: Path) -> Callable[..., Any]:
        """The wrong solution, loaded as a student's file is, from a file in this folder."""
        path = folder / f"{self.name}.py"
        path.write_text(self.apply((chapter.folder / "solution.py").read_text("utf-8"), task_name), "utf-8")
        return getattr(chapter.submission(path), task_name)


def _span(source: str, name: str) -> tuple[int, int]:
    """Where the definition of a function begins and ends."""
    [node] = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
    lines = source.splitlines(keepends=True)
    return len("".join(lines[: node.lineno - 1])), len("".join(lines[: node.end_lineno]))


def edits(text: str) -> dict[str, list[Edit]]:
    """Edits as one writes them down, for each task; see ch08.py.

    Behind the name of the task come "name: hint" and "~ old => new", or, where that does not fit, the lines that go
    ("-"), those that come in their place ("+"), and those before or behind them that stay ("="). "@": the section.
    """
    found: dict[str, list[tuple[str, str, dict[str, list[str]]]]] = {}
    for line in filter(None, text.split("\n")):
        if not line.startswith(" "):
            of_task = found[line] = []
        elif not line.startswith(" " * 8):
            name, hint = line.strip().split(": ", 1)
            marked: dict[str, list[str]] = {"-": [], "+": [], "@": []}
            of_task.append((name, hint, marked))
        elif line[8] == "~":
            old, new = f"{line[10:]} ".split(" => ")
            marked["-"], marked["+"] = [old], [new[:-1]]
        else:
            for mark in line[8].replace("=", "-+"):
                marked[mark].append(line[10:])

    def edit(name: str, hint: str, lines: dict[str, list[str]]) -> Edit:
        old, new, section = ("\n".join(lines[mark]) for mark in "-+@")
        return Edit(name, old, new, hint, section)

    return {task: [edit(*parts) for parts in of_task] for task, of_task in found.items()}
