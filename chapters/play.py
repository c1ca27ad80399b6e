"""Play: what both faces of a lab share, the notebook (playing.py) and the page in a browser (site/player.py).

A world is an object of the lab that holds the engine's objects and has the actions as methods.
"""

from typing import Any, NamedTuple


class Action(NamedTuple):
    """A key, what its button says, and the method of the world that it calls (a str that it returns is shown).

    Without a label it has a key only, on the page.
    """

    key: str
    label: str
    method: str


def actions(text: str) -> list[Action]:
    """From "key|label|method, key|label|method"."""
    return [Action(*each.split("|")) for each in text.split(", ")]


def act(world: Any, method: str, *args: str) -> str:
    """Do it. Returns what the world says of it, or why it cannot be done."""
    try:
        return getattr(world, method)(*args) or ""
    except ValueError as error:
        return str(error)
