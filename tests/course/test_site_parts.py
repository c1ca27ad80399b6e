"""What pages are made of, without making any: recorded labs, quotes of them, tasks, diagrams."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from markdown_it.token import Token

from chapters.__main__ import main
from chapters.recording import Recording
from chapters.sheet import MEASURED, Sheet, read
from chapters.site import diagrams, runtime, tasks
from chapters.site.labs import OWN_MACHINE, exercises_section
from chapters.site.model.lessons import begin_lesson
from chapters.site.runtime import MissingRuntime
from chapters.site.scenes import Scenes
from chapters.site.server import served
from chapters.site.sources import Sources
from chapters.site.stories import story_of
from chapters.site.tables import printed, quoted
from chapters.site.wrapping import wrapped
from nanovllm.wings import MissingWing
from tests.course.course_text import CHAPTERS, for_each_chapter
from tests.site_browser import chromium

GRADED = [chapter for chapter in CHAPTERS if chapter.folder.name in runtime.GRADED]
TAGS = {"part": "h2", "say": "p", "print": "pre", "table": "table", "histogram": "figure", "levels": "figure"}


def test_what_an_exercise_asks_for():
    """A docstring in the page's type: paragraphs, lists, names with what they mean, and code."""
    text = "Give x_y blocks.\nNow.\n\nReturn:\n- one,\n  or more\n- `two`\n\n5. *a*\n6. [b](c)\n\n"
    text += "    k_cache  of keys <b>\n             and more\n    v        else"
    assert re.sub(r"(?<=>)\n", "", tasks.html_of(text)) == (
        "<p>Give <code>x_y</code> blocks.\nNow.</p><p>Return:</p>"
        '<ul><li>one,\nor more</li><li><code>two</code></li></ul><ol start="5"><li>*a*</li><li>[b](c)</li></ol>'
        "<dl><dt><code>k_cache</code></dt><dd>of keys &lt;b&gt; and more</dd><dt><code>v</code></dt><dd>else</dd></dl>"
    )
    assert tasks.html_of("    a = 1\n      b").startswith('<pre class="code highlight"')
    assert tasks.html_of("") == "", "no introduction"


@for_each_chapter
def test_what_an_exercise_says_is_no_markdown(chapter):
    """A page, a notebook and an editor show its asterisks as they are."""
    said = [tasks.introduction_of(chapter), *map(tasks.asked, tasks.tasks_of(chapter))]
    assert not [found for each in said for found in re.findall(r"(?<!\S)\*+\w[^*<]*\*", each)]


def test_what_all_exercises_of_a_page_have_in_common():
    """Prose, and nothing about a file: the page has an editor."""
    for chapter in GRADED:
        said = tasks.introduction_of(chapter)
        assert said.startswith("<p>") and "<dl>" not in said and "this file" not in said, said


def test_a_page_says_which_task_it_cannot_check():
    pages = [exercises_section(chapter, Sources()) for chapter in GRADED]
    named = re.findall(
        'data-task="([^"]*)"' + "(?:(?!data-task).)*?" + re.escape(OWN_MACHINE), "".join(pages), re.DOTALL
    )
    assert sorted(named) == sorted(runtime.OF_THE_ENGINE)


def test_diagrams_are_drawn():
    assert set(diagrams.DRAWN.glob("*.svg")) == diagrams.wanted().keys(), "python -m chapters site --draw"
    assert "<pre" in diagrams.figure("flowchart LR\n    A --> B\n", 1), "until then, the text is shown"


@pytest.mark.ci
def test_drawing(tmp_path, monkeypatch):
    """Anew, with the same words; letters are not of the same width everywhere."""
    with chromium():  # skips where there is none; what draws starts one of its own
        pass
    before = {picture.name: words(picture) for picture in diagrams.wanted()}
    monkeypatch.setattr(diagrams, "DRAWN", tmp_path)
    (tmp_path / "of a text that is gone.svg").touch()
    try:
        diagrams.draw_all()
    except MissingRuntime as error:
        pytest.skip(str(error))
    assert {picture.name: words(picture) for picture in tmp_path.iterdir()} == before


