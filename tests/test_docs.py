"""The documents: every link leads somewhere, every script has its line, and what the README shows is what one gets."""

import ast
import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest

from nanovllm.files import demo_model
from tests.course.course_text import FENCE, ROOT

FOLDERS = ["chapters", "examples", "nanovllm", "tests"]
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
SHARED = ("measuring.py", "damaged_tiers.py", "reporting.py")  # modules of scripts
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[\d+\]: (.*)$", re.MULTILINE)


def path_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors_of(page: Path) -> set[str]:
    """The ids that GitHub gives the headings; of a source file, its lines."""
    text = page.read_text("utf-8")
    if page.suffix != ".md":
        return {f"L{number}" for number in range(1, text.count("\n") + 1)}
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "").strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_links(page):
    for inline, reference in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        path, _, anchor = (inline or reference).partition("#")
        if not path.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists(), f"{path} is not there"
            assert not anchor or anchor in anchors_of(target), f"{path} has no #{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if not path_of(page).startswith("chapters/")], ids=path_of)
def test_code_names_what_there_is(page):
    """The chapters' code is run: course/test_text.py."""
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanovllm"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_every_example_has_its_line():
    """And its first lines say how it is run, unless it is a module that scripts share."""
    text = (ROOT / "examples" / "README.md").read_text("utf-8")
    for script in (ROOT / "examples").glob("*.py"):
        assert f"({script.name})" in text
        said = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
        assert script.name in SHARED or f"python examples/{script.name}" in said


def test_the_readme_is_one_screen_and_doors():
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= 150
    assert len(re.findall(r"^pip install -e ", text, re.MULTILINE)) == 2, ".ci/run takes the two commands from here"
    assert all(f"{size} MB" in text for size in (demo_model.WHEEL_MB, demo_model.CHECKPOINT_MB))


def test_the_readme_s_script(demo_checkpoint):
    text = (ROOT / "README.md").read_text("utf-8")
    [(code, printed)] = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    assert output.getvalue() == printed
