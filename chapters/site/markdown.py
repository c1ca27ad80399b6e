"""Markdown outside the chapters' texts: what a quiz asks, a paper, a slide."""

from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from chapters.site.sources import highlighted


def highlight(code: str, language: str, _: Any) -> str:
    return f'<pre class="code highlight" tabindex="0"><code>{highlighted(code, language)}</code></pre>\n'


MARKDOWN = MarkdownIt("commonmark", {"html": False, "highlight": highlight}).enable("table")


def inline_html(markdown: str) -> str:
    """Of a line of a quiz, say."""
    return MARKDOWN.renderInline(markdown)


def plain(inline: Token) -> str:
    return "".join(child.content for child in inline.children or [])
