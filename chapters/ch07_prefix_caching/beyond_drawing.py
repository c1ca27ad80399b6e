"""Conversations with tiers below the pool, as a terminal shows them."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from chapters.ch07_prefix_caching.beyond import KEYS, PLACES, SIGNS, SIZES, Conversations

STYLES = {
    "pool": "black on green",
    "memory": "black on bright_magenta",
    "disk": "black on yellow",
    "computed": "black on cyan",
    "own": "white on grey37",
}


def panels(world: Conversations) -> list[tuple[str, RenderableType]]:
    return [
        ("sliders, in blocks; moving one plays everything again", draw_sliders(world)),
        (f"{world.order}: = pool, m memory, d disk, + computed, · not full", draw_visits(world, 10)),
        ("blocks that are kept", draw_filled(world)),
        ("prompt tokens", draw_totals(world)),
    ]


def draw_sliders(world: Conversations) -> Text:
    lines = []
    for tier, values in SIZES.items():
        line = Text(f"{KEYS[tier]} {tier:8}")
        for value in values:
            line.append(f"{value:^6}", "reverse bold" if value == world.sizes[tier] else "dim")
        lines.append(line)
    return Text("\n").join(lines)


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


def draw_filled(world: Conversations) -> Text:
    lines = []
    for tier, (num_kept, room) in world.filled().items():
        bar = Text("█" * (num_kept // 2), STYLES[tier].split()[-1]).append("░" * (room // 2 - num_kept // 2), "dim")
        lines.append(Text(f"{tier:8}").append(bar).append(f" {num_kept} of {room}"))
    return Text("\n").join(lines)


def draw_totals(world: Conversations) -> Table:
    totals = world.totals()
    table = Table(*(f"from {place}" if place != "computed" else place for place in PLACES), box=None, pad_edge=False)
    table.add_row(*(str(totals[place]) for place in PLACES))
    return table
