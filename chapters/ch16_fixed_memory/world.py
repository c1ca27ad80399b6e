"""What the lab of chapter 16 plays with: a notebook of fixed size, and a shelf for snapshots. Actions only.

An action of one of the two shows it. drawing.py draws this object in a terminal, page.py in a browser.
"""

from functools import cached_property
from typing import Any

from chapters.ch16_fixed_memory.notebook import DECAYS, RULES, Notebook
from chapters.ch16_fixed_memory.shelf import BOUNDS, Shelf, workloads
from chapters.player import actions

ACTIONS = actions(
    "w|write|write, c|move|move, d|rule|next_rule, f|fade|next_decay, n|send|send, p|end|mark_end, b|fork|mark_fork, "
    "a|ours|mark_ours, o|work|next_workload, m|room|next_bound, r|new|reset"
)
ASK = "positions for snapshots, such as 592 1488"


def tokens(positions: list[int]) -> str:
    return ", ".join(f"{position:,}" for position in positions) or "none"


class World:
    """shows: the half that is drawn, "notebook" or "shelf"."""

    def __init__(self) -> None:
        self.events: list[Any] = []  # of blocks, which a page could let glide; here there are none
        self.reset()

    def reset(self) -> str:
        """Start over: an empty notebook, and an empty shelf for the first workload."""
        self.notebook, self.shows = Notebook(), "notebook"
        vars(self).pop("shelf", None)
        return "An empty notebook. w writes a line into it; n sends a request, and shows the snapshots."

    @cached_property
    def shelf(self) -> Shelf:
        """Made when it is first shown: three pools of blocks."""
        return Shelf()

    # -- the notebook -------------------------------------------------------------------------------------------------

    def write(self) -> str:
        """The notebook: somebody comes into the house, and a line is written."""
        self.shows = "notebook"
        name, room = self.notebook.come_in()
        return f"{name} is in the {room}. {self._verdict()}"

    def move(self) -> str:
        """The notebook: whoever has not moved for longest goes to another room, and a new line is written."""
        self.shows = "notebook"
        name, room = self.notebook.move()
        return f"{name} is now in the {room}. {self._verdict()}"

    def next_rule(self) -> str:
        """The notebook: write all lines by the next rule (add up; the delta rule; half of the delta rule's change)."""
        self.shows = "notebook"
        self.notebook.rule = RULES[(RULES.index(self.notebook.rule) + 1) % len(RULES)]
        return f"The same lines, written by a different rule: {self.notebook.rule.name}. {self._verdict()}"

    def next_decay(self) -> str:
        """The notebook: before each line, let what stands there fade to 1, 0.9 or 0.7 of itself."""
        self.shows = "notebook"
        self.notebook.decay = DECAYS[(DECAYS.index(self.notebook.decay) + 1) % len(DECAYS)]
        return f"The same lines; before each, the rest fades to {self.notebook.decay:g} of itself. {self._verdict()}"

    def _verdict(self) -> str:
        answers = self.notebook.answers
        return f"{sum(answer.is_right for answer in answers)} of {len(answers)} answers are right." if answers else ""

    # -- the shelf ----------------------------------------------------------------------------------------------------

    def send(self) -> str:
        """Snapshots: send the next request, with the snapshots that you have placed and with the engine's."""
        self.shows = "shelf"
        sent = self.shelf.send()
        found = "begins at its first token" if not sent.yours else f"begins after token {sent.yours:,}"
        others = f"with the engine's snapshots at {sent.policy:,}, unbounded at {sent.unbounded:,}"
        return f"Request {len(self.shelf.sent)} {found}; {others}."

    def mark_end(self) -> str:
        """Snapshots: place one at the end of the next prompt's last full block."""
        self.shows = "shelf"
        self.shelf.mark([] if self.shelf.is_over else [self.shelf.last_end])
        return self._marked()

    def mark_fork(self) -> str:
        """Snapshots: place one where the next prompt leaves what the cache knows."""
        self.shows = "shelf"
        if not self.shelf.is_over and not self.shelf.fork:
            return "The cache knows nothing of this prompt, so there is no fork."
        self.shelf.mark([] if self.shelf.is_over else [self.shelf.fork])
        return self._marked()

    def mark_ours(self) -> str:
        """Snapshots: place those that the engine's policy would take of the next prompt."""
        self.shows = "shelf"
        self.shelf.mark_as_policy()
        return self._marked()

    def typed(self, text: str) -> str:
        """Snapshots: place one for each of these positions, at the last end of a block that is not after it.

        Positions are in tokens, with spaces between them.
        """
        self.shows = "shelf"
        try:
            positions = [int(word.replace(",", "")) for word in text.replace(";", " ").split()]
        except ValueError:
            raise ValueError(f"Type positions in tokens, with spaces between: 592 1488. Found {text!r}.") from None
        self.shelf.mark(positions)
        return self._marked()

    def _marked(self) -> str:
        return f"Snapshots of the next prompt will be taken at: {tokens(sorted(filter(None, self.shelf.marks)))}."

    def next_workload(self) -> str:
        """Snapshots: start over with the next of the four workloads."""
        self.shows, names = "shelf", list(workloads())
        self.shelf = Shelf(names[(names.index(self.shelf.workload) + 1) % len(names)], self.shelf.bound)
        return f"Requests are now: {self.shelf.workload}. The cache is empty."

    def next_bound(self) -> str:
        """Snapshots: start over with room for 8, 4 or 2 snapshots."""
        self.shows = "shelf"
        self.shelf = Shelf(self.shelf.workload, BOUNDS[(BOUNDS.index(self.shelf.bound) + 1) % len(BOUNDS)])
        return f"There is room for {self.shelf.bound} snapshots. The cache is empty."
