"""The short path at the beginning of each chapter, and the times that texts give for it and for the whole chapter."""

import re

import pytest

from chapters.__main__ import main
from chapters.course import ROOT, find_chapter
from chapters.reading import (
    ANSWER,
    LONG,
    SECTIONS,
    SHORT,
    SUMS,
    TIMES,
    Reading,
    all_minutes,
    minutes_of,
    only_short,
    put,
    short_path,
    shown,
)
from chapters.words import ENGLISH
from tests.course.course_text import FENCE, for_each_chapter, text_of

PAGE, GUIDE = (ROOT / name for name in ("README.md", "INSTRUCTOR.md"))
TEXT = f"""# Chapter 99: A title

You can do it.

{SHORT}
### The question

Why?

{LONG}
## More

Because.
"""


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def sections_of(chapter) -> dict[str, str]:
    """Of its short path, by their titles, in their order."""
    _, *parts = re.split(r"^### (.+)\n", short_path(text_of(chapter)), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@for_each_chapter
def test_shape(chapter):
    text, sections = text_of(chapter), sections_of(chapter)
    assert tuple(sections) == SECTIONS
    assert re.findall(r"^## .+\n", text, re.MULTILINE)[:2] == [SHORT, LONG]
    assert 900 <= Reading.of(short_path(text)).words <= 1700
    lines = re.findall(r"^\d\. ", sections["The algorithm"], re.MULTILINE)
    assert [int(line[0]) for line in lines] == list(range(1, len(lines) + 1)) and 3 <= len(lines) <= 7
    before = text[: text.index(lines[0])]
    assert not [block for block in FENCE.finditer(before) if block["info"] in ("python", "c")], "code before them"
    for block in FENCE.finditer(short_path(text)):
        assert block["info"] == "mermaid" or block["text"].count("\n") <= 5
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", sections["The picture"])
    assert all((chapter.folder / picture).is_file() for picture in pictures)
    assert len(pictures) + sections["The picture"].count("```mermaid") == 1
    assert len(re.findall(r"\d[\d,.]*", sections[SECTIONS[3]])) >= 10
    assert 3 <= len(re.findall(r"^- ", sections["What to remember"], re.MULTILINE)) <= 6
    answers = ANSWER.findall(sections["Three questions"])
    assert len(answers) == 3 and all(len(answer.split()) > 5 for answer in answers)
    assert ANSWER.sub("", sections["Three questions"]).count("?") >= 3


@for_each_chapter
def test_times(chapter):
    """Where they are quoted, they are what is computed; `python -m chapters minutes --write` puts them there."""
    short, whole = minutes_of(chapter)
    [said] = TIMES.findall(text_of(chapter).partition("\n## ")[0])
    assert (int(said[1]), int(said[3])) == (short, whole)


@for_each_chapter
def test_times_in_the_tables(chapter):
    short, whole = minutes_of(chapter)
    title = f"[{chapter.title}]({chapter.folder.name}/README.md)"
    assert f"| {chapter.number} | {title} | {shown((short, whole))} |" in PAGE.read_text("utf-8")
    assert f"| {chapter.number} | {short or '-'} | {whole} | 10 |" in GUIDE.read_text("utf-8")


@pytest.mark.parametrize("path", [PAGE, GUIDE, ROOT.parent / "README.md"], ids=["page", "guide", "readme"])
def test_sums(path):
    [said] = SUMS.findall(path.read_text("utf-8"))
    assert (int(said[1]), int(said[3])) == tuple(round(minutes / 60) for minutes in all_minutes())


# -- what counts -------------------------------------------------------------------------------------------------------


def test_what_is_read():
    """Words, code and cells of tables; neither signs, nor links, nor marks, nor what is looked up."""
    assert Reading.of("Two words") == Reading(2)
    assert Reading.of("**Two** [words](https://a/long/address b) -- 3 × 4 =") == Reading(4)
    assert Reading.of("<!-- slide: A title -->\n\nOne\n\n## Where to read on\n\nA long list\n") == Reading(1)
    assert Reading.of("| a | b |\n|---|---|\n| 1 | `x = y` |\n") == Reading(5)
    assert Reading.of("```python\nx = f(1)\n```\n") == Reading(3)  # the word python, too
    picture = "![What it\nshows](drawn/a.svg)\n\n```mermaid\nflowchart LR\n A --> B\n```\n"
    assert Reading.of(picture) == Reading(0, pictures=2)
    asks = "1. Why?\n\n<details><summary>Answer</summary>\n\nSo.\n\n</details>\n\n> **What do you expect?** What?\n"
    assert (Reading.of(asks).questions, Reading.of(asks).predictions) == (1, 1)
    folded = "<details><summary>In C.</summary>\n\nx = 1\n\n</details>\n"
    assert Reading.of(folded).questions == 0 and Reading.of(folded).words > 2


@pytest.mark.parametrize(("reading", "minutes"), [
    (Reading(1), 5), (Reading(138 * 8, pictures=1, questions=3), 15), (Reading(138 * 60), 60),
    (Reading(138 * 8, pictures=2, predictions=8, questions=3), 25),
])  # fmt: skip
def test_minutes(reading, minutes):
    assert reading.minutes == minutes


def test_a_short_path_ends_where_the_long_one_begins():
    assert short_path(TEXT) == f"{SHORT}\n### The question\n\nWhy?\n"
    assert short_path(TEXT.replace(SHORT, "")) == f"{LONG}" and short_path("# A title\n\n## One section\n") == ""


def test_times_are_written(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("Now: The short path\ntakes 1 minutes, the whole chapter 2; 1 2\n")
    put(path, TIMES, 15, 60)
    assert path.read_text() == "Now: The short path\ntakes 15 minutes, the whole chapter 60; 1 2\n"


# -- in the terminal ---------------------------------------------------------------------------------------------------


@pytest.fixture
def chapter_99(tmp_path, monkeypatch):
    questions = "".join(
        f"\n{number}. Why {number}?\n\n<details><summary>Answer</summary>\n\nSo\n{number}.\n\n</details>\n"
        for number in (1, 2, 3)
    )
    text = TEXT.replace("Why?\n", f"Why?\n\n### Three questions\n{questions}")
    (tmp_path / "README.md").write_text(text, "utf-8")
    chapter = type(find_chapter(1))(1, tmp_path)
    monkeypatch.setattr("chapters.__main__.find_chapter", lambda number: chapter)
    return chapter


def test_read_short(chapter_99, capsys):
    """Answers come after the questions, and the long path not at all; the course remembers what has been read."""
    assert main(["read", "1", "--short"]) == 0
    said = capsys.readouterr().out
    assert "You can do it." in said and "Because." not in said
    places = [said.index(text) for text in ("Why 1?", "Why 2?", "Why 3?", "Answers", "So 1.", "So 3.")]
    assert places == sorted(places)
    assert main([]) == 0
    assert re.search(r"What is LLM inference\? +│ +[-\d]+ / \d+ +│ short", capsys.readouterr().out)
    assert main(["read", "1"]) == 0 and "Because." in capsys.readouterr().out
    assert main([]) == 0
    assert re.search(r"What is LLM inference\? +│ +[-\d]+ / \d+ +│ yes", capsys.readouterr().out)


def test_without_a_short_path():
    with pytest.raises(ValueError, match="no short path in 'Chapter 99: A title'"):
        only_short("# Chapter 99: A title\n\n## More\n\nBecause.\n", ENGLISH)


def test_minutes_command(capsys):
    assert main(["minutes", "7"]) == 0
    said = capsys.readouterr().out
    _, whole = minutes_of(find_chapter(7))
    assert "Prefix caching" in said and f" {whole} " in said and "Benchmarks" not in said
    assert main(["minutes"]) == 0
    said = capsys.readouterr().out
    assert "hours for the short paths" in said and f"{all_minutes()[1] / 60:.1f} hours for the whole" in said
    assert main(["minutes", "99"]) == 2
