"""python -m chapters slides: a deck and a handout for each chapter, made of its own text, pictures and quiz."""

import argparse
import html
from pathlib import Path

from rich.console import Console

from chapters.course import all_chapters, find_chapter

INTRODUCTION = """<p>→ and ← turn the slides, ↑ and ↓ change what a picture shows, <kbd>s</kbd> opens a window with the
speaker's notes, <kbd>f</kbd> fills the screen; <kbd>?</kbd> says this again. The browser prints a deck as PDF, a slide
to a page.</p>"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", type=int, nargs="*", metavar="N", help="the chapters (default: all)")
    parser.add_argument("--out", type=Path, default=Path("build/slides"), help="the folder (default: build/slides)")
    pages = "address of the course's pages, to which the slides link (default: ../site, beside the slides)"
    parser.add_argument("--site", default="../site", metavar="ADDRESS", help=pages)
    parser.add_argument("--pdf", action="store_true", help="also write PDFs, and check that each slide holds its text")


def run(args: argparse.Namespace, console: Console) -> int:
    from chapters.site import check_installed

    check_installed()
    from chapters.teaching.deck import slides_of
    from chapters.teaching.handout import handout_page
    from chapters.teaching.lesson import Lesson
    from chapters.teaching.paper import deck_page, page

    chapters = [find_chapter(number) for number in args.chapter] or all_chapters()
    args.out.mkdir(parents=True, exist_ok=True)
    rows, files = "", list[Path]()
    for chapter in chapters:
        lesson, name = Lesson.of(chapter), chapter.folder.name
        slides = slides_of(lesson, args.site)
        for kind, text in (("slides", deck_page(lesson, slides)), ("handout", handout_page(lesson))):
            files.append(args.out / f"{name}_{kind}.html")
            files[-1].write_text(text, "utf-8")
        links = f'<a href="{name}_slides.html">{len(slides)} slides</a>', f'<a href="{name}_handout.html">handout</a>'
        cells = (f"{chapter.number}", html.escape(chapter.title), *links)
        rows += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
    body = f'<main class="single"><h1>Slides and handouts</h1>{INTRODUCTION}<table>{rows}</table></main>'
    (args.out / "index.html").write_text(page("Slides and handouts", body), "utf-8")
    print(f"written: {args.out / 'index.html'}")
    return print_all(files) if args.pdf else 0


def print_all(files: list[Path]) -> int:
    """As PDF, beside the HTML. 1 where a slide or a page holds more than fits."""
    from chapters.teaching.paper import browser, faults, print_pdf

    found: list[str] = []
    with browser() as chromium:
        tab = chromium.new_page()
        for file in files:
            found += faults(tab, file)
            print_pdf(tab, file)
    for fault in found:
        print(fault)
    return 1 if found else 0
