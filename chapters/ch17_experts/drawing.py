"""Pictures of who meets whom: texts and experts."""

from rich.table import Table
from rich.text import Text
from torch import Tensor

from chapters.draw import make_table

EXPERTS = ("#e6194b", "#3cb44b", "#ffe119", "#4f7fff", "#f58231", "#c45be8", "#46f0f0", "#d0d0d0")
HEAT = ("", "grey15", "grey27", "grey42", "dark_orange3", "orange1")  # backgrounds, from none to all
BAR = 50  # columns for all choices


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
    """A text, letter by letter, in the colour of its first expert in a layer.

    chosen: [tokens, num_chosen]. Each byte is a token; a letter of several has the color of its first.
    """
    drawn, experts = Text(), chosen[:, 0].tolist()
    at = 0
    for letter in text:
        drawn.append(letter.replace("\n", "⏎"), f"black on {EXPERTS[experts[at] % len(EXPERTS)]}")
        at += len(letter.encode())
    return drawn


def draw_legend(num_experts: int) -> Text:
    drawn = Text()
    for expert in range(num_experts):
        drawn.append(f" {expert} ", f"black on {EXPERTS[expert % len(EXPERTS)]}").append(" ")
    return drawn


def draw_loads(loads: Tensor) -> Text:
    """A bar for each rank. loads: [num_ranks], shares."""
    drawn, even = Text(), 1 / len(loads)
    for rank, load in enumerate(loads.tolist()):
        bar = "█" * round(load * BAR)
        style = "orange1" if load > even else ""
        drawn.append(f"rank {rank}  ").append(f"{bar:{BAR}}", style).append(f" {load:4.0%}\n")
    slowest = float(loads.max()) * len(loads)
    return drawn.append(f"All wait for the slowest: the layer takes {slowest:.2f} times as long as with equal loads.")
