"""Parts of lab 17: texts that visit experts, a grouped product, and a large model's memory and time.

The small model is trained when the lab begins. Rounding differs between machines and grows in training, so its experts
are not the same everywhere. Times are those of the engine's bf16.
"""

from rich.console import Group, RenderableType

from chapters.ch17_experts import drawing
from chapters.ch17_experts.world import World
from chapters.player import actions


def panels(world: World) -> list[tuple[str, RenderableType]]:
    letters = drawing.draw_experts_of(world.text, world.visits[world.layer])
    loads = drawing.draw_loads(world.loads[world.layer])
    return [
        (
            f"experts that each letter met first, layer {world.layer}",
            Group(letters, drawing.draw_legend(world.shares.shape[1])),
        ),
        ("of its choices, percent for each expert", drawing.draw_visits({"text": world.shares}, measured=False)),
        (f"pairs that each of {world.num_ranks} ranks gets, layer {world.layer}", loads),
    ]


ACTIONS = actions("l|layer|next_layer, k|kind|next_kind, p|ranks|next_ranks, r|reset|reset")
