"""What the guide for teachers says of the chapters is what the chapters say."""

import re

import pytest

from chapters import quiz
from chapters.course import EXERCISES, PART_TWO, ROOT, TITLES, find_chapter
from tests.course.course_text import for_each_chapter, text_of

GUIDE = (ROOT / "INSTRUCTOR.md").read_text("utf-8")


def table(*columns: str, section: str = "") -> list[list[str]]:
    """The rows of the first table, behind this text, whose heading begins with these columns."""
    heading = "| " + " | ".join(columns) + " |"
    at = GUIDE.index(heading.replace("|  |", "| |"), GUIDE.index(section))
    lines = GUIDE[at:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", text)}


def needs_of(chapter) -> str:
    """What the top of a text says of times and of chapters that it needs."""
    parts = [" ".join(part.split()) for part in text_of(chapter).split("\n\n")]
    return next(part for part in parts if re.search(r"the lab (takes )?ten\b", part))


def needed(chapter) -> set[int]:
    """The chapters that a text needs, as its top says; tables that show more are not needed."""
    said = re.split(r"; one table|\. (?:Some d|D)etails|\. You should", needs_of(chapter))[0].partition("eeds")[2]
    found: set[int] = set()
    for listed in re.findall(r"chapters? ((?:\d+(?: to \d+)?(?:, | and )?)+)", said):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed):
            found |= set(range(int(first), int(last or first) + 1))
    return found


@for_each_chapter
def test_the_tables_agree_with_the_text(chapter):
    number, needs = chapter.number, needs_of(chapter)
    [row] = [row for row in table("", "chapter", "a student can", "needs chapters") if row[0] == str(number)]
    assert row[1] == f"[{TITLES[number]}]({chapter.folder.name}/README.md)"
    assert numbers(row[3]) == needed(chapter), needs
    [times] = [row for row in table("chapter", "short path", "whole text", "lab alone") if row[0] == str(number)]
    hours = re.search(r"the exercises (an hour or two|two hours)", needs)[1]
    assert times[3] == "10" and times[5] == str(5 * round(2 * len(quiz.load(chapter)) / 5))
    assert times[6:] == [str(len(EXERCISES[number])), {"an hour or two": "1 to 2", "two hours": "2"}[hours]]


@for_each_chapter
def test_what_is_left_out_is_there(chapter):
    [row] = [row for row in table("chapter", "leave out", "and the exercises") if row[0] == str(chapter.number)]
    titles = set(re.findall(r"^##+ (.+)$", text_of(chapter), re.MULTILINE))
    assert set(re.findall('"([^"]+)"', row[1])) <= titles and row[1]
    assert set(re.findall("`(.+?)`", row[2])) < set(EXERCISES[chapter.number]), "not all of them"


@pytest.mark.parametrize("plan", ["Fifteen weeks", "Ten weeks"])
def test_a_plan_has_each_chapter_behind_those_it_needs(plan):
    done: set[int] = set()
    weeks = table("week", "chapters", "also", section=plan)
    assert len(weeks) == {"Fifteen weeks": 15, "Ten weeks": 10}[plan]
    for week, chapters, _ in weeks:
        done |= numbers(chapters)
        for number in numbers(chapters):
            assert needed(find_chapter(number)) <= done, f"week {week}, chapter {number}"
    assert done >= set(range(1, PART_TWO)) or plan != "Fifteen weeks"


def test_every_chapter_has_its_rows():
    everyone = [str(number) for number in TITLES]
    for columns in (("chapter", "first lesson"), ("chapter", "misconceptions", "ask"), ("chapter", "short path")):
        assert [row[0] for row in table(*columns)] == everyone
    briefs = numbers(" ".join(re.findall(r"\*\* \((chapter \d+)\)\.", GUIDE)))
    assert briefs == set(range(PART_TWO, len(TITLES) + 1))
