"""Lab of chapter 17: texts that visit experts, a grouped product, and a large model's memory and time.

The small model is trained when the lab begins. Rounding differs between machines and grows in training, so its experts
are not the same everywhere. Times are those of the engine's bf16.
"""

from typing import Any

from rich.console import Group, RenderableType

from chapters.app import explorer
from chapters.ch17_experts import drawing
from chapters.ch17_experts.sparse import load_sparse
from chapters.ch17_experts.tell import tell_balance, tell_large, tell_products, tell_visits
from chapters.ch17_experts.world import World
from chapters.play import actions
from chapters.story import Story, one_core


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


def make_app(model: str | None) -> Any:
    return explorer("Which experts", World(load_sparse()), panels, ACTIONS, ask="a text")


def tell(story: Story) -> None:
    with one_core():
        sparse = load_sparse()
        shares = tell_visits(story, sparse)
        tell_products(story)
        tell_large(story)
        tell_balance(story, sparse, shares)
