"""python -m chapters pictures: draw the pictures that the texts show, as SVG files beside them.

A chapter's pictures.py has a function for each file of its drawn/ folder, by the same name; those of the repository's
README are in overview.py and terminal.py. A file has the site's colors, light and dark. It needs nothing else.
"""

import argparse
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from chapters.course import ROOT, Chapter, all_chapters
from chapters.nano_engine.steps import NANO
from chapters.svg import WIDTH, Moved, words

FOLDER = "drawn"  # beside each README.md
IMAGE = re.compile(rf"!\[[^\]]*\]\((?:chapters/)?{FOLDER}/(\w+)\.svg\)")
THEME = ROOT.parent / "nanovllm" / "serving" / "http" / "page" / "theme.css"
STYLE = ROOT / "site" / "assets" / "course.css"
MARGIN = 12
SHOWN = 480  # pixels: the width of a picture where there is room for it
HEAD = re.compile(r'<svg class="picture" viewBox="0 0 \S+ (\S+)"')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true", help="run the quickstart first, and keep what it prints")


def run(args: argparse.Namespace, console: Console) -> int:
    if args.record:
        from chapters import terminal

        terminal.record()
    files = wanted()
    for path, draw in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(draw(), "utf-8")
    console.print(f"drawn: {len(files)} pictures")
    return 0


def wanted() -> dict[Path, Callable[[], str]]:
    """Every file that a text shows, and what gives its content."""
    from chapters import overview, terminal

    files: dict[Path, Callable[[], str]] = {
        ROOT / FOLDER / "engine.svg": lambda: standalone(overview.engine()),
        ROOT / FOLDER / "quickstart.svg": terminal.draw,
    }
    for chapter in [*all_chapters(), NANO]:
        for name in IMAGE.findall((chapter.folder / "README.md").read_text("utf-8")):
            files[chapter.folder / FOLDER / f"{name}.svg"] = partial(of_nobody, drawing(chapter, name))
    return files


def drawing(chapter: Chapter, name: str) -> Callable[[], str | Moved]:
    """What draws a chapter's picture. Raises ValueError if nothing does."""
    draw = getattr(chapter.module("pictures"), name, None)
    if draw is None:
        raise ValueError(f"{chapter.folder.name}/README.md shows {FOLDER}/{name}.svg, and pictures.py has no {name}()")
    return draw


def of_nobody(draw: Callable[[], str | Moved]) -> str:
    """The file of a picture, without the speeds of this machine, which labs note and some pictures show."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_DATA_HOME=folder):  # no lab has noted any
        drawn = draw()
    if isinstance(drawn, str):
        return standalone(drawn)
    frame = drawn.frames[drawn.first or -1]  # what begins with its first picture is a story: its end shows the most
    return standalone(frame.picture, f"{drawn.what}: {frame.setting}")


def standalone(picture: str, heading: str = "") -> str:
    """What chapters.svg.svg() has made, as a file. heading: a line above it."""
    match = HEAD.match(picture)
    assert match is not None, picture[:80]
    top = -MARGIN - 18 * bool(heading)
    width, height = WIDTH + 2 * MARGIN, float(match[1]) + MARGIN - top
    size = f'width="{SHOWN}" height="{SHOWN * height / width:.0f}"'
    box = f'viewBox="{-MARGIN} {top} {width} {height:g}"'
    paper = f'<rect class="paper" x="{-MARGIN}" y="{top}" width="{width}" height="{height:g}" rx="6"/>'
    above = words(2, top + 20, heading, "name") if heading else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" {size} {box}'
    body = picture[match.end() :].removesuffix("</svg>")
    attributes, _, rest = body.partition(">")
    title = rest[: rest.index("</desc>") + len("</desc>")]
    drawing = paper + above + rest[len(title) :]
    lines = "\n".join(re.split(r"(?<=>)(?=<(?:rect|path|text|circle|polyline|line|g)\b)", drawing))
    return f"{head}{attributes}>\n{title}\n<style>\n{style(drawing)}</style>\n{lines}\n</svg>\n"


def style(drawing: str) -> str:
    """The site's rules for pictures of which a class or an element is in this one, and the colours that they name."""
    page = STYLE.read_text("utf-8")
    rules = re.findall(r"^.*\.picture .*$", page, re.MULTILINE)
    rules = [rule for line in rules for rule in re.findall(r"[^{}]+\{[^{}]*\}", line)]
    rules = [rule.strip() for rule in rules if rule.strip().startswith(".picture ")]
    used = {name for names in re.findall(r'class="([^"]*)"', drawing) for name in names.split()}
    used |= set(re.findall(r"<(\w+)", drawing))
    rules = [rule for rule in rules if used & set(re.findall(r"[\w-]+", rule.split("{")[0].removeprefix(".picture")))]
    names = set(re.findall(r"var\((--[\w-]+)", " ".join(rules))) | {"--bg", "--fg", "--line"}
    named = [each for css in (THEME.read_text("utf-8"), page) for each in colours(css) if each[0] in names]
    light = " ".join(f"{name}: {value};" for name, value, _ in named)
    dark = " ".join(f"{name}: {value};" for name, _, value in named if value)
    return "\n".join(
        [
            f"svg {{ color-scheme: light dark; {light} font: 11.5px sans-serif; fill: var(--fg); }}",
            f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}",
            ".paper { fill: var(--bg); stroke: var(--line); }",
            *rules,
            "",
        ]
    )


def colours(css: str) -> list[tuple[str, str, str]]:
    """(name, in light, in dark); "" for what is the same in both."""
    found = re.findall(r"(--[\w-]+): (?:light-dark\((#\w+),\s(#\w+)\)|(\d+%));", css)
    return [(name, light or same, dark) for name, light, dark, same in found]
