"""Pictures of the two memories of lab 4. What is done to them is in memories.py."""

from rich.table import Table
from rich.text import Text

from chapters.ch04_paged_attention.memories import BLOCK_SIZE, COLUMNS, TwoMemories, slots_of
from chapters.draw import color_of

GROUPS_PER_ROW = 8


def draw_contiguous(world: TwoMemories) -> Text:
    """A letter for each slot: capital where a token is stored, small where reserved and empty."""
    cells = [("·", "dim")] * world.contiguous.num_slots
    for name, slots in world.contiguous.reserved.items():
        for index, slot in enumerate(slots):
            cells[slot] = _cell(world, name, index < world.lengths[name])
    return _draw_cells("slot", BLOCK_SIZE, cells, [""] * (len(cells) // BLOCK_SIZE))


def draw_paged(world: TwoMemories) -> Text:
    """The same for the pool: = is cached and nobody's, +1 after a block says that one more sequence shares it."""
    cells: list[tuple[str, str]] = []
    for block in world.manager.blocks:
        cells += [("=", "white on grey37") if block.block_hash else ("·", "dim")] * BLOCK_SIZE
    for name, seq in reversed(world.seqs.items()):
        for index, slot in enumerate(slots_of(seq)):
            cells[slot] = _cell(world, name, index < seq.num_computed_tokens)
    shared = [f"+{block.ref_count - 1}" if block.ref_count > 1 else "" for block in world.manager.blocks]
    return _draw_cells("block", 1, cells, shared)


def draw_counters(world: TwoMemories) -> Table:
    table = Table("", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, numbers in world.counters().items():
        table.add_row(name, *(str(numbers[column]) for column in COLUMNS))
    return table


def _cell(world: TwoMemories, name: str, stored: bool) -> tuple[str, str]:
    color = color_of(world.arrivals[name])
    return (name, f"black on {color}") if stored else (name.lower(), color)


def _draw_cells(unit: str, step: int, cells: list[tuple[str, str]], marks: list[str]) -> Text:
    text = Text()
    for group, mark in enumerate(marks):
        if group % GROUPS_PER_ROW == 0:
            text.append("\n" if group else "").append(f"{unit} {group * step:>3}  ", "dim")
        for cell, style in cells[group * BLOCK_SIZE : (group + 1) * BLOCK_SIZE]:
            text.append(cell, style)
        text.append(f"{mark:<3}")
    return text
