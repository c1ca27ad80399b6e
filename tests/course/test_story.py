"""The line that says what a lab is doing: in a terminal only, and never in the middle of what is printed."""

import io

import pytest
from rich.console import Console

from chapters import story
from chapters.story import Story, busy, with_progress


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def screen(request, monkeypatch):
    """What is written to stderr, and whether it is a terminal."""
    file = io.StringIO()

    def console(stderr: bool = False, **options) -> Console:
        return Console(file=file, force_terminal=request.param) if stderr else Console(file=io.StringIO(), **options)

    monkeypatch.setattr(story, "Console", console)
    return file, request.param


def test_a_lab_says_what_it_does(screen):
    file, is_terminal = screen
    told = Story()
    with busy("the lab begins"):
        assert len(story._lines) == is_terminal
        told.part("Counting")
        assert list(with_progress([7, 8, 9], "counting")) == [7, 8, 9]
        told.say("Three.")
    said = file.getvalue()
    if is_terminal:
        places = [said.index(text) for text in ("the lab begins", "Counting", "counting")]
        assert places == sorted(places)
    else:
        assert said == ""
    assert not story._lines


def test_the_line_goes_with_an_error(screen):
    with pytest.raises(ZeroDivisionError), busy("dividing"), busy("by zero"):
        1 / 0  # noqa: B018
    assert not story._lines


def test_the_line_is_off_while_something_is_printed(screen, monkeypatch):
    is_on = []
    told = Story()
    print_it = told._console.print
    monkeypatch.setattr(
        told._console,
        "print",
        lambda *what, **how: (
            is_on.append(any(line._live.is_started for line in story._lines)) or print_it(*what, **how)
        ),
    )
    with busy("working"):
        told.say("Something.")
        told.log("a line")
        assert not story._lines or story._lines[-1]._live.is_started
    assert is_on and not any(is_on)
