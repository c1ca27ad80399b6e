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


def minutes_to_read(text: str) -> float:
    """Of a chapter: 200 words a minute, 6 s for a line of code, 5 s for a row of a table, half a minute for a picture,
    and one for a question to be guessed. What is under "Where to read on" is looked up, and not read."""
    text = re.sub(r"^## Where to read on\n.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    seconds = 60 * text.count("> **What do you expect?**") + 30 * text.count("](drawn/")
    for block in FENCE.finditer(text):
        is_table = block["info"] not in ("python", "c", "text output", "bash")
        seconds += sum((5 if is_table else 6) for line in block["text"].splitlines() if line.strip("━╇ "))
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", FENCE.sub("", text))
    seconds += 5 * len(re.findall(r"^\|", text, re.MULTILINE))
    words = re.sub(r"^\|.*$", "", re.sub(r"\]\([^)]*\)", "]", text), flags=re.MULTILINE).split()
    return (seconds + 60 * len(words) / 200) / 60
