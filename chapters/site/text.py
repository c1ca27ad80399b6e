"""What the pages have beyond Markdown: a rule for its tokens, before MyST-Parser makes a document of them.

Fences become what they quote (tables of a lab, diagrams), pictures are drawn, questions cover their answers, and links
to files of the repository lead into the site.
"""

import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path

from docutils.nodes import make_id
from markdown_it.token import Token

from chapters.recording import Recording
from chapters.site.diagrams import figure
from chapters.site.expectations import cover
from chapters.site.figures import embed_images, picture_of
from chapters.site.markdown import inline_html, plain
from chapters.site.scenes import Scenes
from chapters.site.sources import ROOT, TEXTS, Sources, line_of, relative
from chapters.site.tables import printed, quoted
from chapters.words import ENGLISH, Captions, Words

FILE = re.compile(r"(nanovllm|chapters|examples|tests)/[\w/]+\.\w+")  # named in a text


@dataclass
class Place:
    """Where a text comes from (a path in the repository), its name in the site, and what of its lab it leads to."""

    source: str
    target: str
    sources: Sources
    scenes: Scenes = field(default_factory=Scenes)
    words: Words = ENGLISH

    def file_of(self, link: str) -> str:
        """The path in the repository of what a relative link leads to; "" for any other link."""
        path = link.partition("#")[0]
        if not path or ":" in path:
            return ""
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.source), path))

    def href(self, path: str, fragment: str = "") -> str:
        """Raises FileNotFoundError."""
        return relative(self.sources.place_of(path), self.target) + (f"#{fragment}" if fragment else "")


def extend(tokens: list[Token], place: Place) -> list[Token]:
    """Raises FileNotFoundError and LookupError for links and scenes that are not there, ValueError for a question that
    nothing answers."""
    tokens = [token for token in tokens if token.type != "html_block" or not token.content.startswith("<!--")]
    tokens = draw_pictures(tokens, (ROOT / place.source).parent)
    for at, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.meta["id"] = make_id(plain(tokens[at + 1]))  # as docutils names the section
        elif token.type == "inline":
            link_files(token, place)
            place.scenes.link(token)
    tokens = cover(tokens, inline_html, place.words)
    draw_fences(tokens, place)
    lines = [0, 1]
    for token in tokens:  # MyST says where in the text something stands
        token.map = lines = token.map or lines
    return tokens


def draw_pictures(tokens: list[Token], folder: Path) -> list[Token]:
    """folder: of the text."""
    drawn: list[Token] = []
    at = 0
    while at < len(tokens):
        inline = tokens[at + 1] if tokens[at].type == "paragraph_open" else None
        if inline is not None and (picture := picture_of(inline, folder)):
            drawn.append(Token("html_block", "", 0, content=picture, map=tokens[at].map))
            at += 3
        else:
            if tokens[at].type == "inline":
                embed_images(tokens[at], folder)
            drawn.append(tokens[at])
            at += 1
    return drawn


def draw_fences(tokens: list[Token], place: Place) -> None:
    folder, words, num_diagrams = (ROOT / place.source).parent, place.words, 0
    told, captions = Recording(folder).told, Captions(folder, words.language)
    for at, token in enumerate(tokens):
        info, code = token.info.strip(), token.content
        if token.type != "fence" or info not in ("mermaid", "text lab", "text output", "text", ""):
            continue
        if info == "mermaid":
            num_diagrams += 1
            drawn = figure(code, num_diagrams, words)
        elif info == "text lab":
            caption = place.scenes.caption(tokens, at, words)
            drawn = f"<figure>{quoted(code, told, captions, words)}<figcaption>{caption}</figcaption></figure>"
        elif info == "text output":
            drawn = f"<figure>{printed(code)}<figcaption>{words('page.prints')}</figcaption></figure>"
        else:
            drawn = printed(code)
        tokens[at] = Token("html_block", "", 0, content=drawn, map=token.map)


def link_files(inline: Token, place: Place) -> None:
    """Links to texts are the site's own; those to other files lead to their pages. A quote's heading, and a link whose
    text is a definition's name, lead to the line, and a file that is named to its page."""
    linked: list[Token] = []
    children = [child for child in inline.children or [] if child.type != "text" or child.content]
    symbol = children[-2].content if len(children) > 2 and children[-1].type == "strong_close" else ""
    is_ours = depth = 0
    for at, child in enumerate(children):
        if child.type == "link_open":
            depth += 1
            link = str(child.attrs["href"])
            path, fragment = place.file_of(link), link.partition("#")[2]
            if path in TEXTS:
                child.attrs["href"] = f"/{TEXTS[path]}.md" + (f"#{fragment}" if fragment else "")
            elif path:
                if symbol and children[0].type == "strong_open" and not fragment and FILE.fullmatch(path):
                    fragment = f"L{line_of(path, symbol)}"
                elif not fragment and children[at + 1].type == "code_inline" and path.endswith(".py"):
                    fragment = line_named(path, children[at + 1].content)
                child, is_ours = opening(place.href(path, fragment)), 1
        elif child.type == "link_close":
            depth -= 1
            child, is_ours = (closing() if is_ours else child), 0
        named = child.type == "code_inline" and not depth and FILE.fullmatch(child.content)
        if named and (ROOT / child.content).is_file() and child.content not in TEXTS:
            linked += [opening(place.href(child.content)), child, closing()]
        else:
            linked.append(child)
    inline.children = linked


def line_named(path: str, symbol: str) -> str:
    """Of what a link's text names: `LLM.generate` in llm.py; "" where that is no definition of the file."""
    try:
        return f"L{line_of(path, symbol)}"
    except LookupError:
        return ""


def opening(href: str) -> Token:
    return Token("html_inline", "", 0, content=f'<a href="{href}">')


def closing() -> Token:
    return Token("html_inline", "", 0, content="</a>")
