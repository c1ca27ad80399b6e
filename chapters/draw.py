"""Pictures of the engine's objects: the block pool, the free queue, the sequences."""

from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence

BLOCKS_PER_ROW = 8
COLORS = ("green", "cyan", "magenta", "yellow", "blue", "red", "bright_green", "bright_cyan", "bright_magenta")


def color_of(seq: Sequence) -> str:
    return COLORS[seq.seq_id % len(COLORS)]


def pool_cells(manager: BlockManager, seqs: Iterable[Sequence], names: Mapping[int, str]) -> list[Text]:
    """A cell for each block: its owner's name (names: seq_id -> name), +n where n more share it, cached or free.

    A block with references that nobody holds has been lost; its cell says so.
    """
    owner: dict[int, Sequence] = {}
    for seq in seqs:
        owner.update(dict.fromkeys(seq.block_table, seq))
    cells = []
    for block in manager.blocks:
        if block.ref_count and block.block_id not in owner:
            cell, style = f"refs {block.ref_count}", "white on red"
        elif block.ref_count:
            seq = owner[block.block_id]
            cell, style = names[seq.seq_id], f"black on {color_of(seq)}"
            cell += f"+{block.ref_count - 1}" if block.ref_count > 1 else ""
        else:
            cell, style = ("cached", "white on grey37") if block.block_hash else ("·", "dim")
        cells.append(Text().append(f"{block.block_id:>3} ", "dim").append(f"{cell:^7}"[:7], style))
    return cells


def draw_pool(manager: BlockManager, seqs: Iterable[Sequence], names: Mapping[int, str]) -> Text:
    """The cells of pool_cells() in rows."""
    cells = pool_cells(manager, seqs, names)
    rows = [cells[start : start + BLOCKS_PER_ROW] for start in range(0, len(cells), BLOCKS_PER_ROW)]
    return Text("\n").join(Text(" ").join(row) for row in rows)


def draw_free_queue(manager: BlockManager, limit: int = 24) -> Text:
    """Block ids from the head, which is taken next; cached ones are marked."""
    ids = list(manager.free_blocks)
    text = Text(f"{len(ids)} free: ")
    for block_id in ids[:limit]:
        text.append(f" {block_id} ", "white on grey37" if manager.blocks[block_id].block_hash else "dim").append(" ")
    return text.append("..." if len(ids) > limit else "")


def draw_sequences(seqs: Iterable[Sequence], names: Mapping[int, str]) -> Table:
    table = Table("", "state", "tokens", "computed", "found in cache", "block table", show_edge=False)
    for seq in seqs:
        tokens = f"{seq.num_prompt_tokens}+{seq.num_generated_tokens}"
        counts = tokens, str(seq.num_computed_tokens), str(seq.num_cached_tokens)
        name = Text(names[seq.seq_id], color_of(seq))
        table.add_row(name, seq.status.name, *counts, " ".join(map(str, seq.block_table)))
    return table


def make_table(*columns: str, width: int = 0, first: int = 0) -> Table:
    """Numbers, right-aligned, in columns of one width, so that a table looks the same whatever was measured.

    first: the first column has names, left-aligned, in so many characters.
    """
    table = Table(show_edge=False)
    for number, name in enumerate(columns):
        is_name = first and not number
        table.add_column(name, justify="left" if is_name else "right", min_width=first if is_name else width)
    return table
