"""What `lab N --plain` told, recorded: on a page, a lab that needs a model."""

import html
from itertools import count
from typing import Any

from chapters import recording
from chapters.course import Chapter
from chapters.recording import Told
from chapters.sheet import MEASURED, Histogram, Levels, Sheet
from chapters.site.figures import figure
from chapters.site.scenes import Scenes
from chapters.site.tables import draw, paragraph, printed, retold
from chapters.svg import histogram, levels
from chapters.words import ENGLISH, Captions, Words


def note(chapter: Chapter, told: list[Told], words: Words) -> str:
    """What a recording is, and whose numbers it and the chapter's text have."""
    command = f"<code>python -m chapters lab {chapter.number} --plain</code>"
    said = [words("lab.story_note", command=command)]
    if any(MEASURED in str(what) for _, what in told):
        marked = f'<span class="measured">{words("lab.like_this")}</span>'
        said.append(words("lab.story_measured", marked=marked))
    return f'<p class="note">{" ".join(said)}</p>'


def story_of(chapter: Chapter, scenes: Scenes, words: Words = ENGLISH) -> str:
    """The recorded story: its parts as headings, what was said as paragraphs, tables, and pictures as printed."""
    told, captions = recording.Recording(chapter.folder).told, Captions(chapter.folder, words.language)
    body, numbers = [note(chapter, told, words)], count(1)
    for kind, what in told:
        if kind == "part":
            number = next(numbers)
            body.append(f'<h2 id="part-{number}">{number}. {html.escape(captions(what))}</h2>')
            body.append(scenes.back_from_part(number, words))
        else:
            body.append(draw_told(kind, what, captions, words))
    return "\n".join(body)


def draw_told(kind: str, what: Any, captions: Captions, words: Words) -> str:
    if kind == "table":
        return draw(retold(Sheet(**what), captions), words)
    if kind == "histogram":
        return figure(histogram(Histogram(**what), ""), what["title"])
    if kind == "levels":
        return figure(levels(Levels(**what)), f"{len(what['numbers'])} numbers, and the levels of {what['title']}")
    return {"say": paragraph, "print": printed}[kind](captions(what))
