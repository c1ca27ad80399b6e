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
FORMULA = re.compile(
    r"```.*?```|`[^`]*`|\$\$(?P<block>.+?)\$\$|(?<!\w)\$(?P<inline>[^\s$`](?:[^$`\n]*[^\s$`])?)\$(?!\d)", re.DOTALL
)
SIGNS = {
    "left": "",
    "right": "",
    ",": "",
    "cdot": "·",
    "cdots": "...",
    "times": "×",
    "sum": "Σ",
    "top": "T",
    "lambda": "λ",
    "rho": "ρ",
    "tau": "τ",
}


def unfolded(text: str) -> str:
    """The same Markdown with every fold open: its sentence, in italics, and what was hidden."""
    return FOLD.sub(lambda fold: f"*{in_markdown(fold[1])}*\n\n{fold[2]}", text)


def in_markdown(sentence: str) -> str:
    return re.sub(r"</?code>", "`", sentence)


def spelled(text: str) -> str:
    """The same Markdown with formulas as one types them, in place of LaTeX."""

    def of_formula(found: re.Match[str]) -> str:
        formula = found["block"] or found["inline"]
        return f"`{typed(formula)}`" if formula else found[0]  # else it is code

    return FORMULA.sub(of_formula, text)


def typed(formula: str) -> str:
    """a^{k+1} is a^(k+1), \\frac{a}{1 - b} is a / (1 - b). The other LaTeX that the course has is in SIGNS."""
    formula = re.sub(r"\\text{([^{}]*)}", r"\1", formula)
    formula = re.sub(r"\\(\w+|,)", lambda sign: SIGNS.get(sign[1], sign[0]), formula)
    formula = re.sub(r"(\^|_)({[^{}]*})", lambda script: script[1] + grouped(script[2]), formula)
    formula = re.sub(r"\\sqrt({[^{}]*})", lambda root: f"√{grouped(root[1])}", formula)
    formula = re.sub(r"\\frac({[^{}]*})({[^{}]*})", lambda both: f"{grouped(both[1])} / {grouped(both[2])}", formula)
    return " ".join(formula.split())


def grouped(part: str) -> str:
    """Without its braces; in brackets if it is more than a name or a number."""
    inner = part[1:-1].strip()
    return inner if re.fullmatch(r"\w+", inner) else f"({inner})"


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
