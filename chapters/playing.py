"""What one plays with in a lab's notebook: a button for the next step of a scene, buttons for the rest, and panels.

Two cells show it. The first has `player, turn = playground(...)`, or playground_of(page) for a lab that runs on a web
page as well. The second calls turn(), by which marimo runs it again after each action, binds controls =
player.controls() and ends with player.show(controls).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from types import SimpleNamespace
from typing import Any

from rich.console import RenderableType

from chapters.course import ROOT, TITLES
from chapters.player import Action, Move, Player, Scene, meaning
from chapters.story import PRINTED, as_html, notebook

Draw = Callable[[Iterable[tuple[str, Any]]], str]
FREELY, GO = "on your own", "\u25b6"
Panels = Callable[[Any], Iterable[tuple[str, RenderableType]]]
SHARED = ROOT.parent / "nanovllm" / "serving" / "http" / "page"
STYLES = (SHARED / "theme.css", SHARED / "pictures.css", ROOT / "site" / "assets" / "lab.css")  # of a page's lab


HOW_TO_PLAY = (
    "Begin with the green button: where it says Next, each press shows the next thing. Rest the mouse on any other "
    "button to read what it does."
)
HOW_TO_WAIT = (
    "There is nothing to press: the parts of the lab have begun to run, one after another, which takes some minutes. "
    "Some of them measure this machine, so let it do nothing else meanwhile."
)
HOW_TO_CHANGE = (
    "Each part is a cell: what it tells, and below that its code. Change a number and run the cell again (Ctrl+Enter). "
    "lab.py keeps your changes, but not in a folder below /tmp, where marimo saves nothing by itself; `git checkout` "
    "brings back what was there."
)


def title(number: int, *, playable: bool = True) -> Any:
    """What a notebook begins with. A terminal says so elsewhere."""
    marimo = notebook()
    how = f"{HOW_TO_PLAY if playable else HOW_TO_WAIT} {HOW_TO_CHANGE}"
    return marimo.md(f"# Lab {number}: {TITLES[number]}\n\n{how}") if marimo else None


def start_button(time: str) -> Any:
    """Of parts that would keep the notebook busy while one plays: they wait until it is pressed."""
    marimo = notebook()
    return marimo.ui.run_button(label=f"\u25b6 Run the parts below ({time})") if marimo else None


def playground(
    new_world: Callable[[], Any],
    panels: Panels,
    actions: Sequence[Action],
    scenes: Sequence[Scene] = (),
    ask: str = "",
    first: str = "",
    preparing: str = "Getting everything ready",
) -> tuple["Playing | Nothing", Callable[[], object]]:
    """The world to play with, and what tells marimo that it has changed. A terminal has nothing to play with.

    ask: the hint of a text field, whose text the world's typed() gets. first: where there are no scenes, the key of the
    action to begin with. preparing: what is said while the world is made.
    """
    acts = sorted(actions, key=lambda action: action.key != first)
    page = SimpleNamespace(new_world=new_world, panels=panels, ACTIONS=acts, SCENES=list(scenes), ASK=ask)
    return _playground(page, lambda shown: "".join(panel(title, what) for title, what in shown), preparing)


def playground_of(page: Any) -> tuple["Playing | Nothing", Callable[[], object]]:
    """The same for a lab's page.py: its world, and its panels as the web page draws them."""
    return _playground(page, panels_of_page, "Getting everything ready")


def _playground(page: Any, draw: Draw, preparing: str) -> tuple["Playing | Nothing", Callable[[], object]]:
    marimo = notebook()
    if marimo is None:
        return Nothing(), lambda: None
    turn, set_turn = marimo.state(0, allow_self_loops=True)  # the cell that has the buttons shows what they do
    with marimo.status.spinner(title=preparing, remove_on_exit=True):
        return Playing(marimo, page, set_turn, draw), turn


class Nothing:
    """What a terminal has instead."""

    def controls(self) -> None: ...

    def show(self, controls: None) -> None: ...