def words(picture: Path) -> set[str]:
    drawing = picture.read_text("utf-8")
    return {*re.findall('aria-label="Diagram. .*?"', drawing), *" ".join(re.findall(">(.*)</text>", drawing)).split()}


@for_each_chapter
def test_stories(chapter):
    """All that was told is there, in its order; tables are tables, and what was measured is marked."""
    told, text = Recording(chapter.folder).told, story_of(chapter, Scenes())
    kinds = [kind for kind, _ in told]
    assert kinds.count("part") >= 3
    assert re.findall("<(h2|p|pre|table|figure)[ >]", text)[1:] == [TAGS[kind] for kind in kinds]
    pieces = [what["rows"] if kind == "table" else what.split("\n") for kind, what in told if TAGS[kind] != "figure"]
    num_measured = sum(MEASURED in str(piece) for each in pieces for piece in each)
    assert text.count('class="measured"') - bool(num_measured) == num_measured, "the note marks one if any is"
    assert num_measured or chapter.number in (4, 5)
    assert text.count("<tr") == sum(len(what["rows"]) + 1 for kind, what in told if kind == "table")


@pytest.mark.parametrize("quote, number", [("F takes 4 of 9", 2), ("│ F takes 5 │ of 9", 1), ("G takes 4", None)])
def test_a_quote_leads_to_its_part(quote, number):
    """Where parts differ in numbers only, to the one with these; another recording may have measured others."""
    scenes = Scenes(parts=["E takes 4\nF takes 3 of 9\n", "F takes 4 of 9\n"])
    link = re.search(r"#part-(\d+)", scenes.caption([Token("fence", "code", 0, content=quote)], 0))
    assert (int(link[1]) if link else None) == number


def test_a_quote_is_drawn_as_the_lab_draws_it():
    """A table without headings gets the lab's; a paragraph is one again; a picture stays as it was printed."""
    rows = [["1", "a", "2.5", MEASURED], ["2", "b", "9", MEASURED]]
    table = {"title": "", "columns": ["step", "", "ms", ""], "rows": rows}
    told = [("say", f"The first one took 4 ms. {MEASURED}"), ("print", "A  +0 x  ·1 y"), ("table", table)]
    drawn = quoted(f" 1 │ a │ 3.1 │ {MEASURED}\n\nThe first one took\n5 ms. {MEASURED}\n\nA  +0 x\n", told)
    assert re.findall("<th .*?>(.*?)</th>", drawn) == ["step", "ms", "1"] and MEASURED not in re.sub("<p.*", "", drawn)
    assert re.findall("<tr(.*?)>", drawn) == ["", ' class="measured"']
    assert f'<p class="measured">The first one took 5 ms. {MEASURED}</p>' in drawn and ">A  +0 x</pre>" in drawn
    assert read(" a ┃ b\n━━━╇━━━\n 1 │ 2\n") == Sheet(["a", "b"], [["1", "2"]])
    assert read("a\n├── b │ c\n") is read("one line") is read(" 1 │ 2\n 1 │ 2 │ 3\n") is None


def test_what_was_printed_stays_so_though_a_paragraph_has_its_words():
    told = [("print", "  Sequence(0, WAITING, blocks [])"), ("say", "Waiting now: Sequence(5, WAITING, blocks [])")]
    assert quoted("  Sequence(0, WAITING, blocks [])\n", told).startswith("<pre")


def test_blocks_of_a_pool_may_wrap_after_four():
    """Where there are more in a row; what else was printed has its place."""
    row = " ".join(f"{number:>3} {cell:^7}" for number, cell in enumerate(["A", "A", "B", "·", "cached", "·"]))
    drawn = printed(f"waiting: B  20 tokens\n{row}\n")
    parts = re.findall('<span class="four">(.*?)</span>', drawn)
    assert "".join(parts) == row and [len(part.split()) for part in parts] == [8, 4]
    assert "--narrow: 48" in drawn and "four" not in printed(row[:47])


