"""Parts of lab 15: requests that name adapters in one batch.

Tokens are computed in float32; times are those of the engine's bf16.
"""

from rich.console import RenderableType

from chapters.ch15_which_weights import drawing
from chapters.ch15_which_weights.world import World
from chapters.player import actions

NUM_SHOWN = 8  # requests


def panels(world: World) -> list[tuple[str, RenderableType]]:
    entries = world.entries[-NUM_SHOWN:]
    named = [(entry.name, entry.seq) for entry in entries if entry.seq.block_table]
    return [
        (f"requests; the next one names: {world.adapter}", drawing.draw_entries(world, entries)),
        (f"rows of the last step; in memory: {world.in_memory}", drawing.draw_rows(world.rows)),
        ("block hashes of the running requests", drawing.draw_hashes(world.llm.engine.block_manager, named)),
    ]


ACTIONS = actions("n|step|step, s|send|send, e|send all|send_all, a|adapter|next_adapter, r|reset|reset")
