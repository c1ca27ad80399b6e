"""What a plain lab tells: run with little to measure, and compared with its recording and with what the text quotes."""

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chapters import lab_notebook
from chapters.__main__ import main
from chapters.patching import replaced
from chapters.recording import Recording, Told, bare, lines_of
from chapters.sheet import MEASURED
from chapters.story import WIDTH, Story
from nanovllm.worker import model
from tests.course.course_text import blocks

# Apart from measurements these labs print the same whatever the model, lab 14 whatever its weights; all others are told
# of the demo model.
MODELS = {4: "any_model", 5: "any_model", 11: "any_model", 14: "short_demo", 16: "any_model", 17: "any_model"}
QUICK = (4, 5)  # told in two seconds; the others are for the night
# The cells of labs that measure, and functions that do; what else they print does not depend on the model.
MEASURING = {
    3: ("time_generation", "time_contexts"),
    6: ("tell_one_request", "tell_rates", "tell_budgets"),
    7: ("tell_salts", "tell_costs"),
    10: ("tell_same_bits", "tell_shares", "tell_workload"),
    13: ("tell_rows", "tell_engine"),
    15: ("tell_cost",),
}

NO_LINE = "(?!)"
# Of other work, less than the lab does: (module, constant, its value; which quoted lines are of what is left out).
FEWER = {
    12: ("rounding", "MAX_TOKENS", 16, NO_LINE),  # its numbers are not compared, below
    14: ("lab", "NUMS_REPLICAS", (1, 4, 16), " *64 "),
    16: ("lab", "BOUNDS", (8,), " (16|40)  .*%$"),
}


def run_little(chapter, any_model, monkeypatch) -> Callable[..., None]:
    """Runs a notebook so that what is measured, which is not compared, is measured once: with the model's first two
    layers, or, if it is loaded for this alone, with another one."""

    def pairs(first, *others, strict):
        return list(zip(first, *others, strict=strict))[: 2 if isinstance(first, torch.nn.ModuleList) else None]

    def with_two_layers(function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            with replaced(model, "zip", pairs):
                return function(*arguments)

        return measured

    measuring = MEASURING.get(chapter.number, ())
    given: dict[str, Any] = {"PATIENCE_S": 0, "MAX_ROUNDS": 1}
    modules = set(
        re.findall(rf"from (chapters\.{chapter.folder.name}\.\w+) import", lab_of(chapter).read_text("utf-8"))
    )
    for module in map(importlib.import_module, sorted(modules)):
        for name in measuring:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, with_two_layers(getattr(module, name)))
    if chapter.number in FEWER:
        name, constant, value, _ = FEWER[chapter.number]
        if name == "lab":
            given[constant] = value
        else:
            monkeypatch.setattr(chapter.module(name), constant, value)
    for name, module in list(sys.modules.items()):
        if name.startswith(f"chapters.{chapter.folder.name}."):
            for limit in ("PATIENCE_S", "MAX_ROUNDS"):
                monkeypatch.setattr(module, limit, given[limit]) if hasattr(module, limit) else None
    run = lab_notebook.run

    def run_it(path: Path, story: Story) -> None:
        @contextlib.contextmanager
        def around(cell: str) -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                if cell in measuring:
                    stack.enter_context(replaced(model, "zip", pairs))
                    stack.enter_context(replaced(story, "_model", str(any_model)))
                yield

        run(path, story, given, around)

    return run_it


def lab_of(chapter) -> Path:
    return chapter.folder / "lab.py"


# Labs whose unmeasured numbers are computed by PyTorch's operations: a processor with AVX2 and one with AVX-512 round
# differently, which changes last digits. The quoted ones are those of the recorded story. (C kernels give the same bits
# in float32 and int8 on both, chapter 10.)
ROUNDED_BY_THE_PROCESSOR = {12}


def without_measurements(line: str) -> str:
    """A measured number may be as wide as it is, and so may the head of its column."""
    if "(measured)" in line:
        return re.sub(r"[\d.,]+|[█▏▎▍▌▋▊▉]+|\s+", "#", line)
    return re.sub(r"[\s━]+", "#", line) if re.search("[┃━]", line) else line


def without_numbers(text: str) -> str:
    """Last digits depend on the machine."""
    return re.sub(r"[-+\d.,%]+|[─━█▏▎▍▌▋▊▉▁▂▃▄▅▆▇]+|\s+", "#", text.strip())


def unmeasured(told: list[Told], by_rows: bool) -> set[str]:
    """The words of the paragraphs, tables and pictures in which nothing is measured. by_rows: of tables, each row's."""
    texts = [what if isinstance(what, str) else str(sorted(what.items())) for _, what in told]
    if by_rows:
        tables = [what for kind, what in told if kind == "table"]
        texts = [text for (kind, _), text in zip(told, texts, strict=True) if kind != "table"]
        texts += [str([table["title"], *table["columns"], *row]) for table in tables for row in table["rows"]]
    return {without_numbers(text) for text in texts if MEASURED not in text}


def quoted_lines(chapter) -> list[str]:
    quoted = [block["text"] for block in blocks(chapter) if block["info"] == "text lab"]
    assert quoted, "no number without the lab's output"
    return "".join(quoted).splitlines()


def assert_recorded(chapter) -> None:
    """What the text quotes is what the site shows, digit by digit."""
    was_told = "\n".join(line for each in Recording(chapter.folder).told for line in lines_of(*each))
    for line in quoted_lines(chapter):
        pieces = line.split("┃")  # a heading may stand on several lines, and is recorded as one
        assert all(bare(piece) in was_told for piece in pieces), f"the recorded story does not have: {line}"


def assert_told(chapter, request, capsys, monkeypatch) -> None:
    """The plain lab runs, fits its width, and prints what the text quotes from it and what the site shows of it."""
    any_model = request.getfixturevalue("any_model")
    checkpoint = request.getfixturevalue(MODELS.get(chapter.number, "demo_checkpoint"))
    monkeypatch.setattr(lab_notebook, "run", run_little(chapter, any_model, monkeypatch))
    left_out = FEWER.get(chapter.number, (NO_LINE,))[-1]
    stories: list[Story] = []
    monkeypatch.setattr("chapters.__main__.Story", lambda *options: stories.append(Story(*options)) or stories[0])
    assert main(["lab", str(chapter.number), "--plain", "--model", str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) > 30
    assert all(len(line) <= WIDTH for line in printed.splitlines())
    plain = without_numbers if chapter.number in ROUNDED_BY_THE_PROCESSOR else without_measurements
    lines = {plain(line.rstrip()) for line in printed.splitlines()}
    recorded = Recording(chapter.folder).told
    stale = set.symmetric_difference(*(unmeasured(t, chapter.number in FEWER) for t in (recorded, stories[0].told)))
    assert not stale, f"python -m chapters lab {chapter.number} --write, since the lab has changed: {stale}"
    for line in quoted_lines(chapter):
        assert plain(line.rstrip()) in lines or re.match(left_out, line), f"the lab does not print: {line}"


def for_each_lab(chapters) -> pytest.MarkDecorator:
    marks = [[] if chapter.number in QUICK else [pytest.mark.nightly] for chapter in chapters]
    params = [pytest.param(chapter, marks=mark) for chapter, mark in zip(chapters, marks, strict=True)]
    return pytest.mark.parametrize("chapter", params, ids=[chapter.folder.name[:4] for chapter in chapters])
