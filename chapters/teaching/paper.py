"""Decks and handouts as HTML files that hold all they need, and as PDF."""

import html
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chapters.course import ROOT
from chapters.teaching.lesson import Lesson
from chapters.teaching.sections import Slide

ASSETS, PAGES = Path(__file__).parent / "assets", ROOT / "site" / "assets"
SHARED = ROOT.parent / "nanovllm" / "serving" / "http" / "page"
LICENCE = "The nanovllm authors, CC BY 4.0"


def deck_page(lesson: Lesson, slides: list[Slide]) -> str:
    name = f"Chapter {lesson.chapter.number}: {lesson.chapter.title}"
    body = "".join(slide_html(slide, number, len(slides), name) for number, slide in enumerate(slides, start=1))
    script = (ASSETS / "deck.js").read_text("utf-8")
    return page(name, f"<main>{body}</main><script>{script}</script>", "deck.css")


def slide_html(slide: Slide, number: int, of: int, name: str) -> str:
    title = f"<h2>{slide.title}</h2>" if slide.title else "<div></div>"
    notes = "".join(f"<p>{note}</p>" for note in slide.notes)
    labs = f"In the lab: {slide.foot}" if slide.foot else ""
    foot = f'<span>{html.escape(name)}</span><span class="labs">{labs}</span><span>{number} / {of}</span>'
    return f"""<section class="slide {slide.kind}" aria-label="Slide {number}"><div class="face">{title}
<div class="body">{slide.body}</div>
<div class="foot">{foot}</div></div>
<aside class="notes" aria-label="Notes">{notes}</aside></section>
"""


def page(title: str, body: str, style: str = "") -> str:
    """One file: who copies it has all of it."""
    sheets = [SHARED / "theme.css", PAGES / "course.css", ASSETS / "paper.css", *([ASSETS / style] if style else [])]
    css = "\n".join(sheet.read_text("utf-8") for sheet in sheets)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><meta name="author" content="{LICENCE}">
<style>{css}</style></head>
<body>{body}</body></html>
"""


@contextmanager
def browser() -> Iterator[Any]:
    """Debian's chromium, or the one that playwright has installed. Raises ModuleNotFoundError and ValueError."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        except Error as error:
            raise ValueError(f"PDF takes chromium: {error}") from error
        yield chromium
        chromium.close()


def faults(tab: Any, file: Path) -> list[str]:
    """What does not fit on this deck's slides or this handout's pages, by their numbers."""
    tab.set_viewport_size({"width": 1280, "height": 720})
    tab.goto(file.resolve().as_uri())
    found = tab.evaluate((ASSETS / "faults.js").read_text("utf-8"))
    return [f"{file.name}, {fault}" for fault in found]


def print_pdf(tab: Any, file: Path) -> None:
    """The page that the tab has open, beside its HTML."""
    tab.pdf(path=file.with_suffix(".pdf"), prefer_css_page_size=True, print_background=True)
