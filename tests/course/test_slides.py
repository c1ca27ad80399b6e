"""Slides and handouts: what they say is the chapter's text, whatever is drawn is described, and all of it is seen."""

import re
from functools import cache
from html import escape, unescape

import pytest

from chapters import quiz
from chapters.__main__ import main
from chapters.course import find_chapter
from chapters.site.scenes import Scenes
from tests.course.course_text import for_each_chapter, text_of
from tests.site_browser import assert_accessible, chromium

pytest.importorskip("myst_parser", reason="needs Sphinx: pip install -e '.[site]'")

from chapters.teaching.deck import slides_of
from chapters.teaching.handout import without_answers
from chapters.teaching.lesson import Lesson, blocks_of, sentences
from chapters.teaching.markdown import MARKDOWN
from chapters.teaching.paper import faults
from chapters.teaching.sections import Slide

BUILT = [4, 7]  # with diagrams, pictures that are moved, scenes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    assert main(["slides", *map(str, BUILT), "--out", str(folder)]) == 0
    return folder


def pages(folder, kind: str):
    return [folder / f"{find_chapter(number).folder.name}_{kind}.html" for number in BUILT]


@cache
def made(chapter) -> tuple[Lesson, list[Slide]]:
    lesson = Lesson.of(chapter)
    return lesson, slides_of(lesson, "..")


def plain(text: str) -> str:
    """The letters and digits of Markdown or HTML, without marks, tags, formulas and targets of links."""
    text = re.sub(r"\]\([^)]*\)|\$[^$\n]+\$|<math.*?</math>", "", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)  # code has other uses for < and >
    return "".join(re.findall(r"\w", unescape(re.sub(r"<(/?\w[^<>]*)>", "", text))))


@for_each_chapter
def test_slides_say_what_the_text_says(chapter):
    (lesson, slides), text = made(chapter), plain(text_of(chapter))
    openings = [slide for slide in slides if slide.kind in ("first", "opening", "question", "mistakes", "list")]
    assert len(openings) >= len(lesson.explained) - 3
    for slide in openings:
        assert "**" not in slide.body, "a sentence was cut inside its bold type"
        for said in re.findall(r"<(?:p|li)[^>]*>(.*?)</(?:p|li)>", slide.body):
            assert plain(said) in text or "Chapter" in said, f"the text does not say {said!r}"
    summary = "".join(slide.body for slide in slides if slide.title.startswith("Summary"))
    assert lesson.summary and [plain(item) for item in re.findall("<li>(.*?)</li>", summary)] == [
        *map(plain, lesson.summary)
    ]
    assert len(lesson.mistakes) >= 3 and list(lesson.exercises())


@for_each_chapter
def test_answers_are_notes(chapter):
    """No slide gives a quiz question's answer away, and the notes of a vote name a choice that is there."""
    questions = {question["ask"]: question for question in quiz.load(chapter)}
    _, slides = made(chapter)
    faces = plain("".join(slide.title + slide.body + slide.foot for slide in slides))
    assert not [question["why"] for question in questions.values() if plain(question["why"]) in faces]
    votes = [slide for slide in slides if slide.kind == "vote"]
    assert 1 <= len(votes) <= 3
    for vote in votes:
        choices = re.findall("<li>(.*?)</li>", vote.body)
        assert vote.body.count("<li>") == len(choices) >= 3, "every choice looks like every other"
        letter = re.match("<b>([a-f])</b>: ", vote.notes[0])[1]
        [question] = [each for ask, each in questions.items() if plain(vote.body).startswith(plain(ask))]
        right = choices["abcdef".index(letter)]
        if "answer" in question:
            assert float(right.replace(",", "")) == float(question["answer"])
        else:
            assert plain(right) == plain(next(o["text"] for o in question["options"] if o.get("right")))


def test_what_is_drawn_is_described(folder):
    for page in pages(folder, "slides") + pages(folder, "handout"):
        found = re.findall(r"<svg[^>]*>(?:<title)?", page.read_text("utf-8"))
        assert found, page.name
        assert all("aria-label=" in svg or "aria-hidden" in svg or svg.endswith("<title") for svg in found), page.name


def test_handouts_have_it_all(folder):
    for number, page in zip(BUILT, pages(folder, "handout"), strict=True):
        (lesson, _), text = made(find_chapter(number)), page.read_text("utf-8")
        for said in (lesson.aim, *lesson.summary, *lesson.questions, *lesson.exercises().values()):
            assert plain(said) in plain(text)
        assert all(f"<code>{escape(name)}</code>" in text for name in lesson.exercises())


def test_no_handout_shows_an_answer_above_its_question():
    """The picture of the first side is none of those that show what a question of the chapter asks for."""
    table, said = "| a |\n|---|\n| 1 |\n", "It is one."
    text = f"> **What do you expect?** How many?\n\n{table}\n![A](drawn/a.svg)\n\n{said}\n\n![B](drawn/b.svg)\n"
    left = [*without_answers(blocks_of(MARKDOWN.parse(text), Scenes.of(find_chapter(1))))]
    assert [block.kind for block in left] == ["paragraph", "picture"]


def test_a_page_needs_nothing_else(folder):
    for page in pages(folder, "slides") + pages(folder, "handout"):
        text = page.read_text("utf-8")
        assert not re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="', text)
        assert {link.split("#")[0].split("/")[0] for link in re.findall(r'href="([^"]*)"', text)} <= {".."}


def test_sentences():
    said = 'It is "so. Or not." (See a. And b.) Use `x. Y` now. **A claim.** Then more: 2.5 of it. *One. Two.* End'
    assert sentences(said) == [
        'It is "so. Or not."',
        "(See a. And b.)",
        "Use `x. Y` now.",
        "**A claim.**",
        "Then more: 2.5 of it.",
        "*One. Two.*",
        "End",
    ]


def test_in_a_browser(folder, tmp_path):
    """Nothing is cut off; what is too much is found; the keys turn slides, move pictures and show notes."""
    with chromium() as browser:
        tab = browser.new_page()
        for page in pages(folder, "slides") + pages(folder, "handout"):
            assert faults(tab, page) == []
        broken = tmp_path / "broken.html"
        text = pages(folder, "slides")[0].read_text("utf-8")
        broken.write_text(text.replace("</li>", f"{' too much' * 300}</li>", 1), "utf-8")
        assert len(faults(tab, broken)) > 0

        tab.goto(pages(folder, "handout")[0].as_uri())
        assert_accessible(tab)
        tab.goto(pages(folder, "slides")[0].as_uri())
        tab.keyboard.press("ArrowRight")
        assert tab.evaluate("location.hash") == "#2" and tab.locator(".now").count() == 1
        tab.keyboard.press("n")
        assert tab.locator(".now .notes").is_visible()
        while not tab.locator(".now .frame").count():
            tab.keyboard.press("ArrowRight")
        setting = tab.locator(".now .frame:visible .setting").inner_text()
        tab.keyboard.press("ArrowUp")
        assert tab.locator(".now .frame:visible").count() == 1
        assert tab.locator(".now .frame:visible .setting").inner_text() != setting
        with tab.expect_popup() as speaker:
            tab.keyboard.press("s")
        assert speaker.value.locator(".said p").count() >= 1
