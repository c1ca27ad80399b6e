"""Pictures of who meets whom: rows and adapters, texts and experts."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text
from torch import Tensor

from chapters.draw import COLORS, make_table
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence

if TYPE_CHECKING:
    from chapters.ch15_which_weights.world import Entry, World

EXPERTS = ("#e6194b", "#3cb44b", "#ffe119", "#4f7fff", "#f58231", "#c45be8", "#46f0f0", "#d0d0d0")
HEAT = ("", "grey15", "grey27", "grey42", "dark_orange3", "orange1")  # backgrounds, from none to all
NAMED = 4  # bytes of a block's name that are shown


def color_of_adapter(lora_id: int | None) -> str:
    return "dim" if lora_id is None else COLORS[lora_id % len(COLORS)]


def heat(share: float) -> str:
    return f"white on {HEAT[min(len(HEAT) - 1, round(share * 10))]}" if share >= 0.05 else "dim"


def draw_visits(kinds: dict[str, Tensor], layers: tuple[int, ...] = (), measured: bool = True) -> Table:
    """For each kind of token the shares of its choices [num_layers, num_experts], in percent."""
    num_experts = next(iter(kinds.values())).shape[1]
    names = "layer", *(f"{e}" for e in range(num_experts)), *([""] * measured)
    table = make_table("text", *names, width=4, first=8)
    for kind, shares in kinds.items():
        for layer, row in zip(layers or range(len(shares)), shares.tolist(), strict=True):
            cells = [Text(f"{100 * share:.0f}", heat(share)) for share in row]
            table.add_row(kind, str(layer), *cells, *(["(measured)"] * measured))
            kind = ""
        table.add_section()
    return table


def draw_experts_of(text: str, chosen: Tensor) -> Text:
    """A text, letter by letter, in the colour of its first expert in a layer. chosen: [tokens, num_chosen]."""
    drawn = Text()
    for letter, expert in zip(text, chosen[:, 0].tolist(), strict=False):
        drawn.append(letter.replace("\n", "⏎"), f"black on {EXPERTS[expert % len(EXPERTS)]}")
    return drawn


def draw_legend(num_experts: int) -> Text:
    drawn = Text()
    for expert in range(num_experts):
        drawn.append(f" {expert} ", f"black on {EXPERTS[expert % len(EXPERTS)]}").append(" ")
    return drawn


def block_names(manager: BlockManager, seq: Sequence) -> list[str]:
    """The beginnings of the names of a sequence's full blocks."""
    hashes = (manager.blocks[i].block_hash for i in seq.block_table)
    return [name.hex()[: 2 * NAMED] for name in hashes if name is not None]


def draw_names(manager: BlockManager, seqs: Iterable[tuple[str, Sequence]]) -> Table:
    table = Table("request", "id", "found", "names of its blocks", show_edge=False)
    for name, seq in seqs:
        names, lora_id = block_names(manager, seq), "" if seq.lora_id is None else str(seq.lora_id)
        text = Text(" ".join(names), color_of_adapter(seq.lora_id))
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
    drawn = Text("" if rows else "nobody computes")
    for entry, num_rows in rows:
        lora_id = entry.seq.lora_id
        style = "white on grey37" if lora_id is None else f"black on {color_of_adapter(lora_id)}"
        for _ in range(num_rows):
            drawn.append(f" {entry.name} ", style).append(" ")
    return drawn
