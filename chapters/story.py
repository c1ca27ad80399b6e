"""Story: what the cells of a lab tell. A terminal prints it; a notebook in a browser shows it below the cell.

What is told is also kept as data: a page draws from it what the terminal drew.
"""

import html
import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from chapters.course import Progress, find_chapter
from chapters.recording import Told
from chapters.sheet import MEASURED, Histogram, Levels, Sheet
from nanovllm import LLM

WIDTH, NEWLINE = 100, "\n"
# A terminal's colors, red to white, as bright as one another: each can be read on white, and black on each.
COLORS = [
    (0, 0, 0),
    (235, 0, 0),
    (0, 138, 0),
    (134, 118, 0),
    (85, 105, 255),
    (205, 0, 205),
    (0, 132, 132),
    (255, 255, 255),
]
THEME = TerminalTheme(
    (255, 255, 255), (0, 0, 0), COLORS, [(min(r + 40, 255), min(g + 40, 255), min(b + 40, 255)) for r, g, b in COLORS]
)
# What they are as colors of a text on a dark page: half as far from white.
ON_DARK = {
    f"#{r:02x}{g:02x}{b:02x}": f"rgb({(r + 255) // 2} {(g + 255) // 2} {(b + 255) // 2})" for r, g, b in COLORS[1:-1]
}
HEADING = ' style="font-size: 1.4rem; font-weight: 600; margin: 0.5rem 0"'
PRINTED = ' style="overflow-x: auto; line-height: 1.25; font-size: 0.8rem; white-space: pre"'

T = TypeVar("T")


class Story:
    """Shows a lab's parts. What a lab measures on this machine is marked: say(..., measured=True)."""

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self._console = Console(width=WIDTH, highlight=False)
        self.contexts = ExitStack()
        self.told: list[Told] = []

    @property
    def model(self) -> str:
        """The checkpoint to work on: the one that was named, or the demo checkpoint."""
        from nanovllm.tools.demo_model import demo_model_path

        return self._model or str(demo_model_path())

    def load(self, **options: Any) -> LLM:
        with busy(f"loading {self.model}"):
            return LLM(self.model, **options)

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enter it until the lab ends."""
        return self.contexts.enter_context(context)

    def note_machine(self, chapter: int, speeds: dict[str, float]) -> None:
        """What the lab has measured of this machine: the course remembers it, and pictures built here show it."""
        Progress().note(find_chapter(chapter), machine=speeds)

    def part(self, title: str) -> None:
        """Begin a part."""
        num_parts = sum(kind == "part" for kind, _ in self.told)
        with silent():
            if marimo := notebook():
                marimo.output.append(marimo.Html(f"<h2{HEADING}>{html.escape(plain(title))}</h2>"))
            else:
                self._console.rule(f"[bold]{num_parts + 1}. {title}", align="left")
        if _lines:
            _lines[-1].update(escape(title))
        self.told.append(("part", title))

    def say(self, text: str, measured: bool = False) -> None:
        """A paragraph. measured: its numbers are of this machine and this run, and differ elsewhere."""
        with silent():
            shown_text = f"{text}{f' [dim]{MEASURED}[/]' if measured else ''}"
            if marimo := notebook():
                marimo.output.append(
                    marimo.Html(f'<p style="white-space: pre-wrap">{as_html(shown_text, width=10_000)}</p>')
                )
            else:
                self._console.print(f"{shown_text}\n")
        said = plain(text).strip("\n") + f" {MEASURED}" * measured
        for paragraph in said.split("\n\n"):
            self.told.append(("print" if paragraph.startswith(" ") or "\n" in paragraph else "say", paragraph))

    def log(self, *lines: str) -> None:
        """What happened, a line each."""
        with silent():
            if marimo := notebook():
                marimo.output.append(marimo.Html(f"<pre{PRINTED}>{html.escape(NEWLINE.join(lines))}</pre>"))
            else:
                for line in lines:
                    self._console.print(line, style="dim", markup=False)
                self._console.print()
        self.told.append(("print", "\n".join(lines)))

    def show(self, renderable: Any) -> None:
        """A table, a panel, whatever rich can draw."""
        with silent():
            if marimo := notebook():
                marimo.output.append(marimo.Html(f"<pre{PRINTED}>{as_html(renderable)}</pre>"))
            else:
                self._console.print(renderable)
                self._console.print()
        self.told += shown(renderable)


def notebook() -> Any:
    """marimo, if a notebook runs this cell; None in a terminal."""
    marimo = sys.modules.get("marimo")
    return marimo if marimo is not None and marimo.running_in_notebook() else None


def as_html(renderable: Any, width: int = WIDTH, markup: bool = True) -> str:
    """What a terminal of this width would show, in its colors."""
    console = Console(width=width, highlight=False, markup=markup, record=True, file=io.StringIO(), force_jupyter=False)
    console.print(renderable, soft_wrap=width > WIDTH)
    drawn = console.export_html(theme=THEME, inline_styles=True, code_format="{code}").rstrip()
    return re.sub(
        f"(?<!-)color: ({'|'.join(ON_DARK)})", lambda text: f"color: light-dark({text[1]}, {ON_DARK[text[1]]})", drawn
    )


def shown(renderable: Any) -> list[Told]:
    """Tables, histograms and levels as data, everything else as the terminal has it."""
    if isinstance(renderable, Histogram | Levels):
        return [(type(renderable).__name__.lower(), asdict(renderable))]
    if isinstance(renderable, Group):
        return [told for each in renderable.renderables for told in shown(each)]
    if isinstance(renderable, Table):
        columns = [plain(column.header) for column in renderable.columns]
        cells = [[plain(cell) for cell in column.cells] for column in renderable.columns]
        rows = [list(row) for row in zip(*cells, strict=True)]
        return [("table", asdict(Sheet(columns, rows, plain(renderable.title or ""))))]
    drawn = Console(width=WIDTH, highlight=False, file=io.StringIO())
    drawn.print(renderable)
    assert isinstance(drawn.file, io.StringIO)
    return [("print", "\n".join(line.rstrip() for line in drawn.file.getvalue().rstrip().split("\n")))]


def plain(text: Any) -> str:
    return text.plain if isinstance(text, Text) else Text.from_markup(str(text)).plain


_lines: list[Status] = []  # what is being done, outermost first; the last one is on the screen


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Says what a lab is doing, in a line of the terminal that goes when it is done. Elsewhere it says nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with silent():
        line = console.status(what, refresh_per_second=2)  # seldom, since labs measure times
        _lines.append(line)
        line.start()
        try:
            yield
        finally:
            line.stop()
            _lines.remove(line)


@contextmanager
def silent() -> Iterator[None]:
    """Without that line: something else is printed."""
    line = _lines[-1] if _lines else None
    if line:
        line.stop()
    try:
        yield
    finally:
        if line:
            line.start()


def with_progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The same items; the line says how far along they are."""
    with busy(what):
        for number, item in enumerate(items, 1):
            if _lines:
                _lines[-1].update(f"{what}: {number} of {len(items)}")
            yield item


def stopwatch(work: Callable[[], object]) -> float:
    """Seconds that this takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def left_empty(llm: LLM) -> Iterator[None]:
    """At the end the engine has no request and an empty prefix cache, even if somebody has stopped the cell."""
    try:
        yield
    finally:
        llm.engine.abort_requests(list(llm.engine.requests.values()))
        llm.reset_prefix_cache()


@contextmanager
def one_core() -> Iterator[None]:
    """One thread: steadier times where other programs run, since no thread waits for another one."""
    import torch  # labs without a model start without it

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
