"""SectionSlides: the slides of one section of a chapter, by the rules that deck.py states."""

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from chapters.site.figures import caption_of, drawn_image
from chapters.svg import Moved
from chapters.teaching.lesson import ASKS, Block, Lesson, Section, question_of, sentences, shown
from chapters.teaching.markdown import MARKDOWN

# What a slide holds at most. Letters, where nothing else is said.
CODE, LAB = (20, 100), (16, 115)  # lines, and letters of a line
ROWS = 11  # of a table
LETTERS = 620  # of a list or a table
OPENING, SHORT = 300, 100  # of a section's first sentences, and when these are too few
LEAD = 40, 200  # of the sentences above a picture: at least, if there are so many, and at most
WORD, SO = 240, 150  # of a sentence that introduces a word, and of those below an answer
HEAD = re.compile(r"\*+[^*]+\*+")  # a sentence that is all in bold or slanted type
CAPTION = re.compile(r'<figcaption>(?:<a href="(.*?)">from the lab, (.*?)</a>|.*?)</figcaption>')


@dataclass
class Slide:
    """title, body, notes and foot: HTML. The notes are said, not shown."""

    title: str
    body: str
    notes: list[str] = field(default_factory=list)
    kind: str = ""
    foot: str = ""


class SectionSlides:
    """The slides of one section, in the order of the text. What a paragraph says goes to the notes of the last one."""

    def __init__(self, lesson: Lesson, section: Section, pages: str) -> None:
        self.lesson, self.section, self.pages = lesson, section, pages
        self.title = shown(section.title)
        self.before = ""  # the last paragraph
        self.code_of = ""  # the heading of a quote from the engine
        self.is_answer = False
        self.slides = [self.opening() if section.blocks[0].kind == "paragraph" else Slide("", "")]
        for at, block in enumerate(section.blocks):
            following = section.blocks[at + 1] if at + 1 < len(section.blocks) else None
            getattr(self, f"add_{block.kind}", self.add_other)(block, following)
        self.slides = [slide for slide in self.slides if slide.body]
        for slide in self.slides:
            if slide.kind == "opening":  # what it leads to did not fit
                slide.body = slide.body.replace(":</p>", ".</p>")

    def opening(self) -> Slide:
        """The first sentences, without those that end with a colon, and the sentences that introduce a word."""
        paragraphs = [block.text for block in self.section.of("paragraph")]
        words = new_words(self.section)
        beginning = [said for said in to_show(paragraphs[0]) if not said.endswith(":")]
        if sum(map(len, beginning)) < SHORT and [block.kind for block in self.section.blocks[:2]] == ["paragraph"] * 2:
            beginning += [said for said in to_show(paragraphs[1]) if not said.endswith(":")]
        lead = joined(beginning or sentences(paragraphs[0]), OPENING / 2 if words else OPENING)
        words = [said for said in words if said not in lead][:4]
        while len(lead) + sum(map(len, words)) > LETTERS:
            words.pop()
        return Slide(self.title, f"<p>{shown(lead)}</p>" + bullets(words) * bool(words), kind="opening")

    def show(self, body: str, kind: str, lead: str = "") -> None:
        """A slide below the sentence that leads to it; an answer, below its question."""
        if not lead and self.before and not self.is_answer and (kind != "table" or self.before.endswith(":")):
            said = to_show(self.before)[::-1]
            lead = shown(joined(said, LEAD[0], backwards=True)) if said and len(said[0]) < LEAD[1] else ""
        if self.slides[-1].kind == "opening" and lead and lead in self.slides[-1].body:
            body = self.slides.pop().body + body
        elif lead:
            body = f'<p class="lead">{lead}</p>{body}'
        self.slides.append(Slide(self.title, body, kind=kind))
        self.before, self.code_of = "", ""

    def add_paragraph(self, block: Block, following: Block | None) -> None:
        if self.is_answer:
            said = f'<p class="so">{shown(joined(to_show(block.text), SO))}</p>'
            if self.slides[-1].kind == "question":  # what answers it does not fit on a slide
                self.show(said, "opening")
            else:
                self.slides[-1].body += said
            self.is_answer = False
        self.slides[-1].notes.append(shown(block.text))
        self.before = block.text

    def add_question(self, block: Block, following: Block | None) -> None:
        asked = shown(question_of(block))
        self.slides.append(Slide(ASKS, f"<p>{asked}</p>", kind="question"))
        self.is_answer = True

    def add_list(self, block: Block, following: Block | None) -> None:
        """The first sentence of each entry; the entries in full are notes."""
        items = [to_show(item)[0] for item in block.items]
        if len(items) > 1 and max(map(len, items)) < WORD:
            for part in halves(items):
                self.show(bullets(part), "list")
        self.slides[-1].notes += map(shown, block.items)

    def add_table(self, block: Block, following: Block | None) -> None:
        cells = [token.content for token in block.tokens if token.type == "inline"]
        rows = sum(token.type == "tr_open" for token in block.tokens)
        if rows <= ROWS and sum(map(len, cells)) < LETTERS:
            self.show(without_links(block, self.lesson), "table")

    def add_picture(self, block: Block, following: Block | None) -> None:
        drawn, caption = picture(block, self.lesson)
        if isinstance(drawn, Moved):
            drawn = moved(drawn)
        self.show(f'<figure class="drawn">{drawn}</figure>', "picture", shown(caption))

    def add_fence(self, block: Block, following: Block | None) -> None:
        if block.info == "bash" or block.info == "text output":  # what code prints stands on its slide
            return
        code, prints = block.code, following is not None and following.kind == "fence" and following.info
        output = following.code if following is not None and prints == "text output" else ""
        size = LAB if block.info == "text lab" else CODE
        if block.info != "mermaid" and not fits(f"{code}\n{output}", size):
            self.code_of = ""
            return
        drawn = MARKDOWN.renderer.render(block.tokens, MARKDOWN.options, self.lesson.env)
        drawn = beside(drawn) if block.info == "mermaid" else drawn
        source = CAPTION.search(drawn)
        drawn = CAPTION.sub("", drawn)
        if output:
            drawn += f'<pre class="printed">{html.escape(output)}</pre>'
        kind = {"mermaid": "picture", "text lab": "lab", "text": "lab"}.get(block.info, "code")
        if block.info == "text lab" and "\n" not in code and not self.before:
            if self.slides[-1].kind == "lab":  # one more line of what was printed
                self.slides[-1].body += drawn
            return
        self.show(drawn, kind, self.code_of)
        if source and source[1]:
            self.slides[-1].foot += link(self.pages, source[1], source[2])

    def add_formula(self, block: Block, following: Block | None) -> None:
        self.show(MARKDOWN.renderer.render(block.tokens, MARKDOWN.options, self.lesson.env), "lab")

    def add_code_of(self, block: Block, following: Block | None) -> None:
        self.code_of = shown(block.text)

    def add_scene(self, block: Block, following: Block | None) -> None:
        title = block.text.strip("*").split(": ", 1)[1].rstrip(".")
        if title in block.scenes.links:
            self.slides[-1].foot += link(self.pages, f"lab.html#{block.scenes.links[title]}", title)

    def add_other(self, block: Block, following: Block | None) -> None:
        """A quotation that asks nothing."""
        self.slides[-1].notes.append(shown(block.text))


