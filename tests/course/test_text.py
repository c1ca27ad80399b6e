"""The chapters' texts cannot drift from the engine: quotes, code and what it prints, the page of one request."""

import ast
import contextlib
import io
import re
import sys

import pytest

from chapters.course import TITLES
from chapters.plain_text import FOLD, spelled, unfolded
from chapters.site.sources import first_line, node_of
from nanovllm import LLM
from tests.course.course_text import CHAPTERS, FENCE, ROOT, assert_quoted, blocks, for_each_chapter, source_of, text_of


def test_the_chapters_there_are():
    assert [chapter.number for chapter in CHAPTERS] == list(TITLES)


# Blocks that are no code.
KNOWN = ("text", "text output", "text lab", "mermaid")


@for_each_chapter
def test_shape(chapter):
    text = text_of(chapter)
    assert text.startswith(f"# Chapter {chapter.number}: {chapter.title}\n")
    assert "## Now you" in text and len(text.split()) > 2000
    for name in ("lab", "quiz", "check"):
        assert f"python -m chapters {name} {chapter.number}" in text
    assert "nanovllm/" in text and "arXiv" in text


@for_each_chapter
def test_american_spelling(chapter):
    """In what students read."""
    for name in ("README.md", "exercise.py", "checks.py", "solution.py", "quiz.toml", "story.json"):
        found = re.search(r"\w*(neighbour|normalis|colour)\w*", (chapter.folder / name).read_text("utf-8"))
        assert not found, f"{name}: {found[0]}"


PAPER = re.compile(r"\[arXiv:([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)|\d{4}\.\d{5}(?!\d)")


@for_each_chapter
def test_papers_are_links(chapter):
    """An arXiv number is a link to that paper."""
    for paper in PAPER.finditer(FENCE.sub("", text_of(chapter))):
        assert paper[1] and paper[1] == paper[2], f"{paper[0]} is not a link to the paper"


@for_each_chapter
def test_quotes(chapter):
    quotes = [block for block in blocks(chapter) if block["path"]]
    assert len(quotes) >= 3
    for block in quotes:
        assert block["path"] == block["link"] and block["path"].startswith(("nanovllm/", "examples/"))
        assert_quoted(block["text"], source_of(block["path"], block["symbol"]))


def test_a_drifted_quote_is_noticed():
    source = "def f(x):\n    y = x + 1\n    # why\n    return y\n"
    branches = "def f(x):\n    if y:\n        return 1\n    elif x:\n        return 2\n"
    assert_quoted("def f(x):\n    ...\n    return y\n", source)
    for drifted in ("def f(x):\n    return y\n", "def f(x):\n    ...\n    return x\n", "return y\n...\ndef f(x):\n"):
        with pytest.raises(AssertionError, match="not in the source"):
            assert_quoted(drifted, source)
    with pytest.raises(AssertionError, match="at the end"):
        assert_quoted("def f(x):\n    y = x + 1\n", source)
    with pytest.raises(AssertionError, match="not closed"):
        assert_quoted("def f(\n    ...\n    return x\n", "def f(\n    x,\n):\n    return x\n")
    assert_quoted("def f(\n    ...\n):\n    return x\n", "def f(\n    x,\n):\n    return x\n")
    with pytest.raises(AssertionError, match="belongs to nothing: elif"):
        assert_quoted("def f(x):\n    ...\n    elif x:\n        return 2\n", branches)
    assert_quoted("def f(x):\n    if y:\n        ...\n    elif x:\n        return 2\n", branches)


C_KEYWORDS = {
    *"const do double else enum float for goto if inline int restrict return sizeof static struct switch".split()
}
C_KEYWORDS |= {*"typedef union unsigned void volatile while int32_t int64_t uint32_t".split()}
C_SIGNS = re.compile(r"->|\+\+|[+*/-]=|[?{}]|/\*|\(\*|&(?!&)|(?<=[ (])\*(?=\w)")


@for_each_chapter
def test_a_terminal_can_open_every_fold(chapter):
    text = text_of(chapter)
    assert "<details" not in unfolded(text) and text.count("</details>") == len(FOLD.findall(text))


def test_listings_of_c_are_folded_away():
    """Chapter 10: behind a sentence each, which says in English what the listing does."""
    text = text_of(CHAPTERS[9])
    folded = [(said, hidden) for said, hidden in FOLD.findall(text) if "```c\n" in hidden]
    assert len(folded) == text.count("```c\n") > 3
    for said, hidden in folded:
        assert said.startswith("In C, <code>") and said.endswith(".") and hidden.count("```") == 2


