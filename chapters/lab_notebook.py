"""A chapter's lab is a marimo notebook (lab.py): opened in a browser, or run from top to bottom in a terminal.

marimo runs it in the browser and as a script. run() needs no marimo: a notebook in marimo's format is Python functions,
one a cell, whose bodies share their names; in our notebooks a cell comes after those that it needs.
"""

import ast
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from chapters import recording
from chapters.course import ROOT, Chapter
from chapters.story import Story

_running: list[Story] = []  # the story that run() tells
NOTHING: dict[str, Any] = {}
WAITS = "The parts below wait for the button above. Until it is pressed, each says that its ancestor was stopped."


def the_story(start: Any = None) -> Story:
    """What a notebook's cells tell their parts to. start: a button that must have been pressed before.

    `-- --model NAME` after marimo's own command names the checkpoint.
    """
    if _running:
        return _running[-1]
    import marimo

    waits = start is not None and marimo.running_in_notebook() and not start.value
    marimo.stop(waits, marimo.md(WAITS))
    model = marimo.cli_args().get("model")
    return Story(str(model) if model else None)


def cells(path: Path) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Name and statements of each cell, the imports first (`with app.setup`)."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.With):
            yield "setup", node.body
        elif isinstance(node, ast.FunctionDef):
            yield node.name, [statement for statement in node.body if not isinstance(statement, ast.Return)]


def run(
    path: Path,
    story: Story,
    given: Mapping[str, Any] = NOTHING,
    around: Callable[[str], contextlib.AbstractContextManager[Any]] = lambda name: contextlib.nullcontext(),
) -> None:
    """Run all cells here. given: values for names in place of the notebook's; around: a context for each cell."""
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    _running.append(story)
    try:
        with story.contexts:
            for name, body in cells(path):
                with around(name):
                    exec(compile(ast.Module(body, []), str(path), "exec"), names)
                names.update({known: given[known] for known in given.keys() & names.keys()})
    finally:
        _running.pop()


def write(chapter: Chapter, model: str | None = None) -> None:
    """Run the lab here, and keep what it tells (story.json). Prints nothing.

    A lab that measures has check_recording(recording), which raises ValueError for figures that only a busy machine
    gives: the text beside them would be wrong.
    """
    story = Story(model)
    with contextlib.redirect_stdout(io.StringIO()):
        run(chapter.folder / "lab.py", story)
    parts = chapter.module("lab_parts") if (chapter.folder / "lab_parts.py").exists() else object()
    check = getattr(parts, "check_recording", None)
    if check is not None:
        try:
            check(recording.Recording(chapter.folder, story.told))
        except ValueError as error:
            raise ValueError(f"lab {chapter.number} is not kept: {error}. Is this machine busy?") from None
    recording.write(chapter.folder, story.told)


def open_in_browser(path: Path, model: str | None) -> int:
    """Open the notebook in marimo's editor until Ctrl-C; all its cells run."""
    command = [sys.executable, "-m", "marimo", "edit", str(path), "--no-sandbox", "--skip-update-check"]
    command += ["--", "--model", model] if model else []
    environment = os.environ | {"_MARIMO_CONFIG_OVERLOAD_RUNTIME_AUTO_INSTANTIATE": "true"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, env=environment, cwd=ROOT.parent).returncode