def picture(block: Block, lesson: Lesson) -> tuple[str | Moved, str]:
    """What pictures.py draws, and what the text says of it."""
    image = drawn_image(block.tokens[1])
    assert image is not None
    caption, name = caption_of(image), Path(str(image.attrs["src"])).stem
    return getattr(lesson.chapter.module("pictures"), name)(), caption[:1].upper() + caption[1:]


def beside(drawing: str) -> str:
    """A diagram that is much higher than wide as two halves, the lower one to the right."""
    box = re.search(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', drawing)
    left, top, width, height = map(float, box.groups()) if box else (0.0, 0.0, 1.0, 1.0)  # it may be text yet
    if height < 3 * width:
        return drawing
    views = [f'viewBox="{left} {at} {width} {height / 2}"' for at in (top, top + height / 2)]
    upper = re.sub(r'width="\d+" height="\d+" viewBox="[^"]*"', views[0], drawing)
    lower = re.sub(r"<svg[^>]*>", f'<svg aria-hidden="true" {views[1]}>', drawing)
    return f'<div class="halves">{upper}{lower}</div>'


def moved(drawn: Moved) -> str:
    """One of the pictures is seen; the keys up and down show the others."""
    frames = "".join(
        f'<div class="frame"{" hidden" * (at != drawn.first)}><p class="setting">{html.escape(drawn.what)}: '
        f"<b>{html.escape(frame.setting)}</b></p>{frame.picture}<p>{html.escape(frame.text)}</p></div>"
        for at, frame in enumerate(drawn.frames)
    )
    return f'<div class="frames">{frames}</div>'


def without_links(block: Block, lesson: Lesson) -> str:
    for token in block.tokens:
        token.children = [child for child in token.children or [] if not child.type.startswith("link_")]
    return MARKDOWN.renderer.render(block.tokens, MARKDOWN.options, lesson.env)


def bullets(items: Iterable[str], tag: str = "ul") -> str:
    return f"<{tag}>" + "".join(f"<li>{shown(item)}</li>" for item in items) + f"</{tag}>"


def to_show(paragraph: str) -> list[str]:
    """Its sentences, without those in brackets. A head goes with the sentence after it."""
    found: list[str] = []
    for said in sentences(paragraph):
        if found and HEAD.fullmatch(found[-1]):
            found[-1] += f" {said}"
        elif not (said[0] == "(" and said[-1] == ")"):
            found.append(said)
    return found


def new_words(section: Section) -> list[str]:
    """The sentences of its paragraphs that introduce a word, which is in bold type."""
    found = [said for block in section.of("paragraph") for said in to_show(block.text)]
    return [re.sub(":$", ".", said) for said in found if "**" in said and len(said) < WORD]


def joined(said: list[str], at_most: float, backwards: bool = False) -> str:
    """The first of these sentences, and those after it that fit. backwards: the last one comes first."""
    text = said[0] if said else ""
    for sentence in said[1:]:
        if len(text) + len(sentence) > at_most and not (backwards and len(text) < at_most):
            break
        text = f"{sentence} {text}" if backwards else f"{text} {sentence}"
    return text


def halves(items: list[str]) -> list[list[str]]:
    """A list that is too long for a slide is two."""
    if sum(map(len, items)) <= LETTERS and len(items) <= 7:
        return [items]
    middle = (len(items) + 1) // 2
    return [items[:middle], items[middle:]]


def fits(text: str, size: tuple[int, int]) -> bool:
    lines = text.rstrip("\n").split("\n")
    return len(lines) <= size[0] and max(map(len, lines)) <= size[1]


def link(pages: str, page: str, text: str) -> str:
    return f'<a target="lab" href="{pages}/{page}">{html.escape(text)}</a> '
