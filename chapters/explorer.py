"""Explorer: the terminal app of a lab that one plays with. Keys and buttons act, panels draw what the engine holds."""

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from textual.app import App, ComposeResult
from textual.containers import ItemGrid, VerticalScroll
from textual.widgets import Button, Footer, Header, Input, Static

from chapters.play import Action, act
from chapters.site.player import Player

SCROLL = {"up": "scroll_up", "down": "scroll_down", "pageup": "scroll_page_up", "pagedown": "scroll_page_down"}


Panels = Callable[[Any], Iterable[tuple[str, RenderableType]]]


class Explorer(App[None]):
    """Plays with a world (play.py).

    panels(world) -> list of (title, renderable), redrawn after each action. With `ask`, the hint of a text field,
    there is one: the key t goes there, Enter and Escape come back, and the world's typed(text) gets the text. With
    `page`, the chapter's page.py, its scenes can be played: ] and [ begin one, and each . does its next action.
    """

    AUTO_FOCUS = None  # keys act from the start

    CSS = """
    #panels { height: 1fr; scrollbar-size-vertical: 1; }
    #said { height: auto; padding: 0 1; color: $accent; }
    #buttons { grid-gutter: 0 1; }
    #buttons Button { width: 1fr; text-style: none; }
    Input { height: 1; border: none; }
    """

    def __init__(
        self,
        title: str,
        world: Any,
        panels: Panels,
        actions: list[Action],
        ask: str = "",
        page: ModuleType | None = None,
    ) -> None:
        super().__init__()
        self.title, self.world, self.actions, self.ask = title, world, actions, ask
        self.draw_panels = panels
        self.player = Player(page) if page else None
        self.scene = -1
        if page:
            self.bind("right_square_bracket", "begin_scene(1)", description="next scene", key_display="]")
            self.bind("left_square_bracket", "begin_scene(-1)", show=False)
            self.bind("full_stop", "go_on", description="go on in it", key_display=".")
        if ask:
            self.bind("t", "type", description="type")
            self.bind("escape", "leave", show=False)
        for action in actions:
            self.bind(action.key, f"act('{action.method}')", show=False)  # its button names it
        for key in SCROLL.keys() - {action.key for action in actions}:
            self.bind(key, f"scroll('{SCROLL[key]}')", show=False)
        self.bind("q", "quit", description="quit")

    def panels(self) -> Iterable[tuple[str, RenderableType]]:
        return self.draw_panels(self.world)

    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll(id="panels", can_focus=False):
            for index, _ in enumerate(self.panels()):
                yield Static(id=f"panel{index}")
        if self.ask:
            yield Input(placeholder=f"{self.ask} (t to type, Enter when done)")
        yield Static(id="said", markup=False)
        labels = {action.method: f"{action.key} {action.label}" for action in self.actions if action.label}
        width = max(map(len, labels.values())) + 4
        with ItemGrid(id="buttons", min_column_width=width, max_column_width=width):  # in rows, as the terminal is wide
            for method, label in labels.items():
                yield Button(label, id=method, compact=True)
        yield Footer()

    def on_mount(self) -> None:
        self._draw("")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.action_act(str(event.button.id))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.clear()
        self.action_leave()
        self.action_act("typed", event.value)

    def action_scroll(self, method: str) -> None:
        getattr(self.query_one("#panels"), method)()

    def action_type(self) -> None:
        self.query_one(Input).focus()

    def action_leave(self) -> None:
        self.set_focus(None)

    def action_act(self, method: str, *args: str) -> None:
        """Do it, and draw what has become of the world."""
        self._draw(act(self.world, method, *args))

    def action_begin_scene(self, by: int) -> None:
        """The next scene, or the one before: its world, before its actions."""
        assert self.player is not None
        scenes = self.player.page.SCENES
        self.scene = (self.scene + by) % len(scenes) if self.scene >= 0 else 0
        title, link, text = scenes[self.scene]
        self.player.go_to(link)
        self.world = self.player.world
        self._draw(f"{title} ({self.scene + 1} of {len(scenes)}). {text}")

    def action_go_on(self) -> None:
        """The next action of the scene. What you have done in between stays."""
        assert self.player is not None
        self.player.forward()
        left = len(self.player.ahead)
        ends = f"({left} to go)" if left else "(the scene has ended; ] begins the next one)"
        self._draw(f"{self.player.said} {ends}" if self.scene >= 0 else "] begins a scene")

    def _draw(self, said: str) -> None:
        for index, (title, renderable) in enumerate(self.panels()):
            self.query_one(f"#panel{index}", Static).update(Panel(renderable, title=title, title_align="left"))
        self.query_one("#said", Static).update(said)
