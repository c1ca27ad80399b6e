"""BarBelowCell: rich's progress bar in a notebook, where the output of a cell is no terminal (chapter 2)."""

import time
from typing import Any

from IPython.display import display
from rich.progress import Progress, TaskID

SECONDS_BETWEEN_PICTURES = 0.1


class BarBelowCell(Progress):
    """An output of the cell, replaced in place. It is saved with the notebook, and whatever shows notebooks shows it.

    rich's own way needs ipywidgets and a thread, and a notebook that is opened again shows no bar.
    """

    def start(self) -> None:
        self._picture, self._next_s = display(self, display_id=True), 0.0

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if time.monotonic() >= self._next_s:
            self._picture.update(self)
            self._next_s = time.monotonic() + SECONDS_BETWEEN_PICTURES

    def stop(self) -> None:
        self._picture.update(self)
