"""The course's extension of Sphinx: what its pages have beside the text.

text.py          tables of a lab, diagrams, pictures that move, questions before an answer (tokens of MyST-Parser)
wrapping.py      what is kept whole where a line breaks
sources.py       pages of the files that a text links to
mathml           formulas as MathML, which browsers draw themselves: docutils has the converter
course.js, course.css, and the scripts of labs, exercises and the model
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from myst_parser.mdit_to_docutils.sphinx_ import SphinxRenderer
from myst_parser.parsers.mdit import create_md_parser
from myst_parser.parsers.sphinx_ import MystParser
from sphinx import addnodes
from sphinx.application import Sphinx

from chapters.site import labs
from chapters.site.model import section as model
from chapters.site.sources import Sources
from chapters.site.text import Place, extend
from chapters.site.wrapping import wrapped
from chapters.words import languages

SCRIPTS, STYLES = (*labs.SCRIPTS, model.SCRIPT), (*labs.STYLES, model.STYLE)  # of labs and exercises

LONGEST_TERM = 4  # words; what is longer in italics is a title or a sentence

Context = dict[str, Any]


@dataclass
class Course:
    """What Sphinx makes pages of.

    places: of the texts, by their names in the site. made: pages of other things, written as Markdown once the texts
    before them have been read. sources: the files that texts link to. draw: what the tokens of a text become.
    """

    places: dict[str, Place]
    made: dict[str, Callable[[], str]]
    sources: Sources
    draw: Callable[[list[Token], Place], list[Token]] = extend


class Pages(Sphinx):
    """Sphinx, with the course that it makes pages of."""

    def __init__(self, course: Course, **options: Any) -> None:
        self.course = course
        super().__init__(**options)


class CourseParser(MystParser):
    """MyST, with a rule for the texts of the repository: for pages, that of text.py."""

    course: Course

    def parse(self, inputstring: str, document: nodes.document) -> None:
        env = document.settings.env
        parser = create_md_parser(env.myst_config, SphinxRenderer)
        parser.options["document"] = document
        if place := self.course.places.get(env.docname):

            def rule(state: StateCore) -> None:
                state.tokens = self.course.draw(state.tokens, place)

            parser.core.ruler.push("course", rule)
        parser.render(inputstring)
        if re.fullmatch(r"ch\d+_\w+/index", env.docname):
            index_terms(document)


def index_terms(document: nodes.document) -> None:
    """A chapter has a term in italics where it says what it means: a search for the term leads there first."""
    sections: dict[str, nodes.section] = {}
    for term in document.findall(nodes.emphasis):
        parent: Any = term.parent
        while not isinstance(parent, nodes.section):
            parent = parent.parent
        words = term.astext().lower().split()
        if len(words) <= LONGEST_TERM:
            sections.setdefault(" ".join(words), parent)
    for name, section in sections.items():
        section += addnodes.index(entries=[("single", name, section["ids"][0], "main", None)])


def draw_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def draw_block(translator: Any, node: nodes.math_block) -> None:
    drawn = tex2mathml(node.astext(), as_block=True)
    translator.body.append(f'<div class="formula" tabindex="0" role="group" aria-label="formula">{drawn}</div>')
    raise nodes.SkipNode


def language_of(page: str) -> str:
    """index.de -> de"""
    language = page.rpartition("/")[2].partition(".")[2]
    return language if language in languages() else "en"


def add_parts(app: Sphinx, pagename: str, templatename: str, context: Context, doctree: nodes.document | None) -> None:
    """The page's language, and the scripts of what it has; the way to the next page ends where its language does."""
    context["language"] = language_of(pagename)
    for way in ("prev", "next"):
        other = context.get(way)
        if other and language_of(other["link"].removesuffix(".html")) != context["language"]:
            context[way] = None
    if doctree is not None:
        context["body"] = wrapped(context["body"])
    name = pagename.rpartition("/")[2].partition(".")[0]
    if name in ("lab", "exercises"):
        for style in STYLES:
            app.add_css_file(style)
        for script in SCRIPTS:
            app.add_js_file(script, type="module", priority=900)  # after course.js, whose functions they use


def setup(app: Pages) -> dict[str, Any]:
    course = app.course
    trees: dict[int, Callable[..., str]] = {}

    def share_tree(app: Sphinx, pagename: str, templatename: str, context: Context, doctree: object) -> None:
        """Files are not in the tree of all pages: in the same depth of folders, each shows the same one."""
        if pagename.startswith("source/"):
            context["toctree"] = trees.setdefault(pagename.count("/"), cache(context["toctree"]))

    def make(app: Sphinx, docname: str, content: list[str]) -> None:
        if docname in course.made:
            content[0] = course.made[docname]()

    def show_sources(app: Sphinx) -> Iterator[tuple[str, Context, str]]:
        for name, title, body in course.sources.pages():
            yield name, {"title": title, "body": body}, "page.html"

    app.setup_extension("myst_parser")
    app.add_source_parser(type("Parser", (CourseParser,), {"course": course}), override=True)
    app.add_html_math_renderer("mathml", (draw_inline, None), (draw_block, None))
    app.connect("source-read", make)
    app.connect("html-page-context", add_parts)
    app.connect("html-page-context", share_tree, priority=400)  # the theme asks for the tree at 500
    app.connect("html-collect-pages", show_sources)
    return {"version": "1"}
