"""The two pages for those who change the engine: their code runs, their names are there, the wing can be added."""

import contextlib
import io
import os
import re
import shutil
from pathlib import Path

import pytest

from chapters.site.sources import node_of
from tests import test_layout
from tests.course.course_text import ROOT, assert_quoted, source_of

CHAPTERS = ROOT / "chapters"
FROM_NANO_VLLM, ADD_A_WING = CHAPTERS / "from_nano_vllm.md", CHAPTERS / "add_a_wing.md"
SYMBOL = re.compile(r"\[`([\w.]+)`\]\(\.\./(nanovllm/[\w/]+\.py)\)")
# **[`path`](../path) · `symbol`** quotes; **New: `path`** is a file to be written, **Change: `path`** one to be edited.
BLOCK = re.compile(
    r"(?:^\*\*(?:\[`(?P<quoted>[\w/.]+)`\]\(\.\./[\w/.]+\) · `(?P<symbol>[\w.]+)`"
    r"|(?P<what>New|Change): `(?P<path>[\w/.]+)`)\*\*\n\n)?"
    r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LOADED = """
import sys
import nanovllm.engine
print("nanovllm.features.shortest_first.policy" in sys.modules)
"""


def run_code(page: Path) -> None:
    """Run what is no file and no quote, in one namespace, with the new files of the package; compare the outputs."""
    namespace: dict = {"__name__": "page"}
    printed = None
    for block in BLOCK.finditer(page.read_text("utf-8")):
        if block["info"] == "text output":
            assert printed == block["text"]
        elif block["quoted"]:
            assert_quoted(block["text"], source_of(block["quoted"], block["symbol"]))
        elif block["info"] == "python" and not (block["path"] or "").startswith("tests/"):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(block["text"], page.name, "exec"), namespace)
            printed = output.getvalue()
        else:
            assert block["path"] or block["info"] == "diff", f"{block['info']!r} is not checked"


def test_from_nano_vllm_runs():
    run_code(FROM_NANO_VLLM)


def test_how_long_the_heart_is():
    """Beside nano-vllm, whose length the page says."""
    text = FROM_NANO_VLLM.read_text("utf-8")
    [theirs] = re.findall(r"in ([\d,]+) lines", text)
    folders = (ROOT / "nanovllm", ROOT / "nanovllm" / "core", ROOT / "nanovllm" / "worker")
    ours = sum(len(file.read_text("utf-8").splitlines()) for folder in folders for file in folder.glob("*.py"))
    assert "about four times as long" in " ".join(text.split())
    assert round(ours / int(theirs.replace(",", ""))) == 4


@pytest.mark.nightly
def test_add_a_wing_runs(demo_checkpoint):
    run_code(ADD_A_WING)


@pytest.mark.parametrize("page", [FROM_NANO_VLLM, ADD_A_WING], ids=lambda page: page.stem)
def test_what_is_named_is_there(page):
    found = SYMBOL.findall(page.read_text("utf-8"))
    assert len(found) > 10
    for symbol, path in found:
        node_of(path, symbol)


def test_each_report_is_a_test():
    """A test for each heading of the reports; every number on the page is in the tests, and the reverse."""
    page = FROM_NANO_VLLM.read_text("utf-8").split("\n## What its users reported\n")[1].split("\n## ")[0]
    tests = (ROOT / "tests" / "core" / "test_nano_vllm_reports.py").read_text("utf-8")
    assert page.count("\n### ") == tests.count("\ndef test_")
    numbers = {int(number) for number in re.findall(r"nano-vllm/(?:issues|pull)/(\d+)", page)}
    docstrings = " ".join(re.findall(r'^    """.*?"""', tests, re.MULTILINE | re.DOTALL))
    assert numbers == {int(number) for number in re.findall(r"\b\d{3}\b", docstrings)}


# -- the wing, in a copy of the repository ----------------------------------------------------------------------------


def edit(file: Path, diff: str) -> None:
    """Apply one hunk of a diff without line numbers: what it takes away and keeps must stand there once."""
    before = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " -")
    after = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " +")
    text = file.read_text("utf-8")
    assert text.count(before) == 1, f"{file.name} has not once:\n{before}"
    file.write_text(text.replace(before, after), "utf-8")


def add_wing(repository: Path) -> None:
    """What the page says."""
    path = ""
    for block in BLOCK.finditer(ADD_A_WING.read_text("utf-8")):
        path = block["path"] or path
        if block["what"] == "New":
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            (repository / path).write_text(block["text"], "utf-8")
        elif block["info"] == "diff":
            edit(repository / path, block["text"])


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A copy of this one, which the tests of the layout look at."""
    for folder in ("nanovllm", "chapters", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    monkeypatch.setattr(test_layout, "ROOT", tmp_path)
    monkeypatch.setattr(test_layout, "PACKAGE", tmp_path / "nanovllm")
    return tmp_path


@pytest.mark.nightly
def test_the_wing_can_be_added(repository, processes):
    def run(*arguments: str) -> tuple[int, str]:
        code, out, err = processes.run(*arguments, cwd=repository, env=os.environ | {"PYTHONPATH": str(repository)})
        return code, out + err

    add_wing(repository)
    asked_for = ["tests/test_wings.py", "-k", "every_wing_is_asked_for or one_wing_is_gone[features/shortest_first]"]
    for chosen in (["tests/features/shortest_first"], asked_for):
        code, said = run("-m", "pytest", "-n", "0", "-m", "nightly or not nightly", *chosen)
        assert code == 0 and "passed" in said, said
    test_layout.test_every_wing_is_named()
    test_layout.test_a_listing_is_documentation()
    test_layout.test_a_capabilitys_tests_lie_under_its_name()
    assert run("-c", LOADED) == (0, "False\n"), "it is loaded, and nobody asked for it"


def test_what_the_page_says_of_mistakes(repository, processes):
    add_wing(repository)
    shutil.copyfile(ROOT / "nanovllm" / "README.md", repository / "nanovllm" / "README.md")
    with pytest.raises(AssertionError, match="features/shortest_first"):
        test_layout.test_every_wing_is_named()

    seam = repository / "nanovllm" / "wings.py"
    eager = "from nanovllm.features.shortest_first.policy import ShortestFirst\n"
    seam.write_text(eager + seam.read_text("utf-8"), "utf-8")
    code, out, err = processes.run("-c", LOADED, cwd=repository, env=os.environ | {"PYTHONPATH": str(repository)})
    assert (code, out) == (0, "True\n"), err
