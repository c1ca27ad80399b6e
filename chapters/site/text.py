"""A README.md as HTML: the text as it stands, with links into the site, highlighted code and drawn diagrams."""

import html
import posixpath
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from chapters.recording import Recording
from chapters.site import formulas
from chapters.site.diagrams import figure
from chapters.site.expectations import cover
from chapters.site.figures import picture_of
from chapters.site.pages import relative
from chapters.site.scenes import Scenes
from chapters.site.sources import ROOT, Sources, highlighted, line_of
from chapters.site.tables import LONG, printed, quoted
from chapters.words import ENGLISH, Captions, Words

NOTES = "running.html"  # the sections of chapters/README.md on how to run and teach the course: landing.py
FILE = re.compile(r"(nanovllm|chapters|examples|tests)/[\w/]+\.\w+")  # named in a text


@dataclass
class Text:
    """Of one file: its title, its headings of the second level as (id, HTML), and its HTML without the title."""

    title: str
    headings: list[tuple[str, str]] = field(default_factory=list)
    body: str = ""


@dataclass
class Place:
    """Where a text comes from (a path in the repository) and where it goes (a path in the site)."""

    source: str
    target: str
    sources: Sources
    scenes: Scenes = field(default_factory=Scenes)
    names: set[str] = field(default_factory=set)  # ids of headings, each once
    words: Words = ENGLISH

    def href(self, link: str) -> str:
        """Raises FileNotFoundError."""
        path, _, fragment = link.partition("#")
        if not path or ":" in path:
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self.source), path))
        place = NOTES if path == "chapters/README.md" and fragment else self.sources.place_of(path)
        return relative(place, self.target) + (f"#{fragment}" if fragment else "")

    def name(self, heading: str) -> str:
        """An id as GitHub makes it, so that links inside a text lead to the same place there and here."""
        name = base = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        count = 0
        while name in self.names:
            count += 1
            name = f"{base}-{count}"
        self.names.add(name)
        return name


def render(place: Place) -> Text:
    return render_text((ROOT / place.source).read_text("utf-8"), place)


def render_text(markdown: str, place: Place) -> Text:
    tokens, text = MARKDOWN.parse(markdown), Text("")
    name_cells(tokens)
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            inline = tokens[at + 1]
            token.attrSet("id", place.name(plain(inline)))
            if token.tag == "h2":
                text.headings.append((str(token.attrs["id"]), MARKDOWN.renderer.render([inline], MARKDOWN.options, {})))
        elif token.type == "inline" and (drawn := picture_of(token, (ROOT / place.source).parent)):
            nothing = Token("text", "", 0)
            tokens[at - 1 : at + 2] = [Token("html_block", "", 0, content=drawn), nothing, nothing]
        elif token.type == "inline":
            link_files(token, place)
            place.scenes.link(token)
        elif token.type == "th_open" and not tokens[at + 1].content:
            token.tag = tokens[at + 2].tag = "td"  # it heads nothing
    end = next(at for at, token in enumerate(tokens) if token.type == "heading_close")
    folder, words = (ROOT / place.source).parent, place.words
    env = {"told": Recording(folder).told, "scenes": place.scenes, "words": words}
    env["captions"] = Captions(folder, words.language)
    text.title = plain(tokens[end - 1])
    text.body = MARKDOWN.renderer.render(cover(tokens[end + 1 :], inline_html, words), MARKDOWN.options, env)
    return text


def name_cells(tokens: list[Token]) -> None:
    """Each cell of a table knows its heading, and a table of long texts that a phone stacks it."""
    table, names, cells = Token("table_open", "table", 1), list[str](), list[str]()
    for token, inside in pairwise(tokens):
        if token.type == "table_open":
            table, names, cells = token, [], []
        elif token.type == "th_open":
            names.append(plain(inside))
        elif token.type == "td_open":
            token.attrSet("data-name", names[len(cells) % len(names)])
            cells.append(plain(inside))
        elif token.type == "table_close":
            columns = [cells[at :: len(names)] for at in range(len(names))]
            if sum(max(map(len, column), default=0) > LONG for column in columns) > 2:
                table.attrSet("class", "stack")


def inline_html(markdown: str) -> str:
    """Of a line of a quiz, say."""
    return MARKDOWN.renderInline(markdown)


def plain(inline: Token) -> str:
    return "".join(child.content for child in inline.children or [])


def link_files(inline: Token, place: Place) -> None:
    """Links lead into the site. A quote's heading leads to the line, and a file that is named to its page."""
    linked, depth = [], 0
    children = [child for child in inline.children or [] if child.type != "text" or child.content]
    symbol = children[-2].content if len(children) > 2 and children[-1].type == "strong_close" else ""
    for child in children:
        if child.type == "link_open":
            link, depth = str(child.attrs["href"]), depth + 1
            href = place.href(link)
            quoted = symbol and children[0].type == "strong_open" and "#" not in href and FILE.search(link)
            child.attrs["href"] = f"{href}#L{line_of(quoted[0], symbol)}" if quoted else href
        depth -= child.type == "link_close"
        named = child.type == "code_inline" and not depth and FILE.fullmatch(child.content)
        if named and (ROOT / child.content).is_file():
            attrs: dict[str, str | int | float] = {"href": place.href(relative(child.content, place.source))}
            linked += [Token("link_open", "a", 1, attrs=attrs), child, Token("link_close", "a", -1)]
        else:
            linked.append(child)
    inline.children = linked


def fence(self: Any, tokens: list[Token], at: int, options: Any, env: Any) -> str:
    info, code = tokens[at].info.strip(), tokens[at].content
    words = env.get("words", ENGLISH)
    if info == "mermaid":
        return figure(code, sum(token.info.strip() == info for token in tokens[: at + 1]), words)
    if info == "text lab":
        caption = env["scenes"].caption(tokens, at, words)
        drawn = quoted(code, env["told"], env.get("captions"), words)
        return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>\n"
    if info == "text output":
        return f"<figure>{printed(code)}<figcaption>{words('page.prints')}</figcaption></figure>\n"
    if info == "text formula":
        return formulas.figure(code)
    if info in ("", "text"):
        return printed(code)
    return f'<pre class="code" tabindex="0"><code>{highlighted(code, info)}</code></pre>\n'


def sentence(self: Any, tokens: list[Token], at: int, options: Any, env: Any) -> str:
    """Only a text has formulas: what a quiz or a heading says is also told elsewhere, letter for letter."""
    said = tokens[at].content
    return formulas.in_sentence(said) if "scenes" in env else html.escape(said, quote=False)


def table_open(self: Any, tokens: list[Token], at: int, options: Any, env: Any) -> str:
    number = sum(token.type == "table_open" for token in tokens[: at + 1])
    kind = self.renderAttrs(tokens[at])
    name = env.get("words", ENGLISH)("page.table_number", number=number)  # a quiz has none
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{name}"><table{kind}>\n'


MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
MARKDOWN.add_render_rule("fence", fence)
MARKDOWN.add_render_rule("text", sentence)
MARKDOWN.add_render_rule("table_open", table_open)
MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>\n")
