"""A chapter's text for slides and handouts: fences as its pages draw them, and formulas as MathML."""

from typing import Any

from docutils.utils.math.latex2mathml import tex2mathml
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin

from chapters.site.diagrams import figure
from chapters.site.markdown import MARKDOWN as PLAIN
from chapters.site.markdown import highlight
from chapters.site.tables import printed, quoted
from chapters.words import ENGLISH


def fence(self: Any, tokens: list, at: int, options: Any, env: Any) -> str:
    info, code = tokens[at].info.strip(), tokens[at].content
    if info == "mermaid":
        return figure(code, 1)
    if info == "text lab":
        caption = env["scenes"].caption(tokens, at, ENGLISH)
        return f"<figure>{quoted(code, env['told'])}<figcaption>{caption}</figcaption></figure>\n"
    return printed(code) if info in ("", "text", "text output") else highlight(code, info, "")


def formula(tex: str, options: dict[str, bool]) -> str:
    """On one line, as all that stands in a sentence."""
    return " ".join(tex2mathml(tex, as_block=options["display_mode"]).split())


MARKDOWN = MarkdownIt("commonmark", PLAIN.options).enable("table").use(dollarmath_plugin, renderer=formula)
MARKDOWN.add_render_rule("fence", fence)
MARKDOWN.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>\n')
MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>\n")
