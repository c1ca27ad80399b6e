"""The simulator of chapter 7 as a terminal shows it."""

from rich.columns import Columns
from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from chapters.ch07_prefix_caching.simulator import BLOCK_SIZE, Simulator, in_words
from chapters.draw import draw_free_queue, pool_cells

LINE = 74  # characters of a request's picture in a row: a terminal of 80, less frame and scroll bar
KINDS = {
    "hit": ("=", "black on green"),
    "miss": ("+", "black on cyan"),
    "own": ("·", "black on yellow"),
    "wrong": ("!", "white on red"),
}


def draw_requests(world: Simulator, last: int) -> Text:
    """Each block in its colour: = found, + computed and now findable, · not full, so this request's alone.

    ! is a block whose K/V was computed for another text; there are none unless a fault is at work.
    """
    if not world.requests:
        return Text("none yet: n sends one, x plays the worked example", "dim")
    lines = []
    for request in world.requests[-last:]:
        state = "" if request.running else " (ended)"
        salt = f" salt {request.seq.cache_salt}" if request.seq.cache_salt else ""
        pictures = "".join(f" [{span.content_hash}]" for span in request.seq.mm_spans)
        line = Text(f"{request.name}{state}{salt}{pictures} ", "bold" if request.running else "dim")
        for index, block_id in enumerate(request.table):
            kind = request.kind(index)
            words = world.text(request.seq.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            sign, style = KINDS[kind]
            cell = f" {sign}{block_id} {words} "
            if line.cell_len + len(cell) > LINE:  # a block is not torn
                lines.append(line)
                line = Text("  ")
            line.append(cell, style if request.running else f"{style} dim").append(" ")
        lines.append(line)
    return Text("\n").join(lines)


def draw_memory(world: Simulator) -> Group:
    cells = pool_cells(world.manager, [request.seq for request in world.running], world.names)
    return Group(Columns(cells), draw_free_queue(world.manager))


def draw_map(world: Simulator, last: int) -> Table:
    table = Table("hash", "parent", "stands for", "blocks", box=None, pad_edge=False)
    entries = list(world.manager.hash_to_block.items())
    if len(entries) > last:
        table.add_row("...", "", f"{len(entries) - last} before these", "")
    for name, copies in entries[-last:]:
        block = next(iter(copies.values()))
        parent = block.parent_hash.hex()[:6] if block.parent_hash else "-"
        extra = "".join(f" ({in_words(key)})" for key in block.extra_keys)
        table.add_row(name.hex()[:6], parent, world.text(block.token_ids) + extra, " ".join(map(str, copies)))
    return table


def draw_tree(world: Simulator) -> Tree:
    """The same map, each hash below its parent's."""
    trees: dict[bytes | None, Tree] = {None: Tree("(nothing before)")}
    for name, copies in world.manager.hash_to_block.items():
        block = next(iter(copies.values()))
        trees[name] = trees[block.parent_hash].add(f"{name.hex()[:6]}  {world.text(block.token_ids)}")
    return trees[None]


def draw_counters(world: Simulator) -> Table:
    columns = world.counters()
    table = Table(*columns, box=None, pad_edge=False)
    table.add_row(*map(str, columns.values()))
    return table


def draw_chart(world: Simulator, height: int = 5, width: int = 36) -> Text:
    """Prompt tokens after each request, summed: full cells were computed (█), the others saved (░)."""
    if not world.requests:
        return Text("the chart begins with the first request", "dim")
    totals, computed = [0], [0]
    for request in world.requests:
        totals.append(totals[-1] + request.seq.num_prompt_tokens)
        computed.append(computed[-1] + request.num_computed)
    top = totals[-1]
    text = Text()
    for row in range(height, 0, -1):
        text.append(f"{top * row // height:>6} ", "dim")
        for total, done in list(zip(totals[1:], computed[1:], strict=True))[-width:]:
            level = top * (row - 0.5) / height
            cell, style = ("██", "cyan") if done > level else ("░░", "green") if total > level else ("  ", "")
            text.append(cell, style)
        text.append("\n" if row > 1 else "")
    return text
