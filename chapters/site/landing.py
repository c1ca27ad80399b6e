"""The first page: what the course is, where to begin, the chapters. How to run and teach it is on a page of its own.

Both are made of chapters/README.md, which is one text on GitHub.
"""

import json
import re

from chapters.course import EXERCISES, all_chapters
from chapters.course import ROOT as CHAPTERS
from chapters.site.figures import embedded
from chapters.site.pages import page
from chapters.site.sources import Sources
from chapters.site.text import NOTES, Place, Text, render

SOURCE, PLACE = "chapters/README.md", "index.html"
FOR_READERS = ("who-it-is-for",)  # sections of the first page; all others are notes
TITLE = "How a language model is served"
SHOWS = (
    "What nanovllm is. Prompts enter the engine; a scheduler chooses tokens, the model computes them, and new tokens "
    "leave as text. Keys and values are kept in blocks: shared, owned by one request, or free."
)
HERO = """<div class="hero"><div>
<h1>{title}</h1>
<p class="lede">A course in {count} chapters, read next to the code of a small engine that runs on your laptop.</p>
<p><a class="primary" href="{first}">Start with chapter 1</a></p>
<p class="progress" hidden><progress max="{count}" value="0" aria-label="Chapters read"></progress>
<span></span></p>
</div>
{picture}</div>
"""
PLACES = """<h2 id="more">Running and teaching the course</h2>
<ul class="places">
<li><a href="{notes}#alone">On your own machine</a><p>Commands, labs and exercises in a terminal, and how to build these
pages.</p></li>
<li><a href="{notes}#for-teachers">For teachers</a><p>The guide, slides, exams, and grading a whole class.</p></li>
</ul>
"""
KEEPING = """<section class="keeping" data-exercises='{exercises}' aria-labelledby="kept" hidden>
<h2 id="kept">What you have done</h2>
<p>This browser remembers what you have read, answered, expected and written, and sends it nowhere. To continue in
another browser, save it as a file. Pages that you have opened no longer need a network.</p>
<p><button type="button" class="export">Save as a file</button>
<label class="button">Load such a file <input type="file" accept=".json,application/json"></label></p>
<p class="said" role="status"></p>
</section>
"""


def first_page(text: Text) -> str:
    top, sections = split(text.body)
    chapters = all_chapters()
    picture = embedded(CHAPTERS / "drawn" / "engine.svg", SHOWS)
    first = f"{chapters[0].folder.name}/index.html"
    hero = HERO.format(title=TITLE, count=len(chapters), first=first, picture=picture)
    kept = "".join(section for name, section in sections.items() if name in FOR_READERS)
    keeping = KEEPING.format(exercises=json.dumps({number: len(names) for number, names in EXERCISES.items()}))
    body = f"{hero}{top}{kept}{keeping}{PLACES.format(notes=NOTES)}"
    return f'<main id="content" class="contents">{body}</main>'


def notes_page(sources: Sources) -> str:
    """The rest of the same text."""
    _, sections = split(render(Place(SOURCE, NOTES, sources)).body)
    notes = "".join(section for name, section in sections.items() if name not in FOR_READERS)
    title = "Running and teaching the course"
    return page(title, f'<main id="content" class="single"><h1>{title}</h1>\n{notes}</main>', NOTES)


def split(body: str) -> tuple[str, dict[str, str]]:
    """What stands before the first heading of the second level, and the sections by their ids."""
    top, *pieces = re.split(r'(?=<h2 id=")', body)
    return top, {piece.split('"', 2)[1]: piece for piece in pieces}
