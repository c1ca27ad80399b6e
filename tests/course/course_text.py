"""The chapters as texts: their fenced blocks, and the source that a quoted block must agree with."""

import re
import textwrap
from itertools import pairwise
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

BRANCH = re.compile(r" *(elif|else|except|finally)\b")


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


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def assert_quoted(quote: str, source: str) -> None:
    """A line "..." stands for lines left out, at the end, too; each stretch between is in the source, in order.

    Where parameters or arguments are left out, the line that closes them is there; and so is the `if` of an `elif`.
    """
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
    for stretch, following in pairwise(stretches):
        if stretch and stretch[-1].endswith("("):
            assert following and following[0].lstrip().startswith(")"), f"this is not closed: {stretch[-1]}"
    shown: list[str] = []
    for stretch in filter(None, stretches):
        if branch := BRANCH.match(stretch[0]):
            before = (indent_of(line) for line in reversed(shown) if line.strip())
            around = next((indent for indent in before if indent <= indent_of(stretch[0])), None)
            assert around == indent_of(stretch[0]), f"this belongs to nothing: {branch[0].strip()}"
        shown += stretch
    for stretch in filter(None, stretches):
        size = len(stretch)
        found = next((i for i in range(at, len(lines) - size + 1) if lines[i : i + size] == stretch), None)
        assert found is not None, "not in the source:\n" + "\n".join(stretch)
        at = found + size
    assert at == len(lines) or not stretches[-1], "what is left out at the end has no line ..."
