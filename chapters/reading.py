"""Reading: a chapter's short path, and how long the short path and the whole text take.

Adults read English non-fiction silently at 238 words a minute, most of them at 175 to 300 (Brysbaert 2019). Studying
is slower: Carver (1992) gives 200 words a minute for reading to learn, and 138 for reading to remember. These texts
are to be remembered, and followed with a pencil, so we take 138. (Brysbaert doubts that readers have such gears; what
counts here is the average of somebody who stops, goes back and calculates.) Words of code and of tables count as
words. A picture takes a minute, and so does a prediction before a table; a question takes two, one to answer it and
one to compare, as in a quiz. "Where to read on" is looked up, not read. Readers differ by more than these details, so
times are rounded to five minutes.

Marc Brysbaert, "How many words do we read per minute? A review and meta-analysis of reading rate", Journal of Memory
and Language 109 (2019), https://doi.org/10.1016/j.jml.2019.104047. Ronald P. Carver, "Reading rate: Theory, research,
and practical implications", Journal of Reading 36 (1992), 84-95.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chapters.course import ROOT, Chapter, all_chapters, find_chapter
from chapters.words import Words

WORDS_PER_MINUTE = 138
SHORT, LONG = "## The short path\n", "## The long path\n"  # the first two sections of a chapter, in English
SECTIONS = (  # of a short path
    "The question",
    "The picture",
    "The algorithm",
    "An example with numbers of a real size",
    "What to remember",
    "Three questions",
)
TIMES = re.compile(r"(The\s+short\s+path\s+takes\s+)(\d+)(\s+minutes,\s+the\s+whole\s+chapter\s+)(\d+)(?=;)")
LOOKED_UP = re.compile(r"^## Where to read on\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
DIAGRAM = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
HIDDEN = re.compile(r"<!--.*?-->|(?<=\])\([^)]*\)", re.DOTALL)  # marks of slides, and where links lead
ANSWER = re.compile(r"<details>\s*<summary>Answer</summary>(.*?)</details>", re.DOTALL)
FOLDED = re.compile(r"<details>\s*<summary>[^<]*</summary>(.*?)</details>", re.DOTALL)  # in any language
PREDICTION = "> **What do you expect?**"


@dataclass(frozen=True)
class Reading:
    """What there is to read in a text."""

    words: int
    pictures: int = 0
    predictions: int = 0
    questions: int = 0

    @property
    def minutes(self) -> int:
        """0 if there is nothing to read."""
        if self == Reading(0):
            return 0
        exact = self.words / WORDS_PER_MINUTE + self.pictures + self.predictions + 2 * self.questions
        return 5 * max(1, round(exact / 5))

    @classmethod
    def of(cls, text: str) -> "Reading":
        text = LOOKED_UP.sub("", text)
        pictures = len(PICTURE.findall(text)) + len(DIAGRAM.findall(text))
        plain = HIDDEN.sub("", PICTURE.sub("", DIAGRAM.sub("", text)))
        words = sum(any(map(str.isalnum, word)) for word in plain.split())
        return cls(words, pictures, text.count(PREDICTION), len(ANSWER.findall(text)))


def short_path(text: str) -> str:
    """The first section of a chapter's text, in any language; "" where there are no two sections."""
    starts = [found.start() for found in re.finditer(r"^## ", text, re.MULTILINE)]
    return text[starts[0] : starts[1] - 1] if len(starts) > 1 else ""


def readings_of(chapter: Chapter) -> tuple[Reading, Reading]:
    """What there is to read in its short path, and in the whole text."""
    text = (chapter.folder / "README.md").read_text("utf-8")
    return Reading.of(short_path(text)), Reading.of(text)


def minutes_of(chapter: Chapter) -> tuple[int, int]:
    """Of the short path (0 where there is none), and of the whole text."""
    short, whole = readings_of(chapter)
    return short.minutes, whole.minutes


def all_minutes() -> tuple[int, int]:
    """Of all chapters together."""
    each = [minutes_of(chapter) for chapter in all_chapters()]
    return sum(short for short, _ in each), sum(whole for _, whole in each)


def shown(minutes: tuple[int, int]) -> str:
    """15 / 60"""
    short, whole = minutes
    return f"{short or '-'} / {whole}"


def only_short(text: str, words: Words) -> str:
    """A chapter's beginning and its short path, for the terminal: the answers come after the questions, not between.

    Raises ValueError if it has none.
    """
    short = short_path(text)
    if not short:
        raise ValueError(f"there is no short path in {text.partition(chr(10))[0].lstrip('# ')!r}")
    answers = [" ".join(answer.split()) for answer in FOLDED.findall(short)]
    listed = "\n".join(f"{number}. {answer}" for number, answer in enumerate(answers, start=1))
    return f"{text.partition(short)[0]}{FOLDED.sub('', short)}\n\n### {words('read.answers')}\n\n{listed}\n"


# -- python -m chapters minutes ---------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", type=int, nargs="?", metavar="N", help="only this chapter")
    parser.add_argument("--write", action="store_true", help="write them into the texts that quote them (authors)")


def run(args: argparse.Namespace, console: Console) -> int:
    chapters = [find_chapter(args.chapter)] if args.chapter is not None else all_chapters()
    if args.write:
        for chapter in chapters:
            write(chapter)
        write_sums()
    table = Table("", "chapter")
    for name in ("short", "words", "whole", "words"):
        table.add_column(name, justify="right")
    for chapter in chapters:
        short, whole = readings_of(chapter)
        numbers = (short.minutes, short.words, whole.minutes, whole.words)
        table.add_row(str(chapter.number), chapter.title, *(f"{number:,}" if number else "" for number in numbers))
    console.print(table)
    if args.chapter is None:
        paths, texts = (f"{minutes / 60:.1f} hours" for minutes in all_minutes())
        console.print(f"In minutes; together {paths} for the short paths, {texts} for the whole texts")
    return 0


# -- the texts that quote them ----------------------------------------------------------------------------------------

PAGE, GUIDE = ROOT / "README.md", ROOT / "INSTRUCTOR.md"
SUMS = re.compile(r"(short\s+paths\s+take\s+)([-\d]+)(\s+hours\s+together,\s+the\s+whole\s+texts\s+)(\d+)")


def write(chapter: Chapter) -> None:
    """Into a chapter's own text, its row of the landing page, and its row of the guide for teachers."""
    short, whole = minutes_of(chapter)
    put(chapter.folder / "README.md", TIMES, short, whole)
    put(PAGE, re.compile(rf"^(\| {chapter.number} \| \[.*?\) \| )([-\d]+)( / )(\d+)", re.MULTILINE), short, whole)
    put(GUIDE, re.compile(rf"^(\| {chapter.number} \| )([-\d]+)( \| )(\d+)(?= \| 10 \|)", re.MULTILINE), short, whole)


def write_sums() -> None:
    short, whole = (round(minutes / 60) for minutes in all_minutes())
    for page in (PAGE, GUIDE, ROOT.parent / "README.md"):
        put(page, SUMS, short, whole)


def put(path: Path, pattern: re.Pattern, short: int, whole: int) -> None:
    """In place of the pattern's second and fourth group. A student's edition has no guide for teachers."""
    if path.exists():
        text = path.read_text("utf-8")
        path.write_text(pattern.sub(lambda found: f"{found[1]}{short or '-'}{found[3]}{whole}", text), "utf-8")
