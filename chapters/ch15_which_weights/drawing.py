"""Pictures of who meets whom: requests, rows and adapters."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from chapters.draw import COLORS
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence

if TYPE_CHECKING:
    from chapters.ch15_which_weights.world import Entry, World

HASH_BYTES = 4  # bytes of a block's hash that are shown


def color_of_adapter(lora_id: int | None) -> str:
    return "dim" if lora_id is None else COLORS[lora_id % len(COLORS)]


def block_hashes(manager: BlockManager, seq: Sequence) -> list[str]:
    """The beginnings of the hashes of a sequence's full blocks."""
    hashes = (manager.blocks[i].block_hash for i in seq.block_table)
    return [block_hash.hex()[: 2 * HASH_BYTES] for block_hash in hashes if block_hash is not None]


def draw_hashes(manager: BlockManager, seqs: Iterable[tuple[str, Sequence]]) -> Table:
    table = Table("request", "id", "found", "its block hashes", show_edge=False)
    for name, seq in seqs:
        hashes, lora_id = block_hashes(manager, seq), "" if seq.lora_id is None else str(seq.lora_id)
        text = Text(" ".join(hashes), color_of_adapter(seq.lora_id))
        table.add_row(name, lora_id, str(seq.num_cached_tokens), text)
    return table


def draw_entries(world: "World", entries: "list[Entry]") -> Table:
    table = Table("", "adapter", "state", "tokens", "in cache", "text so far", show_edge=False)
    decode = world.llm.get_tokenizer().decode
    for entry in entries:
        seq, style = entry.seq, color_of_adapter(entry.seq.lora_id)
        counts = f"{seq.num_prompt_tokens}+{seq.num_generated_tokens}", str(seq.num_cached_tokens)
        text = Text(decode(seq.generated_token_ids), style)
        table.add_row(entry.name, Text(entry.adapter, style), seq.status.name, *counts, text)
    return table


def draw_rows(rows: "list[tuple[Entry, int]]") -> Text:
    """A cell for each row of a step, with the name of its request, in the colour of its adapter."""
    drawn = Text("" if rows else "no rows yet")
    for entry, num_rows in rows:
        lora_id = entry.seq.lora_id
        style = "white on grey37" if lora_id is None else f"black on {color_of_adapter(lora_id)}"
        for _ in range(num_rows):
            drawn.append(f" {entry.name} ", style).append(" ")
    return drawn
