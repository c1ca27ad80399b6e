"""The lab of chapter 16 as a terminal shows it."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chapters.ch16_fixed_memory.notebook import Answer, State
from chapters.ch16_fixed_memory.placing import BLOCK_SIZE
from chapters.ch16_fixed_memory.shelf import Shelf
from chapters.draw import make_table

WIDTH = 60  # cells of a prompt's bar


def draw_state(state: State) -> Text:
    """Numbers above 0 on blue, below 0 on red, the stronger the larger they are."""
    lines = []
    for row in state:
        line = Text()
        for x in row:
            depth = min(int(200 * abs(x)), 200)
            line.append(
                f"{x:6.2f}", f"white on rgb({'30,30' if x > 0 else f'{30 + depth},30'},{30 + depth if x > 0 else 30})"
            )
        lines.append(line)
    return Text("\n").join(lines)


def draw_answers(answers: list[Answer], columns: int = 2) -> RenderableType:
    if not answers:
        return Text("nobody is in the house: w writes a line", "dim")
    table = Table.grid(padding=(0, 2))
    cells = []
    for answer in answers:
        told = f"{answer.name:<5}{answer.found:<9}" + ("" if answer.is_right else f"not {answer.room}")
        cells.append(Text(f"{told:<23}{answer.strength:5.2f}", "green" if answer.is_right else "red"))
    for start in range(0, len(cells), columns):
        table.add_row(*cells[start : start + columns])
    return table


def bar_cells(length: int, positions: Sequence[int], width: int = WIDTH) -> list[int]:
    """In which cell of a bar each of these positions, ends of blocks, is the last one."""
    per_cell = blocks_a_cell(length, width)
    return [(position // BLOCK_SIZE - 1) // per_cell for position in positions]


def blocks_a_cell(length: int, width: int = WIDTH) -> int:
    return math.ceil(math.ceil(length / BLOCK_SIZE) / width)


def draw_next(shelf: Shelf) -> RenderableType:
    """One line for K/V, one for snapshots that are there, one for those that you want."""
    if shelf.is_over:
        return Text("all were sent; o takes another workload, r starts over", "dim")
    length = len(shelf.prompt)
    per_cell = blocks_a_cell(length)
    num_cells = -(-length // (BLOCK_SIZE * per_cell))
    num_known = shelf.num_matched // (BLOCK_SIZE * per_cell)

    def line(sign: str, positions: Sequence[int], style: str) -> Text:
        cells = set(bar_cells(length, positions))
        return Text("".join(sign if cell in cells else "·" for cell in range(num_cells)), style)

    table = Table.grid(padding=(0, 2))
    marks = sorted(filter(None, shelf.marks))
    known = Text("█" * num_known, "green").append("░" * (num_cells - num_known), "dim")
    table.add_row("K/V", known, f"{shelf.num_matched:,} of {length:,}")
    table.add_row("snapshots", line("▲", shelf.snapshots, "cyan"), f"begins at {shelf.begins:,}")
    table.add_row("yours", line("▼", marks, "yellow"), f"{len(marks)} to be taken")
    told = f"A cell is {per_cell * BLOCK_SIZE} tokens. The last full block ends at {shelf.last_end:,}"
    return Group(table, Text(f"{told}, known text at {shelf.fork:,}." if shelf.fork else f"{told}.", "dim"))


def draw_sent(shelf: Shelf) -> RenderableType:
    if not shelf.sent:
        return Text("none yet: place snapshots (p, b, a, or type positions), then n sends the request", "dim")
    table = make_table("", "tokens", "known", "you", "this engine", "unbounded", first=3, width=9)
    for number, sent in enumerate(shelf.sent, start=1):
        table.add_row(
            str(number), *(f"{n:,}" for n in (sent.length, sent.matched, sent.yours, sent.policy, sent.unbounded))
        )
    return table


def draw_computed(shelf: Shelf) -> RenderableType:
    computed = shelf.computed()
    table, most = Table.grid(padding=(0, 2)), max(1, *computed.values())
    for name, num in computed.items():
        table.add_row(name, f"{num:>7,}", Text("█" * round(40 * num / most), "cyan"))
    return table