class Playing:
    """The state of the game between two runs of the cell that shows it."""

    def __init__(self, marimo: Any, page: Any, set_turn: Callable[[Any], object], draw: Draw) -> None:
        self._mo, self._page, self._set_turn, self._draw = marimo, page, set_turn, draw
        self._player = Player(page)
        self._scene = 0 if page.SCENES else -1  # -1: none
        if page.SCENES:
            self._player.go_to(page.SCENES[0].link)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Playing":
        """marimo copies its elements, and with them what they call."""
        return self

    # -- what can be done ---------------------------------------------------------------------------------------------

    def _done(self) -> None:
        self._set_turn(lambda turn: turn + 1)

    def _choose(self, title: str) -> None:
        titles = [scene.title for scene in self._page.SCENES]
        self._scene = titles.index(title) if title in titles else -1
        self._start_over()

    def _start_over(self) -> None:
        self._player.go_to(self._page.SCENES[self._scene].link if self._scene >= 0 else "")
        self._done()

    def _forward(self) -> None:
        self._player.forward()
        self._done()

    def _back(self) -> None:
        self._player.back()
        self._done()

    def _act(self, key: str) -> None:
        self._player.do(key)
        self._done()

    def _typed(self, text: str) -> None:
        if text:
            self._player.do("t", text)
            self._done()

    # -- what there is to see -----------------------------------------------------------------------------------------

    def controls(self) -> Any:
        """The elements that act, by name: one element of marimo's, which a cell binds to a name."""
        ui, page, player = self._mo.ui, self._page, self._player
        found: dict[str, Any] = {}
        if page.SCENES:
            titles = [scene.title for scene in page.SCENES]
            chosen = titles[self._scene] if self._scene >= 0 else FREELY
            found["scenes"] = ui.dropdown([*titles, FREELY], value=chosen, label="Show me", on_change=self._choose)
            if player.ahead:
                num_all = len(player.ahead) + len(player.done)
                label = f"{GO} Next: {self._said_of(player.ahead[0])} ({len(player.done) + 1} of {num_all})"
                found["next"] = self._button(label, self._forward, kind="success")
            elif 0 <= self._scene < len(titles) - 1:
                title = titles[self._scene + 1]
                found["next"] = self._button(f"{GO} Next: {title}", partial(self._choose, title), kind="success")
            found["back"] = self._button("back", self._back, disabled=not player.done)
            found["over"] = self._button("start over", self._start_over)
        for action in page.ACTIONS:
            if action.label:
                is_first = not page.SCENES and action is page.ACTIONS[0]
                name = f"{action.key} {action.label}" if len(action.key) == 1 else action.label  # as texts name it
                label = f"{GO} {name}" if is_first else name
                kind = "success" if is_first else "neutral"
                what = meaning(player.world, action)
                found[f"act {action.key}"] = self._button(
                    label, partial(self._act, action.key), kind=kind, tooltip=what
                )
        if page.ASK:
            found["ask"] = ui.text(placeholder=page.ASK, full_width=True, on_change=self._typed)
        return ui.dictionary(found)

    def show(self, controls: Any) -> Any:
        mo, player = self._mo, self._player
        own = mo.hstack(
            [controls[name] for name in controls if name.startswith("act ")], justify="start", wrap=True, gap=0.25
        )
        rows: list[Any] = []
        if self._page.SCENES:
            rows.append(controls["scenes"])
            if self._scene >= 0:
                rows.append(mo.md(self._page.SCENES[self._scene].text))
            steps = [controls[name] for name in ("next", "back", "over") if name in controls]
            rows.append(mo.hstack(steps, justify="start", wrap=True))
            own = mo.vstack([mo.md("Or do something yourself:"), own])
        rows.append(own)
        if self._page.ASK:
            rows.append(controls["ask"])
        if player.said:
            rows.append(mo.callout(mo.Html(f"<span>{escape(player.said)}</span>"), kind="info"))
        rows.append(mo.Html(self._draw(self._page.panels(player.world))))
        return mo.vstack(rows)

    def _button(self, label: str, act: Callable[[], None], **look: Any) -> Any:
        return self._mo.ui.button(label=label, on_change=lambda _: act(), **look)

    def _said_of(self, move: Move) -> str:
        if move.text is not None:
            return f"type {move.text!r}"
        return next(action.label for action in self._page.ACTIONS if action.key == move.key)


def panel(title: str, what: RenderableType) -> str:
    drawn = as_html(what, markup=False)  # somebody may have typed it
    return f"<div><b>{escape(title)}</b><pre{PRINTED}>{drawn}</pre></div>"


def panels_of_page(panels: Iterable[tuple[str, str]]) -> str:
    """HTML of a page's panels, with the styles that they have there; the notebook's own stay as they are."""
    styles = "\n".join(path.read_text("utf-8") for path in STYLES).replace("color-scheme: light dark;", "")
    drawn = "".join(f'<section class="panel"><h3>{escape(title)}</h3>{what}</section>' for title, what in panels)
    return f"<style>.of-page {{ {styles.replace(':root', '&')} }}</style>" + (
        f'<div class="of-page"><div class="panels">{drawn}</div></div>'
    )
