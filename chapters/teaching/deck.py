"""Deck: a chapter's slides, made of its text by rules.

The text's own words are all that a slide holds: of a section its first sentence and those that introduce a word in bold
type; what the section shows (pictures, what a lab printed, code), each below the sentence that leads to it; a question
to the reader, and what answers it on the next slide. The paragraphs in full are the speaker's notes. What cannot be
read from the back row is left out.
"""

import html
import posixpath

from chapters import quiz
from chapters.teaching.lesson import MISTAKES, NOW_YOU, SUMMARY, Lesson, shown
from chapters.teaching.sections import LETTERS, SectionSlides, Slide, bullets, halves

VOTES = 3  # quiz questions


def slides_of(lesson: Lesson, site: str) -> list[Slide]:
    """site: where the course's pages are, to which scenes of a lab lead."""
    pages = posixpath.join(site, lesson.chapter.folder.name)
    slides = [first(lesson)]
    for section in lesson.explained:
        slides += SectionSlides(lesson, section, pages).slides
    slides += [Slide("What is wrong here?", bullets(lesson.mistakes), explanations(lesson), "mistakes")]
    slides += votes(lesson)
    for number, part in enumerate(parts := halves(lesson.summary), 1):
        slides.append(Slide(SUMMARY + f" ({number} of {len(parts)})" * (len(parts) > 1), bullets(part)))
    return [*slides, last(lesson)]


def first(lesson: Lesson) -> Slide:
    body = f'<p class="number">Chapter {lesson.chapter.number}</p><h1>{html.escape(lesson.chapter.title)}</h1>'
    return Slide("", f"{body}<p>{shown(lesson.aim)}</p>", [shown(lesson.needs)], "first")


def last(lesson: Lesson) -> Slide:
    number = lesson.chapter.number
    rows = "".join(
        f"<tr><td><code>{name}</code></td><td>{shown(said)}</td></tr>" for name, said in lesson.exercises().items()
    )
    commands = "\n".join(f"python -m chapters {what} {number}" for what in ("lab", "quiz", "check"))
    body = f'<table>{rows}</table><pre class="printed">{commands}</pre>'
    return Slide(NOW_YOU, body, kind="table tasks")


def votes(lesson: Lesson) -> list[Slide]:
    """Quiz questions to vote on. A number is chosen among itself and the known mistakes, in their order."""
    slides = []
    for number, question in enumerate(quiz.load(lesson.chapter), start=1):
        if "answer" in question:
            values = sorted({float(value) for value in (question["answer"], *question["wrong"])})
            choices = [f"{value:,.12g}" for value in values]
            right = "abcdefgh"[values.index(float(question["answer"]))]
        else:
            choices = [option["text"] for option in quiz.shuffled(question, number)]
            right = next(letter for letter, (good, _) in quiz.verdicts(question, number).items() if good)
        if (
            len(choices) > 2
            and len(question["ask"]) + sum(map(len, choices)) < LETTERS
            and "```" not in question["ask"]
        ):
            unit = f" ({html.escape(question['unit'])})" if "unit" in question else ""
            body = f"<p>{shown(question['ask'])}{unit}</p>{bullets(choices, 'ol')}"
            slides.append(Slide("Vote", body, [f"<b>{right}</b>: {shown(question['why'])}"], "vote"))
    return slides[:VOTES]


def explanations(lesson: Lesson) -> list[str]:
    return [shown(block.text) for block in lesson.section(MISTAKES).of("paragraph")]
