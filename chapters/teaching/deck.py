"""A chapter's slides: what its text marks for them, as Markdown that sphinx-revealjs makes a deck of.

`<!-- slide: Title -->` on a line of its own puts the block below it (a paragraph, list, table, picture, formula, or
code with its heading) on a slide with this title; `<!-- slide -->` adds one more block to the same slide. Of its
section, the paragraph above it and the paragraphs and lists up to the next mark are the speaker's notes.
"""

import re
from dataclasses import dataclass, field

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin

from chapters.course import Chapter
from chapters.site.expectations import NAMES_CODE, asks, end_of_answer, end_of_block
from chapters.site.markdown import highlight
from chapters.site.sources import ROOT
from chapters.site.text import Place, draw_fences, draw_pictures

MARK = re.compile(r"<!-- slide(?:: (?P<title>.+?))? -->", re.DOTALL)
NOTES = ("paragraph_open", "bullet_list_open", "ordered_list_open")
MARKDOWN = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin)


@dataclass
class Slide:
    """title, blocks and notes: Markdown. answers: it shows what a question of the text asks for."""

    title: str
    answers: bool = False
    blocks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def slides_of(text: str) -> list[Slide]:
    """What a chapter's text marks, in its order. Raises ValueError for a mark that no block follows."""
    slides: list[Slide] = []
    above = mark = ""
    is_open = False  # the last slide still takes notes
    end_of_last_answer = 0
    tokens, lines = MARKDOWN.parse(text), text.splitlines(keepends=True)
    at = 0
    while at < len(tokens):
        token, begin = tokens[at], at
        at = end_of_block(tokens, at)
        block = source_of(token, lines)
        if asks(tokens, begin):
            end_of_last_answer = end_of_answer(tokens, at)
        found = MARK.fullmatch(block) if token.type == "html_block" else None
        if mark and (found or token.type == "heading_open"):
            raise ValueError(f"no block of the text follows {mark}")
        if found:
            mark = block
            if found["title"]:
                title = " ".join(found["title"].split())
                slides.append(Slide(title, answers=begin < end_of_last_answer, notes=[above] if above else []))
            elif not slides:
                raise ValueError(f"{mark} comes before the first slide with a title")
        elif mark:
            slides[-1].blocks.append(block)
            if not names_code(block):  # the code comes, too
                mark = ""
            above, is_open = "", True
        elif token.type == "heading_open":
            above, is_open = "", False
        elif token.type in NOTES and not names_code(block) and not block.startswith("!["):
            if is_open:
                slides[-1].notes.append(block)
            above = block
    if mark:
        raise ValueError(f"no block of the text follows {mark}")
    return slides


def names_code(block: str) -> bool:
    """The heading of a quote of the engine's code."""
    return NAMES_CODE.fullmatch(block) is not None


def source_of(block: Token, lines: list[str]) -> str:
    assert block.map is not None
    start, end = block.map
    return "".join(lines[start:end]).strip()


def deck_text(chapter: Chapter, for_teacher: bool) -> str:
    """The deck of a chapter: its title and aim, and its slides. Students get neither notes nor answers to questions."""
    text = (chapter.folder / "README.md").read_text("utf-8")
    aim = text.split("\n\n")[1]
    parts = [f"# Chapter {chapter.number}: {chapter.title}", aim]
    for slide in slides_of(text):
        if slide.answers and not for_teacher:
            continue
        parts += [f"## {slide.title}", *slide.blocks]
        if for_teacher and slide.notes:
            parts += ['<aside class="notes">', *slide.notes, "</aside>"]
    return "\n\n".join(parts) + "\n"


def draw_slides(tokens: list[Token], place: Place) -> list[Token]:
    """As the pages draw a text (chapters/site/text.py), without links, which lead to other files of the repository."""
    tokens = draw_pictures(tokens, (ROOT / place.source).parent)
    for token in tokens:
        if token.type == "inline":
            token.children = [child for child in token.children or [] if not child.type.startswith("link_")]
    sizes = {at: sized(token.content) for at, token in enumerate(tokens) if token.type == "fence"}
    draw_fences(tokens, place)
    for at, size in sizes.items():
        token = tokens[at]
        drawn = highlight(token.content, token.info.strip(), None) if token.type == "fence" else token.content
        drawn = f'<div class="sized" style="{size}">{drawn}</div>'
        tokens[at] = Token("html_block", "", 0, content=drawn, map=token.map)
    return tokens


def sized(code: str) -> str:
    """What slides.css makes the letters as large as."""
    lines = code.splitlines()
    return f"--columns: {max(map(len, lines), default=1)}; --rows: {len(lines)}"
