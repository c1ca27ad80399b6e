"""A text for a terminal, which can neither hide nor draw anything.

What a text hides behind a sentence, for GitHub and pages, is

    <details><summary>The sentence, with <code>code</code>.</summary>

    What is hidden, in Markdown.

    </details>
"""

import html
import re
from pathlib import Path

FOLD = re.compile(r"<details><summary>(.*?)</summary>\n\n(.*?)\n\n</details>", re.DOTALL)
DIAGRAM = re.compile(r"```mermaid\n.*?accDescr \{(.*?)\}\n.*?```", re.DOTALL)
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
DESCRIBED = re.compile(r"<desc\b[^>]*>(.*?)</desc>", re.DOTALL)


def unfolded(text: str) -> str:
    """The same Markdown with every fold open: its sentence, in italics, and what was hidden."""
    return FOLD.sub(lambda fold: f"*{in_markdown(fold[1])}*\n\n{fold[2]}", text)


def in_markdown(sentence: str) -> str:
    return re.sub(r"</?code>", "`", sentence)


def described(text: str, path: Path) -> str:
    """The same Markdown with what pictures say of themselves in their place. path: the text's file.

    They say it to readers who cannot see them: a diagram in its accDescr, an SVG file in its desc, beside the text in
    brackets. A file's desc is in English; a translation has the text in brackets only.
    """
    is_translated = path.name != "README.md"

    def of_picture(picture: re.Match[str]) -> str:
        found = None if is_translated else DESCRIBED.search((path.parent / picture[2]).read_text("utf-8"))
        return quoted(f"{picture[1].removesuffix('.')}. {html.unescape(found[1]) if found else ''}")

    return PICTURE.sub(of_picture, DIAGRAM.sub(lambda diagram: quoted(diagram[1]), text))


def quoted(said: str) -> str:
    return f"> *{' '.join(said.split())}*"
