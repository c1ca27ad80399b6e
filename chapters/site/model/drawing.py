"""HTML of lessons with a model: tokens in a row, and bars."""

from collections.abc import Iterable
from html import escape


def token(piece: str, kind: str = "", share: float | None = None, note: str = "") -> str:
    """A token of a text. share: from 0 to 1, how deep its colour is."""
    depth = "" if share is None else f' style="--share:{share:.0%}"'
    below = f"<small>{escape(note)}</small>" if note else ""
    return f'<span class="token {kind}"{depth}><b>{escape(piece)}</b>{below}</span>'


def text(tokens: Iterable[str]) -> str:
    return f'<p class="tokens">{"".join(tokens)}</p>'


def bar(share: float, largest: float, kind: str = "") -> str:
    """As long as the share is, compared with the largest."""
    width = 100 * share / largest if largest else 0.0
    return f'<span class="length {kind}"><i style="width:{width:.1f}%"></i></span>'


def percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 or share == 0 else "< 0.1%"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are HTML."""
    names = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    inside = f"<thead><tr>{names}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0"><table class="shares">{inside}</table></div>'