def words_of_c(source: str) -> set[str]:
    """What it has that Python has not: keywords, signs, and the types and constants of vectors.h."""
    types = (ROOT / "nanovllm" / "worker" / "cpu" / "vectors.h").read_text("utf-8")
    names = {*re.findall(r"^typedef .*?(\w+)(?: __attribute__.*)?;", types, re.MULTILINE), "load", "store"}
    for constants in re.findall(r"enum \{(.*?)\}", types):
        names |= {*re.findall(r"(\w+) =", constants)}
    code = re.sub(r"(?<=/\*).*?(?=\*/)", "", source, flags=re.DOTALL)
    return {*re.findall(r"\w+", code)} & {*C_KEYWORDS, *names} | {*C_SIGNS.findall(code)}


def test_what_is_new_in_c_is_explained():
    """In chapter 10, before or beside the quotes in C: its table says that it lists everything."""
    text = text_of(CHAPTERS[9])
    quoted = words_of_c("\n".join(block["text"] for block in blocks(CHAPTERS[9]) if block["info"] == "c"))
    explained = words_of_c("\n".join(re.findall(r"`([^`\n]+)`", FENCE.sub("", text))))
    assert {"->", "&", "enum", "PAIR", "unit", "vec"} <= quoted <= explained, quoted - explained


@for_each_chapter
def test_code_runs(chapter, demo_checkpoint, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace: dict = {"__name__": "chapter"}
    expected_next, printed = False, ""
    for block in blocks(chapter):
        info, text = block["info"], block["text"]
        if info == "text output":
            assert expected_next, "an output without the code before it"
            assert printed == text
        expected_next = info == "python" and not block["path"]
        if expected_next:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(text, f"{chapter.folder.name}/README.md", "exec"), namespace)
            printed = output.getvalue()
        elif info == "bash":
            for line in text.splitlines():
                command = line.split("#")[0].strip()
                assert re.fullmatch(r"python -m chapters (read|lab|quiz|check) \d+( --[a-z]+( [\w./-]+)?)*", command)
        else:
            assert block["path"] or info in KNOWN, f"{info!r} is not checked"


# -- the last page -----------------------------------------------------------------------------------------------------

PAGE = ROOT / "chapters" / "one_request.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./(nanovllm/[\w/.]+)\)")


def test_one_request(demo_checkpoint, monkeypatch):
    """The code prints what the page says, links lead to their symbols, and the order of the page is the engine's."""
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text("utf-8")
    code, printed = (block["text"] for block in FENCE.finditer(text))
    first_call: dict[tuple[str, int], int] = {}  # of the last request

    def note(frame, event, arg) -> None:
        if event == "call":
            if frame.f_code is LLM.generate.__code__:
                first_call.clear()
            first_call.setdefault((frame.f_code.co_filename, frame.f_code.co_firstlineno), len(first_call))

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        sys.setprofile(note)
        try:
            exec(compile(code, str(PAGE), "exec"), {})
        finally:
            sys.setprofile(None)
    assert output.getvalue() == printed

    order = []
    for symbol, path in LINK.findall(text):
        node = node_of(path, symbol)
        if isinstance(node, ast.ClassDef):
            node = node_of(path, f"{symbol}.__init__")
        call = first_call.get((str(ROOT / path), first_line(node)))
        assert call is not None, f"{symbol} is never called"
        order.append((call, symbol))
    assert len(order) > 30 and order == sorted(order), "they first run in another order"


def test_one_request_leads_to_every_chapter():
    text = PAGE.read_text("utf-8")
    for chapter in CHAPTERS:
        assert f"\n[{chapter.number}]: {chapter.folder.name}/README.md\n" in text
        assert text.count(f"[{chapter.number}]") > 1, f"no stop belongs to chapter {chapter.number}"


@for_each_chapter
def test_a_terminal_shows_no_latex(chapter):
    without_code = re.sub(r"```.*?```", "", spelled(text_of(chapter)), flags=re.DOTALL)
    assert "$" not in re.sub(r"`[^`]*`", "", without_code)
    assert not re.search(r"\\(frac|text|cdot|sqrt|left|,)|[_^]{", without_code)


def test_formulas_as_one_types_them():
    said = spelled(r"For $a^{k+1}$ ($5 or $6), `$a$`: $$\frac{1 - \text{cost} \, x^{2}}{\rho} \cdot \sqrt{12}$$")
    assert said == "For `a^(k+1)` ($5 or $6), `$a$`: `(1 - cost x^2) / ρ · √12`"
