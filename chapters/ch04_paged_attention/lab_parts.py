"""Lab of chapter 4: the same requests in two memories of the same size, and who runs out first.

What is done to them is in memories.py, pictures are here.
"""

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from chapters.ch04_paged_attention.memories import BLOCK_SIZE, COLUMNS, TwoMemories, slots_of
from chapters.draw import color_of, draw_free_queue, draw_sequences
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.attention import paged_attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import rotary_and_write

GROUPS_PER_ROW = 8

# -- pictures of the two memories -------------------------------------------------------------------------------------


def panels(world: TwoMemories) -> list[tuple[str, RenderableType]]:
    paged = Group(draw_paged(world), draw_free_queue(world.manager, limit=12))
    caching = f", prefix caching {'on' if world.caching else 'off'}"
    return [
        (f"contiguous: reserves {world.reservation}", draw_contiguous(world)),
        (f"paged: the engine's BlockManager, blocks of {BLOCK_SIZE}{caching}", paged),
        ("both", draw_counters(world)),
        ("sequences in the paged memory", draw_sequences(world.seqs.values(), world.names)),
    ]


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


# -- attention over a block table -------------------------------------------------------------------------------------


def attend(table: list[int], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Batch, Batch]:
    """Put K/V of 10 prompt tokens and of 1 more into the blocks of `table` and attend: [11, num_heads, head_dim].

    All other blocks are full of other numbers, as if they were other sequences'.
    """
    trash = torch.Generator().manual_seed(9)
    shape = 16, BLOCK_SIZE, *k.shape[1:]
    kv_layer = torch.randn(shape, generator=trash), torch.randn(shape, generator=trash)
    seq = Sequence(list(range(len(q))))
    seq.block_table = table
    outs, batches = [], []
    for start, end in ((0, 10), (10, 11)):  # the prompt in one step, then one token
        output = SchedulerOutput([ScheduledChunk(seq, start, end, write_start=start)], [], end - start)
        batch = Batch.from_scheduler_output(output, BLOCK_SIZE)
        rows = q[start:end].clone(), k[start:end].clone(), v[start:end]
        no_rotation = torch.ones(end - start, q.shape[2] // 2), torch.zeros(end - start, q.shape[2] // 2)
        rotary_and_write(*rows, no_rotation, kv_layer, batch)
        outs.append(paged_attention(rows[0], *kv_layer, batch))
        batches.append(batch)
    return torch.cat(outs), batches[0], batches[1]


# -- the story --------------------------------------------------------------------------------------------------------
