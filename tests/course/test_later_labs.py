"""What the plain labs from chapter 9 on print; the others are in test_labs.py, so that two processes share them."""

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.course.course_text import CHAPTERS
from tests.course.lab_stories import assert_told


@pytest.fixture(scope="module")
def any_model(tmp_path_factory) -> Path:
    """For labs in which the words do not matter."""
    return make_checkpoint(tmp_path_factory.mktemp("any"), "llama", max_position_embeddings=2048)


@pytest.mark.parametrize("chapter", CHAPTERS[8:], ids=[f"ch{chapter.number:02}" for chapter in CHAPTERS[8:]])
def test_lab(chapter, demo_checkpoint, short_demo, any_model, capsys, monkeypatch):
    # Apart from measurements lab 11 prints the same whatever the model, lab 14 whatever its weights.
    checkpoint = {11: any_model, 14: short_demo}.get(chapter.number, demo_checkpoint)
    assert_told(chapter, checkpoint, any_model, capsys, monkeypatch)
