"""Player: what one plays with in a lab. The same code runs in a notebook and in the browser of a page (Pyodide).

A world is an object of the lab that holds the engine's objects and has the actions as methods. It is deterministic: the
same actions lead to the same state. So a list of actions *is* a state. Going back is playing all of them but the last,
and a link holds the list: `x7` is step 7 of the worked example, `n3gt(how far)` is three requests, a word for each, and
a typed request. What follows a slash is still to come: `x2/x5`.
"""

import re
from inspect import getdoc
from itertools import groupby
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import quote_plus, unquote_plus

MAX_MOVES = 500
MOVES = re.compile(r"(?P<key>[A-Za-z])(?:\((?P<text>[^()]*)\)|(?P<times>[1-9]\d{0,2}))?")


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


def meaning(world: Any, action: Action) -> str:
    """The first paragraph of what its method says of itself."""
    return " ".join((getdoc(getattr(world, action.method)) or "").split("\n\n")[0].split())


class Move(NamedTuple):
    key: str
    text: str | None = None  # of a typed request


class Scene(NamedTuple):
    """Something to see: a link to its beginning, with its actions still to come, and what to look at."""

    title: str
    link: str
    text: str


class Player:
    """One lab. `page` is its page.py: TITLE, new_world(), ACTIONS, ASK, SCENES, panels(world) and values(world)."""

    def __init__(self, page: ModuleType, link: str = "") -> None:
        self.page = page
        self.actions: dict[str, Action] = {action.key: action for action in page.ACTIONS}
        self.ahead: list[Move] = []
        self._play([])
        if link:
            self.go_to(link)

    def _play(self, moves: list[Move]) -> None:
        self.world: Any = self.page.new_world()
        self.done: list[Move] = []
        self.said = ""
        for move in moves:
            self._do(move)

    def _do(self, move: Move) -> None:
        if hasattr(self.world, "events"):
            self.world.events.clear()
        what = (self.actions[move.key].method,) if move.text is None else ("typed", move.text)
        self.said = act(self.world, *what)
        self.done.append(move)

    def do(self, key: str, text: str | None = None) -> None:
        """Any action. If it is the next one of those ahead, the others stay."""
        if len(self.done) >= MAX_MOVES:
            self.said = f"A link holds at most {MAX_MOVES} actions. Go back, or start over."
            return
        move = Move(key, text)
        self.ahead = self.ahead[1:] if self.ahead[:1] == [move] else []
        self._do(move)

    def forward(self) -> None:
        if self.ahead:
            self.do(*self.ahead[0])

    def back(self) -> None:
        if self.done:
            self.ahead = [self.done[-1], *self.ahead]
            self._play(self.done[:-1])

    def go_to(self, link: str) -> None:
        """The state that a link means. Raises ValueError, with nothing changed, if it means none."""
        done, _, ahead = link.partition("/")
        moves, self.ahead = self.parse(done), self.parse(ahead)
        self._play(moves)

    def parse(self, text: str) -> list[Move]:
        moves: list[Move] = []
        position = 0
        while position < len(text):
            found = MOVES.match(text, position)
            if found is None:
                raise ValueError(f"This link is broken: it cannot be read from {text[position : position + 20]!r} on.")
            position = found.end()
            key, typed = found["key"], found["text"]
            if (typed is None and key not in self.actions) or (typed is not None and (key != "t" or not self.page.ASK)):
                keys = " ".join(self.actions) + (" t(text)" if self.page.ASK else "")
                raise ValueError(f"This link asks for {found[0]!r}, and this lab has the actions {keys}.")
            move = Move(key, None if typed is None else unquote_plus(typed))
            moves += [move] * int(found["times"] or 1)
            if len(moves) > MAX_MOVES:
                raise ValueError(f"This link asks for more than {MAX_MOVES} actions.")
        return moves

    @property
    def link(self) -> str:
        return write_moves(self.done) + (f"/{write_moves(self.ahead)}" if self.ahead else "")

    @property
    def scene(self) -> list[str] | None:
        """Title and text of the scene that is being played."""
        moves = self.done + self.ahead
        for scene in self.page.SCENES:
            done, _, ahead = scene.link.partition("/")
            if moves == self.parse(done) + self.parse(ahead):
                return [scene.title, scene.text]
        return None

    def view(self) -> dict[str, Any]:
        """What the page shows, as text, numbers and HTML. did: what the last action means. values: what actions, by
        their keys, have set."""
        last = self.done[-1] if self.done else None
        return {
            "said": self.said,
            "panels": [list(panel) for panel in self.page.panels(self.world)],
            "values": self.page.values(self.world),
            "link": self.link,
            "scene": self.scene,
            "did": meaning(self.world, self.actions[last.key]) if last and last.text is None else "",
            "num_done": len(self.done),
            "num_ahead": len(self.ahead),
        }


def write_moves(moves: list[Move]) -> str:
    text = ""
    for move, same in groupby(moves):
        times = len(list(same))
        if move.text is not None:
            text += f"t({quote_plus(move.text)})" * times
        else:
            text += move.key + (str(times) if times > 1 else "")
    return text
