"""Lesson: a chapter's README.md in parts that slides and handouts are made of: sections, blocks, sentences."""

import ast
import re
from dataclasses import dataclass, field
from typing import Any

from markdown_it.token import Token

from chapters.course import Chapter
from chapters.recording import Recording
from chapters.site.expectations import asks
from chapters.site.figures import drawn_image
from chapters.site.scenes import NAMES_A_SCENE, Scenes
from chapters.teaching.markdown import MARKDOWN
from chapters.words import ENGLISH

ASKS = ENGLISH("expect.asks")
MISTAKES, SUMMARY, NOW_YOU = "What beginners get wrong", "Summary", "Now you"
END = re.compile(r"""(?<=[.!?])[*"')\]]*\s+(?=["*`(\[]*[A-Z0-9"`*(])""")  # of a sentence
PAIRS = (("(", ")"), ("[", "]"))


@dataclass
class Block:
    """One thing between two empty lines. kind: paragraph, list, table, fence, picture, question, scene,
    formula or code_of."""

    kind: str
    tokens: list[Token]
    scenes: Scenes

    @property
    def text(self) -> str:
        """Of a paragraph, a question or a code_of: its Markdown on one line."""
        inline = next(token for token in self.tokens if token.type == "inline")
        return " ".join(inline.content.split())

    @property
    def items(self) -> list[str]:
        """Of a list: the first paragraph of each entry, as Markdown."""
        starts = [at for at, token in enumerate(self.tokens) if token.type == "list_item_open" and token.level == 1]
        return [" ".join(self.tokens[at + 2].content.split()) for at in starts]

    @property
    def info(self) -> str:
        """Of a fence: what kind of text it holds."""
        return self.tokens[0].info.strip()

    @property
    def code(self) -> str:
        return self.tokens[0].content.rstrip("\n")


@dataclass
class Section:
    title: str  # Markdown
    blocks: list[Block] = field(default_factory=list)

    def of(self, kind: str) -> list[Block]:
        return [block for block in self.blocks if block.kind == kind]


@dataclass
class Lesson:
    """aim: what a reader can do afterwards; needs: minutes and chapters, as the text says them at its top."""

    chapter: Chapter
    aim: str
    needs: str
    sections: list[Section]
    env: dict[str, Any]  # what the site's renderer asks for

    @classmethod
    def of(cls, chapter: Chapter) -> "Lesson":
        scenes = Scenes.of(chapter)
        blocks = blocks_of(MARKDOWN.parse((chapter.folder / "README.md").read_text("utf-8")), scenes)
        sections: list[Section] = []
        for block in blocks:
            if block.kind == "heading":
                sections.append(Section(block.text))
            else:
                sections[-1].blocks.append(block)
        paragraphs = [block.text for section in sections[:2] for block in section.of("paragraph")]
        needs = next(text for text in paragraphs if "Reading takes" in text)
        sections[1].blocks = [b for b in sections[1].blocks if b.kind != "paragraph" or b.text != needs]
        env = {"told": Recording(chapter.folder).told, "scenes": scenes}
        return cls(chapter, paragraphs[0], needs, sections[1:], env)

    def section(self, title: str) -> Section:
        return next(section for section in self.sections if section.title == title)

    @property
    def explained(self) -> list[Section]:
        """The sections before the mistakes."""
        titles = [section.title for section in self.sections]
        return self.sections[: titles.index(MISTAKES)]

    @property
    def mistakes(self) -> list[str]:
        """Each as the text states it, in bold type at the beginning of a paragraph."""
        found = (re.match(r"\*\*(.+?)\*\*", block.text) for block in self.section(MISTAKES).of("paragraph"))
        return [match[1] for match in found if match]

    @property
    def summary(self) -> list[str]:
        return [item for block in self.section(SUMMARY).of("list") for item in block.items]

    @property
    def questions(self) -> list[str]:
        """That a reader is to guess before the text answers them."""
        return [question for _, question in self.asked]

    @property
    def asked(self) -> list[tuple[str, str]]:
        """The same, each with the title of its section."""
        return [(section.title, question_of(block)) for section in self.sections for block in section.of("question")]

    def exercises(self) -> dict[str, str]:
        """Name of each function to write -> the first sentence of its docstring."""
        tree = ast.parse((self.chapter.folder / "exercise.py").read_text("utf-8"))
        found = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                found[node.name] = sentences(" ".join(doc.split("\n\n")[0].split()))[0]
        return found


def blocks_of(tokens: list[Token], scenes: Scenes) -> list[Block]:
    blocks, at = [], 0
    while at < len(tokens):
        end, depth = at + 1, int(tokens[at].nesting)
        while depth:
            depth += tokens[end].nesting
            end += 1
        blocks.append(Block(kind_of(tokens, at), tokens[at:end], scenes))
        at = end
    return blocks


def kind_of(tokens: list[Token], at: int) -> str:
    kind = tokens[at].type.removesuffix("_open")
    if kind == "paragraph":
        words = tokens[at + 1].content
        if drawn_image(tokens[at + 1]) is not None:
            return "picture"
        if words.startswith("**[`"):
            return "code_of"
        return "scene" if words.startswith(f"*{NAMES_A_SCENE}") else kind
    if kind == "blockquote":
        return "question" if asks(tokens, at, ENGLISH) else kind
    if kind == "math_block":
        return "formula"
    return "list" if kind in ("bullet_list", "ordered_list") else kind


def question_of(block: Block) -> str:
    return block.text.removeprefix(f"**{ASKS}**").strip()


def sentences(markdown: str) -> list[str]:
    """The sentences of a paragraph, none of which ends inside brackets, code, bold type or a quotation."""
    found, start = [], 0
    for match in END.finditer(markdown):
        if is_whole(piece := markdown[start : match.end()].strip()):
            found.append(piece)
            start = match.end()
    return [*found, markdown[start:].strip()] if markdown[start:].strip() else found


def is_whole(piece: str) -> bool:
    bare = re.sub("`[^`]*`", "", piece)
    even = all(bare.count(mark) % 2 == 0 for mark in ("`", "*", "**", '"'))
    return even and all(bare.count(a) == bare.count(b) for a, b in PAIRS)


def shown(markdown: str) -> str:
    """A line as HTML, without links: they lead from a file of the repository to another."""
    inline = MARKDOWN.parseInline(markdown)[0]
    inline.children = [child for child in inline.children or [] if not child.type.startswith("link_")]
    return MARKDOWN.renderer.render([inline], MARKDOWN.options, {})
