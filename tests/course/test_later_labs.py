"""What the plain labs from chapter 9 on print; the others are in test_labs.py, so that two processes share them."""

from tests.course.course_text import CHAPTERS
from tests.course.lab_stories import assert_told, for_each_lab


@for_each_lab(CHAPTERS[8:])
def test_lab(chapter, request, capsys, monkeypatch):
    assert_told(chapter, request, capsys, monkeypatch)
