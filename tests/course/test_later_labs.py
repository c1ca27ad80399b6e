"""What the plain labs from chapter 9 on print; the others are in test_labs.py, so that two processes share them."""

from tests.course.course_text import CHAPTERS, for_each
from tests.course.lab_stories import assert_told


@for_each(CHAPTERS[8:])
def test_lab(chapter, demo_checkpoint, short_demo, any_model, capsys, monkeypatch):
    # Apart from measurements lab 11 prints the same whatever the model, lab 14 whatever its weights.
    checkpoint = {11: any_model, 14: short_demo}.get(chapter.number, demo_checkpoint)
    assert_told(chapter, checkpoint, any_model, capsys, monkeypatch)