def test_what_is_kept_whole_where_a_line_breaks():
    """The text itself stays as it is: it is copied."""
    code = '<pre><span></span><span class="k">def</span> f(a) <span class="o">-&gt;</span> A:\n    return a\n\n</pre>'
    page = f"""<p style="--in: 4">a -> b, x - 1, well-known <code>run --draft-model M</code></p>
<svg><text>--x</text></svg>{code}<textarea>def f(a) -&gt; A: --x</textarea>
<td>&#x27; Paris&#x27; 7%</td><th>' the'</th><p>the models' weights (" a")</p><pre class="printed">    4</pre>"""
    page = page.replace("->", "-&gt;")
    body = wrapped(page)
    assert re.sub("<.*?>", "", body) == re.sub("<.*?>", "", page)
    whole = re.findall('<span class="whole">(.*?)</span>', body)
    assert whole == ["-&gt;", "--draft-model", "-&gt;", "&#x27; Paris&#x27;", "' the'", '" a")']
    assert re.findall(r'class="line"( style="--in: \d+")?>', body) == ["", ' style="--in: 4"', ""]
    assert '<p style="--in: 4">' in body and "<svg><text>--x</text></svg>" in body
    assert "<textarea>def f(a) -&gt; A: --x</textarea>" in body, "an editor shows tags as text"


def test_scripts_are_scripts_whatever_this_machine_takes_them_for(tmp_path, monkeypatch):
    """Windows' registry may have text/plain for them."""
    monkeypatch.setattr("mimetypes.guess_type", lambda *given, **options: ("text/plain", None))
    for name in ("a.js", "a.mjs"):
        (tmp_path / name).touch()
        with served(tmp_path) as address, urlopen(f"{address}/{name}") as answer:
            assert answer.headers["Content-Type"] == "text/javascript"


def test_without_sphinx_the_command_says_what_to_install(monkeypatch, capsys, tmp_path):
    """In an ordinary installation, which has none: before anything is written."""
    monkeypatch.setattr("chapters.site.find_spec", lambda name: None)
    for command in ("site", "slides"):
        assert main([command, "--out", str(tmp_path / command)]) == 2
        assert 'pip install -e ".[site]"' in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_what_is_missing_is_installed_by_its_own_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "playwright", None)
    assert main(["site", "--draw"]) == 2
    said = capsys.readouterr().err
    assert "this needs playwright" in said and said.endswith(":  pip install playwright\n")


def test_a_wing_that_is_gone_is_not_to_be_installed(monkeypatch, capsys):
    def run_quiz(*_) -> int:
        raise MissingWing("this needs nanovllm/tools/: put that folder back", name="nanovllm.tools")

    monkeypatch.setattr("chapters.__main__.run_quiz", run_quiz)
    assert main(["quiz", "1"]) == 2
    assert capsys.readouterr().err == "python -m chapters: this needs nanovllm/tools/: put that folder back\n"


@pytest.mark.parametrize(("chapter", "act"), [(1, "likely"), (8, "change"), (13, "step")])
def test_a_lesson_begins_with_a_text(chapter, act):
    """Sliders and buttons are there before one has been taken."""
    sizes = {"num_blocks": 8, "block_size": 4, "max_rows": 8, "max_model_len": 32, "eos_token_ids": []}
    model = SimpleNamespace(layout=json.dumps(sizes), step=None, encode=lambda text: "[]")
    lesson, values = begin_lesson(chapter, model), {"text": "", "num_draft_tokens": "4"}
    with pytest.raises(ValueError, match="at least one letter"):
        lesson.do("begin", values)
    with pytest.raises(ValueError, match="Begin with a text first"):
        lesson.do(act, values)
    with pytest.raises(ValueError, match="Beginne zuerst mit einem Text"):
        lesson.do(act, values | {"language": "de"})
