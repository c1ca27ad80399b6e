"""The pictures in the texts: the files are what `python -m chapters pictures` draws."""

import re
from itertools import accumulate
from xml.etree import ElementTree

import pytest

from chapters import pictures
from chapters.course import ROOT, find_chapter
from chapters.recording import quoted_sheet
from nanovllm import SamplingParams
from tests.course.course_text import CHAPTERS

SVG = "{http://www.w3.org/2000/svg}"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
FILES = pictures.wanted()


def place(path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=place)
def test_a_file_is_what_the_script_draws(path):
    """Processors may round the last digit of a coordinate differently; everything else is the same."""
    kept, drawn = path.read_text("utf-8"), FILES[path]()
    changed = f"{place(path)} has changed: python -m chapters pictures"
    without_ids = [re.sub(r'\b(id|aria-labelledby)="[^"]*"', "", text) for text in (kept, drawn)]
    words = [NUMBER.sub("#", text) for text in without_ids]
    assert words[0] == words[1], changed
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in without_ids]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.11), changed


def test_table_and_picture_have_the_same_tokens_a_second():
    chapter = find_chapter(13)
    sheet = quoted_sheet(chapter.folder, "a", "takes")
    said = {frame.setting: frame.text for frame in chapter.module("pictures").draft_tokens().frames}
    for number, (a, takes) in enumerate(zip(sheet.column("a"), sheet.column("takes"), strict=True)):
        if (column := f"k = {takes:.0f}") in sheet.columns:
            rate = sheet.column(column)[number]
            assert f"takes {takes:.0f}, for {rate:.0f} tokens" in said[f"{100 * a:.0f}%"]


@pytest.mark.parametrize("path", FILES, ids=place)
def test_a_file_is_small_and_says_what_it_shows(path):
    """No scripts, nothing from elsewhere, both schemes, and words for those who do not see it."""
    text = path.read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert path.stat().st_size < 60_000
    assert "prefers-color-scheme: dark" in text and "<script" not in text and "href" not in text
    title, what = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and what is not None and title.text and what.text
    assert root.get("role") == "img" and root.get("aria-labelledby", "").split() == [title.get("id"), what.get("id")]


def test_every_file_is_shown_somewhere():
    there = {*ROOT.glob(f"{pictures.FOLDER}/*.svg"), *ROOT.glob(f"nano_engine/{pictures.FOLDER}/*.svg")}
    there |= {*ROOT.glob(f"ch*/{pictures.FOLDER}/*.svg")}
    assert there == set(FILES)
    readme = (ROOT.parent / "README.md").read_text("utf-8")
    assert set(pictures.IMAGE.findall(readme)) == {path.stem for path in FILES if path.parent.parent == ROOT}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.folder.name)
def test_every_chapter_has_a_picture(chapter):
    assert pictures.IMAGE.search((chapter.folder / "README.md").read_text("utf-8"))


def test_the_street_is_what_a_sampler_makes_of_it():
    """Chapter 8, row by row: the temperatures rise, and each row begins with what the one before has left. The shares
    are those of the slow twin."""
    picture, theory = (find_chapter(8).module(name) for name in ("pictures", "theory"))
    root = ElementTree.fromstring((find_chapter(8).folder / "drawn" / "street.svg").read_text("utf-8"))
    *rows, walk = root.find(f"{SVG}desc").text.replace(". A walk", "; A walk").split("; ")
    settings = [{}, {"temperature": picture.TEMPERATURE}]
    settings.append(settings[1] | {"top_p": picture.TOP_P})
    assert picture.TEMPERATURE > 1 and len(rows) == len(settings)
    for row, each in zip(rows, settings, strict=True):
        title, said = row.rsplit(": ", 1)
        assert title.startswith(
            f"top_p {each['top_p']}" if "top_p" in each else f"temperature {each.get('temperature', 1)}:"
        )
        shares = theory.reshape(list(picture.LOGITS), SamplingParams(**each)).after
        kept = [(name, share) for name, share in zip(picture.NAMES, shares, strict=True) if share]
        assert said == ", ".join(f"{name} {share:.0%}" for name, share in kept)
    ends = accumulate(share for _, share in kept)
    house = next(name for (name, _), end in zip(kept, ends, strict=True) if end > picture.NOISE)
    assert walk == f"A walk of {picture.NOISE} ends at {house}."


@pytest.mark.parametrize("limit", ["POOL", "SEATS", "BUDGET"])
def test_seven_steps_meet_each_limit(limit, monkeypatch):
    """Chapter 5 says that all three show: without any one of them, the steps would be different."""
    picture = find_chapter(5).module("pictures")
    drawn = picture.seven_steps()
    monkeypatch.setattr(picture, limit, 99)
    steps, without = (re.findall(r"step \d+: ([^;]*)", text) for text in (drawn, picture.seven_steps()))
    assert len(steps) == 7 and steps != without


def test_a_picture_that_has_changed_is_noticed():
    path = next(iter(FILES))
    drawn = FILES[path]()
    assert NUMBER.sub("#", drawn) != NUMBER.sub("#", drawn.replace("scheduler", "planner"))


def test_a_slot_is_not_its_position():
    """Chapter 3 warns of taking one for the other, which its picture must not invite to. And q comes from the token."""
    picture = find_chapter(3).module("pictures")
    root = ElementTree.fromstring((find_chapter(3).folder / "drawn" / "write_then_read.svg").read_text("utf-8"))
    size, table = picture.BLOCK_SIZE, picture.BLOCK_TABLE
    slots = [table[i // size] * size + i % size for i in range(picture.NUM_TOKENS)]
    assert not any(slot == position for position, slot in enumerate(slots))
    [last] = [text.text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("slot_mapping")]
    assert last == f"slot_mapping: {slots[-1]}"

    children = list(root)
    [at] = [i for i, child in enumerate(children) if child.text == "q"]
    left, top, width = (float(children[at - 1].get(name)) for name in ("x", "y", "width"))  # its box
    tips = [[float(number) for number in NUMBER.findall(path.get("d"))[:2]] for path in root.findall(f"{SVG}path")]
    assert any(left <= x <= left + width and y == top for x, y in tips), "nothing leads to q"


def test_a_picture_that_nothing_draws():
    with pytest.raises(ValueError, match=r"ch01_inference/README.md shows drawn/nobody.svg, and .* no nobody\(\)"):
        pictures.drawing(CHAPTERS[0], "nobody")
