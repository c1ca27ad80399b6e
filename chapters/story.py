"""Story: how a lab tells what it does. In a terminal it waits between its parts; plain, it prints them all."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from nanovllm import LLM

WIDTH = 100


class Story:
    """Prints a lab's parts. What a lab measures on this machine is marked: say(..., measured=True)."""

    def __init__(self, model: str | None = None, plain: bool = True) -> None:
        self._model, self._plain, self._num_parts = model, plain, 0
        self.console = Console(width=WIDTH, highlight=False)

    @property
    def model(self) -> str:
        """The checkpoint to work on: the one that was named, or the demo checkpoint."""
        from nanovllm.tools.demo_model import demo_model_path

        return self._model or str(demo_model_path())

    def load(self, **options: Any) -> LLM:
        with Console(stderr=True).status(f"loading {self.model}"):
            return LLM(self.model, **options)

    def part(self, title: str) -> None:
        """Begin a part; before all but the first, wait for Enter in a terminal."""
        if self._num_parts and not self._plain and sys.stdin.isatty():
            self.console.input("\n[dim]Enter goes on[/] ")
        self._num_parts += 1
        self.console.rule(f"[bold]{self._num_parts}. {title}", align="left")

    def say(self, text: str, measured: bool = False) -> None:
        """A paragraph. measured: its numbers are of this machine and this run, and differ elsewhere."""
        self.console.print(f"{text}{' [dim](measured)[/]' if measured else ''}\n")

    def log(self, *lines: str) -> None:
        """What happened, a line each."""
        for line in lines:
            self.console.print(line, style="dim")
        self.console.print()

    def show(self, renderable: Any) -> None:
        """A table, a panel, whatever rich can draw."""
        self.console.print(renderable)
        self.console.print()


def stopwatch(work: Callable[[], object]) -> float:
    """Seconds that this takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


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
