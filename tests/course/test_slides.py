"""Slides: about ten for each chapter, all of them seen, without a network; students' decks give no answers away."""

import re
from html import unescape

import pytest

from chapters import quiz
from chapters.__main__ import main
from chapters.course import find_chapter
from tests.course.course_text import CHAPTERS, for_each_chapter, text_of
from tests.site_browser import assert_accessible, chromium

pytest.importorskip("sphinx_revealjs", reason="needs sphinx-revealjs: pip install -e '.[site]'")

from chapters.teaching.deck import deck_text, slides_of
from chapters.teaching.slides import faults, names_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    assert main(["slides", "--out", str(folder)]) == 0
    return folder


def test_a_folder_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["slides", "1", "--out", str(tmp_path / "file")]) == 2 and "file" in capsys.readouterr().err


def decks(folder, *numbers: int):
    return [folder / f"{name}.html" for number in numbers for name in names_of(find_chapter(number))]


def readme_of(chapter) -> str:
    return (chapter.folder / "README.md").read_text("utf-8")


def titles_of(page: str) -> list[str]:
    return [plain(title) for title in re.findall("<h2>(.*?)</h2>", page)]


def plain(text: str) -> str:
    return "".join(re.findall(r"\w", unescape(re.sub(r"<(/?\w[^<>]*)>", "", text))))


@for_each_chapter
def test_a_chapter_marks_about_ten_slides(chapter):
    slides = slides_of(readme_of(chapter))
    assert 8 <= len(slides) <= 12
    assert len({slide.title for slide in slides}) == len(slides) and slides[-1].title == "What to remember"
    questions = [slide for slide in slides if slide.blocks[0].startswith("> **What do you expect?**")]
    assert questions and all(slide.notes for slide in questions), "a teacher knows the answer"
    assert "<!-- slide" not in text_of(chapter) + deck_text(chapter, for_teacher=True), "marks are on no page"


@for_each_chapter
def test_students_get_no_answers(chapter, folder):
    slides = slides_of(readme_of(chapter))
    teacher, students = (page.read_text("utf-8") for page in decks(folder, chapter.number))
    assert 'class="notes"' in teacher and 'class="notes"' not in students
    titles = [plain(slide.title) for slide in slides]
    assert titles_of(teacher) == titles
    assert titles_of(students) == [plain(slide.title) for slide in slides if not slide.answers]
    for question in quiz.load(chapter):
        assert plain(question["why"]) not in plain(students)


def test_what_follows_a_question_answers_it():
    """Up to the end of the first paragraph about it, as on the pages; then the lesson goes on."""
    said = " ".join(["It has been found."] * 10)
    text = f"""# Title

## Section

<!-- slide: Ask -->

> **What do you expect?** How many?

<!-- slide: Told -->

| a |
|---|
| 1 |

{said}

<!-- slide: More -->

- Something else.

<!-- slide -->

$$
x
$$

Aside.
"""
    ask, told, more = slides_of(text)
    assert [slide.answers for slide in (ask, told, more)] == [False, True, False]
    assert told.blocks == ["| a |\n|---|\n| 1 |"] and told.notes == [said]
    assert more.blocks == ["- Something else.", "$$\nx\n$$"] and more.notes == [said, "Aside."]


@pytest.mark.parametrize("text", ["<!-- slide: A -->\n", "<!-- slide: A -->\n\n## B\n", "<!-- slide -->\n\nB\n"])
def test_a_mark_that_marks_nothing(text):
    with pytest.raises(ValueError, match="<!-- slide"):
        slides_of(text)


def test_in_a_browser(folder):
    """Nothing is cut off, at any setting of a picture; what is too much is found; nothing comes from a network."""
    with chromium() as browser:
        tab = browser.new_page()
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        pages = [folder / "index.html", *decks(folder, *(chapter.number for chapter in CHAPTERS))]
        for page in pages:
            assert faults(tab, page) == []
        assert asked and all(url.startswith(("file:", "data:")) for url in asked)
        slides, handout = decks(folder, 4)
        text = slides.read_text("utf-8")
        broken = folder / "broken.html"
        for old, new in (("</li>", f"{' too much' * 300}</li>"), ("<td>", f"<td>{'wide' * 100}")):
            broken.write_text(text.replace(old, new, 1), "utf-8")
            assert len(faults(tab, broken)) == 1

        tab.goto(handout.as_uri())
        assert_accessible(tab)
        tab.goto(slides.as_uri())
        tab.keyboard.press("ArrowRight")
        assert tab.evaluate("Reveal.getIndices().h") == 1
        while not tab.locator(".present .frame:visible").count():
            tab.keyboard.press("ArrowRight")
        setting = tab.locator(".present output").inner_text()
        tab.locator(".present .less").click()
        assert tab.locator(".present output").inner_text() != setting
        with tab.expect_popup() as speaker:
            tab.keyboard.press("s")
        speaker.value.locator(".speaker-controls-notes .value", has_text="slot 5 × 4 + 1 = 21").wait_for()
