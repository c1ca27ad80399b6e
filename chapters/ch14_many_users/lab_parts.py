"""Parts of lab 14: the real server under load, then queues and fleets in virtual time, on the real scheduler."""

from rich.console import RenderableType

from chapters.ch14_many_users.drawing import draw_last, draw_replicas, draw_results
from chapters.ch14_many_users.world import World
from chapters.player import actions


def panels(world: World) -> list[tuple[str, RenderableType]]:
    fleet, last = world.fleet, world.fleet.jobs[-1:]
    now = last[0].arrival_s if last else 0.0
    shown = f"{min(len(fleet.replicas), 16)} of {len(fleet.replicas)} replicas"
    return [
        (f"{world.policy}: {shown}, {now:.2f} s, {world.rate:g} requests/s each", draw_replicas(fleet)),
        ("the last requests", draw_last(fleet)),
        (f"the same requests, skew {world.skew:g}: TTFT in ms, busiest as a multiple", draw_results(world.results)),
    ]


ACTIONS = actions(
    "n|request|send, e|200 requests|send_many, b|burst|burst, p|router|next_policy, g|replicas|next_number, "
    "k|skew|next_skew, l|load|next_rate, r|reset|reset"
)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"
