"""Handout: two sides of paper for a chapter, made of its own text, with room to write."""

import html
from collections.abc import Iterator

from chapters.svg import Moved
from chapters.teaching.lesson import Block, Lesson, shown
from chapters.teaching.markdown import MARKDOWN
from chapters.teaching.paper import LICENCE, page
from chapters.teaching.sections import CAPTION, beside, bullets, fits, new_words, picture

FORMULA = 3  # lines of text that are one, at most
ENTRIES = 20  # of the back, where a question counts twice for the line below it


def handout_page(lesson: Lesson) -> str:
    chapter = lesson.chapter
    name = html.escape(f"Chapter {chapter.number}: {chapter.title}")
    head = f'<p class="number">Chapter {chapter.number}</p><h1>{html.escape(chapter.title)}</h1>'
    asked = "".join(
        f'<li><b>{shown(title)}</b>: {shown(question)}<span class="line"></span></li>'
        for title, question in lesson.asked
    )
    tasks = "".join(f"<li><code>{task}</code> {shown(said)}</li>" for task, said in lesson.exercises().items())
    # The answers are in the summary: it is on the other side of the sheet.
    front = f"{head}<p>{shown(lesson.aim)}</p>{main_picture(lesson)}"
    front += f"<h2>What do you expect?</h2><ol>{asked}</ol>" if asked else ""
    back = f"<h2>In short</h2>{bullets(lesson.summary)}"
    back += "".join(formulas(lesson))
    back += f"<h2>Marked in the text</h2>{bullets(marked)}" if (marked := words(lesson)) else ""
    back += f"<h2>What you write</h2><ul>{tasks}</ul><h2>Notes</h2><div class='room'></div>"
    sheets = "".join(
        f'<section class="sheet"><div class="body">{side}</div><footer>{name} · {LICENCE} · {n} / 2</footer></section>'
        for n, side in enumerate((front, back), start=1)
    )
    return page(name, sheets, "handout.css")


def main_picture(lesson: Lesson) -> str:
    """The first one that is drawn; where there is none, the first thing that the lab has printed. It stands above the
    chapter's questions, so it must not answer one."""
    blocks = [block for section in lesson.explained for block in without_answers(section.blocks)]
    for block in blocks:
        if block.kind == "picture":
            drawn, caption = picture(block, lesson)
            drawn = drawn.frames[drawn.first].picture if isinstance(drawn, Moved) else drawn
            return f'<figure class="drawn">{drawn}<figcaption>{shown(caption)}</figcaption></figure>'
    diagram = next((block for block in blocks if block.kind == "fence" and block.info == "mermaid"), None)
    lab = [
        block for block in blocks if block.kind == "fence" and block.info == "text lab" and fits(block.code, (16, 90))
    ]
    return beside(render(diagram, lesson)) if diagram else f"<figure>{render(lab[0], lesson)}</figure>"


def without_answers(blocks: list[Block]) -> Iterator[Block]:
    """What stands between a question and the first paragraph after it is left out."""
    is_answer = False
    for block in blocks:
        if block.kind in ("question", "paragraph", "list"):
            is_answer = block.kind == "question"
        if not is_answer:
            yield block


def render(block: Block, lesson: Lesson) -> str:
    return CAPTION.sub("", MARKDOWN.renderer.render(block.tokens, MARKDOWN.options, lesson.env))


def formulas(lesson: Lesson) -> list[str]:
    """HTML of the formulas, and of short lines between paragraphs that no lab has printed."""
    found = []
    for section in lesson.explained:
        for block in section.blocks:
            if block.kind == "formula" or (block.kind == "fence" and block.info == "text" and is_short(block.code)):
                found.append(render(block, lesson))
    return found


def is_short(text: str) -> bool:
    return text.count("\n") < FORMULA and "|" not in text  # that is drawn


def words(lesson: Lesson) -> list[str]:
    """The sentences that introduce a word, as many as there is room for."""
    found = [said for section in lesson.explained for said in new_words(section) if len(said) < 200]
    return found[: max(ENTRIES - 2 * len(lesson.questions) - len(lesson.exercises()), 0)]
