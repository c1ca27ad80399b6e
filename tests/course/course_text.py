"""The chapters as texts: their fenced blocks, and the source that a quoted block must agree with."""

import re
import textwrap
from pathlib import Path

import pytest

from chapters.course import all_chapters
from chapters.site.sources import c_function, first_line, node_of

ROOT = Path(__file__).parents[2]
CHAPTERS = all_chapters()
FENCE = re.compile(
    r"(?:^\*\*\[`(?P<path>[\w/.]+)`\]\(\.\./\.\./(?P<link>[\w/.]+)\) · `(?P<symbol>[\w.]+)`\*\*\n\n)?"
    r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def for_each(chapters) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("chapter", chapters, ids=lambda chapter: chapter.folder.name[:4])


for_each_chapter = for_each(CHAPTERS)


def text_of(chapter) -> str:
    """As a reader sees it: without the marks of slides."""
    text = (chapter.folder / "README.md").read_text("utf-8")
    return re.sub(r"<!-- slide.*?-->\n\n", "", text)


def blocks(chapter) -> list[re.Match]:
    return list(FENCE.finditer(text_of(chapter)))


def source_of(path: str, symbol: str) -> str:
    """The dedented source of what node_of() finds, or of a function in C."""
    if path.endswith((".c", ".h")):
        return c_function(path, symbol)[0]
    node, lines = node_of(path, symbol), (ROOT / path).read_text("utf-8").splitlines()
    return textwrap.dedent("\n".join(lines[first_line(node) - 1 : node.end_lineno]))


def assert_quoted(quote: str, source: str) -> None:
    """A line "..." stands for lines left out; each stretch between is in the source, in order."""
    lines, at = [line.rstrip() for line in source.splitlines()], 0
    stretches: list[list[str]] = [[]]
    for line in textwrap.dedent(quote).splitlines():
        if line.strip() == "...":
            stretches.append([])
        else:
            stretches[-1].append(line.rstrip())
    for stretch in stretches:
        while stretch and not stretch[0]:
            stretch.pop(0)
        while stretch and not stretch[-1]:
            stretch.pop()
        if not stretch:
            continue
        size = len(stretch)
        found = next((i for i in range(at, len(lines) - size + 1) if lines[i : i + size] == stretch), None)
        assert found is not None, "not in the source:\n" + "\n".join(stretch)
        at = found + size
