"""python -m chapters slides: decks of reveal.js, made of what the chapters' texts mark for them (deck.py)."""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from chapters.course import ROOT, Chapter, all_chapters, find_chapter

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ROOT / "site" / "assets"
THEME = ROOT.parent / "nanovllm" / "serving" / "http" / "page" / "theme.css"
SIZE = {"width": 1280, "height": 720}  # of a slide, in pixels; the browser makes it as large as its window
SETTINGS: dict[str, Any] = {
    "project": "nanovllm",
    "author": "the nanovllm authors",
    "extensions": ["sphinx_revealjs", "chapters.site.pages"],
    "root_doc": "index",
    "myst_enable_extensions": ["dollarmath"],
    "html_math_renderer": "mathml",
    "html_copy_source": False,
    "suppress_warnings": ["toc.not_included"],  # a deck belongs to no list of pages
    "revealjs_style_theme": "slides.css",
    "revealjs_css_files": ["theme.css", "course.css", "pictures.css"],
    "revealjs_script_files": ["revealjs/dist/reveal.js", "words.js", "course.js"],
    "revealjs_script_plugins": [{"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"}],
    "revealjs_script_conf": {
        **SIZE,
        "margin": 0,
        "center": False,
        "controls": False,
        "hash": True,
        "slideNumber": "c/t",
        "transition": "none",
        "pdfMaxPagesPerSlide": 1,
    },
}
INTRODUCTION = """# Slides and handouts

→ and ← turn the slides, F fills the screen, and S opens the speaker's window with the notes; ? lists the other keys.
A handout is the same deck without the notes and without what answers a question, to give to students. Both print from
the browser with `?view=print` at the end of the address, a slide to a page.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", type=int, nargs="*", metavar="N", help="the chapters (default: all)")
    parser.add_argument("--out", type=Path, default=Path("build/slides"), help="the folder (default: build/slides)")
    parser.add_argument("--pdf", action="store_true", help="also write PDFs, and check that each slide holds its text")


def run(args: argparse.Namespace, console: Console) -> int:
    from chapters.site import check_installed

    check_installed("sphinx_revealjs")
    chapters = [find_chapter(number) for number in args.chapter] or all_chapters()
    build(chapters, args.out)
    print(f"written: {args.out / 'index.html'}")
    if not args.pdf:
        return 0
    return print_all([args.out / f"{name}.html" for chapter in chapters for name in names_of(chapter)])


def names_of(chapter: Chapter) -> tuple[str, str]:
    """Of the teacher's deck, and of the students'."""
    return f"{chapter.folder.name}_slides", f"{chapter.folder.name}_handout"


def build(chapters: list[Chapter], folder: Path) -> None:
    """Raises ValueError with all that Sphinx warns of, and OSError if the folder cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    from chapters.site.build import run_sphinx, write_static
    from chapters.site.pages import Course
    from chapters.site.sources import Sources
    from chapters.site.text import Place
    from chapters.teaching.deck import deck_text, draw_slides

    course = Course({}, {}, Sources(), draw_slides)
    with tempfile.TemporaryDirectory() as temporary:
        texts, static = Path(temporary, "texts"), Path(temporary, "static")
        texts.mkdir()
        write_static(static)
        shutil.copyfile(ASSETS / "slides.css", static / "slides.css")
        rows = "| | chapter | | |\n|---|---|---|---|\n"
        for chapter in chapters:
            slides, handout = names_of(chapter)
            for name in (slides, handout):
                (texts / f"{name}.md").write_text(deck_text(chapter, for_teacher=name == slides), "utf-8")
                source = f"chapters/{chapter.folder.name}/README.md"
                course.places[name] = Place(source, f"{name}.html", course.sources)
            rows += f"| {chapter.number} | {chapter.title} | [slides]({slides}.md) | [handout]({handout}.md) |\n"
        (texts / "index.md").write_text(INTRODUCTION + rows, "utf-8")
        run_sphinx(course, texts, folder, "revealjs", SETTINGS | {"revealjs_static_path": [str(static)]})


def print_all(files: list[Path]) -> int:
    """As PDF, beside the HTML. 1 where a slide holds more than fits."""
    found: list[str] = []
    with browser() as chromium:
        tab = chromium.new_page(viewport=SIZE)
        for file in files:
            found += faults(tab, file)
            tab.goto(f"{file.resolve().as_uri()}?view=print")
            tab.wait_for_selector(".pdf-page")
            tab.pdf(path=file.with_suffix(".pdf"), prefer_css_page_size=True, print_background=True)
    for fault in found:
        print(fault)
    return 1 if found else 0


@contextmanager
def browser() -> Iterator[Any]:
    """Debian's chromium, or the one that playwright has installed. Raises ModuleNotFoundError and ValueError."""
    from playwright.sync_api import Error, sync_playwright

    from chapters.site.server import chromium

    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=chromium())
        except Error as error:
            raise ValueError(f"PDF takes chromium: {error}") from error
        yield opened
        opened.close()


def faults(tab: Any, file: Path) -> list[str]:
    """What does not fit on this deck's slides, by their numbers."""
    tab.set_viewport_size(SIZE)
    tab.goto(file.resolve().as_uri())
    found = tab.evaluate((ASSETS / "faults.js").read_text("utf-8"))
    return [f"{file.name}, {fault}" for fault in found]
