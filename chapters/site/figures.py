"""Pictures in a text: ![what it shows](drawn/name.svg) becomes what name() in the chapter's pictures.py draws.

A terminal shows the words, and GitHub the file, which `python -m chapters pictures` has made of the same function.
Where a number can be moved, the page has a picture for each of its values; all are drawn when the site is built, with
the engine's own functions. A text that belongs to no chapter shows the file, and so does a picture that takes torch
where there is none.
"""

import base64
import html
from pathlib import Path

from markdown_it.token import Token

from chapters.course import all_chapters
from chapters.pictures import drawing
from chapters.svg import Moved

FOLDER = "drawn/"


def picture_of(inline: Token, folder: Path) -> str:
    """A figure, or "" where the paragraph is no picture. Raises ValueError where nothing draws it."""
    if (image := drawn_image(inline)) is None:
        return ""
    path, caption = Path(str(image.attrs["src"])), caption_of(image)
    chapter = next((chapter for chapter in all_chapters() if chapter.folder == folder), None)
    if chapter is None:
        return embedded(folder / path, caption)
    try:
        drawn = drawing(chapter, path.stem)()
    except ImportError:  # it is drawn with torch, and pages are made without: the file is the same picture
        return embedded(folder / path, caption)
    return figure(drawn, caption)


def drawn_image(inline: Token) -> Token | None:
    """The image of a paragraph that has nothing else."""
    children = inline.children or []
    is_image = len(children) == 1 and children[0].type == "image" and FOLDER in str(children[0].attrs["src"])
    return children[0] if is_image else None


def caption_of(image: Token) -> str:
    return "".join(child.content or " " * (child.type == "softbreak") for child in image.children or [])


def embedded(path: Path, caption: str) -> str:
    """The file itself in the page: it moves, and its styles stay its own."""
    return f'<figure class="file">{image(path, caption)}</figure>\n'


def image(path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(caption)}">'


def embed_images(inline: Token, folder: Path) -> None:
    """Those within a line, such as a badge."""
    for at, child in enumerate(inline.children or []):
        if child.type == "image" and FOLDER in (source := str(child.attrs["src"])):
            drawn = Token("html_inline", "", 0, content=image(folder / source, caption_of(child)))
            inline.children[at] = drawn  # pyrefly: ignore[unsupported-operation]


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
