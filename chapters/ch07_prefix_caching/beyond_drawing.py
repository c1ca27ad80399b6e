"""Conversations with tiers below the pool, as a terminal shows them."""

from rich.text import Text

from chapters.ch07_prefix_caching.beyond import SIGNS, Conversations

STYLES = {
    "pool": "black on green",
    "memory": "black on bright_magenta",
    "disk": "black on yellow",
    "computed": "black on cyan",
    "own": "white on grey37",
}


def draw_visits(world: Conversations, last: int) -> Text:
    """A sign for each block of a prompt. A line marks where a process ended."""
    if not world.visits:
        return Text("nobody yet: c lets the first one come", "dim")
    lines = []
    for number, visit in list(enumerate(world.visits))[-last:]:
        if number in world.restarts:
            lines.append(Text("-- a new process --", "dim"))
        line = Text(f"{visit.name:8}")
        for index in range(visit.num_blocks):
            line.append(SIGNS[visit.place(index)], STYLES[visit.place(index)])
        counts = ", ".join(f"{place} {num}" for place, num in visit.tokens().items() if num)
        lines.append(line.append(f"{'':{20 - visit.num_blocks}}{counts}", "dim"))
    return Text("\n").join(lines)
