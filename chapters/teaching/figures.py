"""The figures of a chapter's prose beside what prints them:  python -m chapters.teaching.figures 9

For each sentence with a figure: "lab" is what the lab told when it was recorded, or what the text quotes of it; "code"
is the output of code in the text; "quote" is the source that the text quotes. A figure that stands in none is listed as
"?": the author worked it out, it comes from a paper, or it is wrong. Somebody has to look.
"""

import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from chapters.course import Chapter, find_chapter
from chapters.recording import Recording

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?")
NO_FIGURES = re.compile(  # links, code, and the numbers of chapters
    r"\]\([^)]*\)|\[arXiv:[^\]]*|`[^`]*`|[Cc]hapters? \d+(?:(?:, | and | to |, and )\d+)*"
)
SKIPPED = ("Where to read on",)


class Found(NamedTuple):
    sentence: str
    sources: dict[str, str]  # of each figure in it


def find_figures(chapter: Chapter) -> list[Found]:
    """The sentences with figures, in order, and what prints each figure."""
    text = (chapter.folder / "README.md").read_text("utf-8")
    told = "\n".join(str(what) for _, what in Recording(chapter.folder).told)
    printed = {"lab": figures_of(told), "code": set[str](), "quote": set[str]()}
    for fence in FENCE.finditer(text):
        kind = {"text lab": "lab", "text output": "code"}.get(fence["info"], "quote")
        printed[kind] |= figures_of(fence["text"])
    found = []
    for sentence in sentences_of(text):
        figures = FIGURE.findall(NO_FIGURES.sub("", sentence))
        sources = {
            figure: next((kind for kind, numbers in printed.items() if plain(figure) in numbers), "?")
            for figure in map(trimmed, figures)
        }
        if sources:
            found.append(Found(sentence, sources))
    return found


def sentences_of(text: str) -> Iterator[str]:
    """Of the prose: no code, no tables, no headings, and nothing of the sections that are skipped."""
    for section in re.split(r"^## ", FENCE.sub("", text), flags=re.MULTILINE):
        if not section.startswith(SKIPPED):
            for paragraph in re.split(r"\n\s*\n|\n(?=- )", section):
                if not paragraph.startswith(("|", "#")):
                    yield from re.split(r"(?<=[.?!:]) (?=[A-Z*\"(])", " ".join(paragraph.split()))


def figures_of(text: str) -> set[str]:
    return {plain(trimmed(figure)) for figure in FIGURE.findall(text)}


def trimmed(figure: str) -> str:
    return figure.rstrip(",")


def plain(figure: str) -> str:
    """2,168 and 2168 are one figure."""
    return figure.replace(",", "")


def main(arguments: list[str]) -> int:
    try:
        chapters = [find_chapter(int(number)) for number in arguments]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for chapter in chapters:
        print(f"Chapter {chapter.number}: {chapter.title}\n")
        for sentence, sources in find_figures(chapter):
            print(f"{', '.join(f'{figure} {source}' for figure, source in sources.items()):30}  {sentence}")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
