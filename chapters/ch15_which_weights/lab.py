"""Lab of chapter 15: requests that name adapters in one batch, and texts that visit experts.

Tokens and choices are computed in float32; times are those of the engine's bf16.
"""

from typing import Any

from rich.console import Group, RenderableType

from chapters.app import explorer
from chapters.ch15_which_weights import drawing
from chapters.ch15_which_weights.lab_adapters import (
    tell_answers,
    tell_cost,
    tell_names,
    tell_rank,
    tell_rows,
    tell_seats,
)
from chapters.ch15_which_weights.lab_experts import tell_balance, tell_large, tell_products, tell_visits
from chapters.ch15_which_weights.sparse import load_sparse
from chapters.ch15_which_weights.world import World, load_adapters
from chapters.play import actions
from chapters.story import Story, one_core

NUM_SHOWN = 8  # requests


def panels(world: World) -> list[tuple[str, RenderableType]]:
    entries = world.entries[-NUM_SHOWN:]
    named = [(entry.name, entry.seq) for entry in entries if entry.seq.block_table]
    letters = drawing.draw_experts_of(world.text, world.visits[world.layer])
    letters_and_legend = Group(letters, drawing.draw_legend(world.shares.shape[1]))
    return [
        (f"requests; the next one names: {world.adapter}", drawing.draw_entries(world, entries)),
        (f"rows of the last step; in memory: {world.in_memory}", drawing.draw_rows(world.rows)),
        ("names of blocks, of those who run", drawing.draw_names(world.llm.engine.block_manager, named)),
        (f"experts that each letter met first, layer {world.layer}", letters_and_legend),
        ("of its choices, percent for each expert", drawing.draw_visits({"text": world.shares}, measured=False)),
    ]


ACTIONS = actions(
    "n|step|step, s|send|send, e|send all|send_all, a|adapter|next_adapter, l|layer|next_layer, "
    "k|kind|next_kind, r|reset|reset"
)


def make_app(model: str | None) -> Any:
    world = World(*load_adapters(Story(model).model), load_sparse())
    return explorer("Which weights", world, panels, ACTIONS, ask="a text")


# -- the story --------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    with one_core():
        llm, adapters = load_adapters(story.model, max_loras=3)
        tell_answers(story, llm, adapters)
        tell_rank(story, llm)
        tell_rows(story, llm, adapters)
        tell_cost(story)
        tell_seats(story)
        tell_names(story, llm, adapters)
        sparse = load_sparse()
        shares = tell_visits(story, sparse)
        tell_products(story)
        tell_large(story)
        tell_balance(story, sparse, shares)
