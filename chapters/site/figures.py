"""Pictures in a chapter's text: [Picture: what it shows](pictures.py "name") becomes what name() in pictures.py draws.

In a terminal and on GitHub it is a link to what draws it. Where a number can be moved, the page has a picture for each
of its values; all are drawn when the site is built, with the engine's own functions.
"""

import html
from pathlib import Path

from markdown_it.token import Token

from chapters.course import all_chapters
from chapters.svg import Moved

BEGINNING = "Picture: "


def picture_of(inline: Token, folder: Path) -> str:
    """A figure, or "" where the paragraph is no link to a picture. Raises AttributeError where nothing draws it."""
    children = inline.children or []
    if len(children) < 3 or children[0].attrs.get("href") != "pictures.py":
        return ""
    caption = "".join(child.content or " " * (child.type == "softbreak") for child in children).removeprefix(BEGINNING)
    chapter = next(chapter for chapter in all_chapters() if chapter.folder == folder)
    return figure(getattr(chapter.module("pictures"), str(children[0].attrs["title"]))(), caption)


def figure(drawn: str | Moved, caption: str) -> str:
    body = drawn if isinstance(drawn, str) else moved(drawn)
    caption = html.escape(caption[:1].upper() + caption[1:])
    return f'<figure class="drawn">{body}<figcaption>{caption}</figcaption></figure>\n'


def moved(drawn: Moved) -> str:
    """Without JavaScript all its pictures are seen, one below the other."""
    frames = "".join(
        f'<div class="frame" data-setting="{html.escape(frame.setting)}"{" hidden" * (at != drawn.first)}>'
        f"{frame.picture}<p>{html.escape(frame.text)}</p></div>"
        for at, frame in enumerate(drawn.frames)
    )
    first = drawn.frames[drawn.first].setting
    return (
        f'<div class="moved"><div class="mover" hidden><button type="button" class="less" aria-label="back">◀</button>'
        f'<label>{html.escape(drawn.what)}: <output>{html.escape(first)}</output><input type="range" min="0" '
        f'max="{len(drawn.frames) - 1}" value="{drawn.first}" aria-valuetext="{html.escape(first)}"></label>'
        f'<button type="button" class="more" aria-label="on">▶</button></div>'
        f'<div class="frames" aria-live="polite">{frames}</div></div>'
    )
