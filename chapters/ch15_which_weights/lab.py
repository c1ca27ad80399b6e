"""Lab of chapter 15: requests that name adapters in one batch.

Tokens are computed in float32; times are those of the engine's bf16.
"""

from typing import Any

from rich.console import RenderableType

from chapters.app import explorer
from chapters.ch15_which_weights import drawing
from chapters.ch15_which_weights.tell import tell_answers, tell_cost, tell_names, tell_rank, tell_rows, tell_seats
from chapters.ch15_which_weights.world import World, load_adapters
from chapters.play import actions
from chapters.story import Story, one_core

NUM_SHOWN = 8  # requests


def panels(world: World) -> list[tuple[str, RenderableType]]:
    entries = world.entries[-NUM_SHOWN:]
    named = [(entry.name, entry.seq) for entry in entries if entry.seq.block_table]
    return [
        (f"requests; the next one names: {world.adapter}", drawing.draw_entries(world, entries)),
        (f"rows of the last step; in memory: {world.in_memory}", drawing.draw_rows(world.rows)),
        ("block hashes of the running requests", drawing.draw_names(world.llm.engine.block_manager, named)),
    ]


ACTIONS = actions("n|step|step, s|send|send, e|send all|send_all, a|adapter|next_adapter, r|reset|reset")


def make_app(model: str | None) -> Any:
    world = World(*load_adapters(Story(model).model))
    return explorer("Adapters", world, panels, ACTIONS, ask="a prompt")


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
