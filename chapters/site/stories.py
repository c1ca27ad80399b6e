"""What `lab N --plain` told, recorded: on a page, a lab that needs a model."""

import contextlib
import html
import io
from typing import Any

from chapters import recording
from chapters.course import Chapter
from chapters.sheet import Histogram, Levels, Sheet
from chapters.site.figures import figure
from chapters.site.scenes import Scenes
from chapters.site.tables import draw, paragraph, printed
from chapters.site.text import Text
from chapters.story import Story
from chapters.svg import histogram, levels

NOTE = """<p class="note">This is a recording of <code>python -m chapters lab {number} --plain</code>. What is marked
<span class="measured">like this</span> has the numbers of the machine on which it was recorded; yours will print
others.</p>"""


def record(chapter: Chapter) -> None:
    """Run the lab here, and keep what it tells."""
    story = Story(plain=True)
    with contextlib.redirect_stdout(io.StringIO()):
        chapter.module("lab").tell(story)
    recording.write(chapter.folder, story.told)


def story_of(chapter: Chapter, scenes: Scenes) -> Text:
    """The recorded story: its parts as headings, what was said as paragraphs, tables, and pictures as printed."""
    text = Text(chapter.title)
    body = [NOTE.format(number=chapter.number)]
    for kind, what in recording.Recording(chapter.folder).told:
        if kind == "part":
            number = len(text.headings) + 1
            text.headings.append((f"part-{number}", html.escape(f"{number}. {what}")))
            body.append('<h2 id="{}">{}</h2>'.format(*text.headings[-1]))
            body.append(scenes.back_from_part(number))
        else:
            body.append(draw_told(kind, what))
    text.body = "\n".join(body)
    return text


def draw_told(kind: str, what: Any) -> str:
    if kind == "table":
        return draw(Sheet(**what))
    if kind == "histogram":
        return figure(histogram(Histogram(**what), ""), what["title"])
    if kind == "levels":
        return figure(levels(Levels(**what)), f"{len(what['numbers'])} numbers, and the levels of {what['title']}")
    return {"say": paragraph, "print": printed}[kind](what)
