"""What the lab of chapter 7 plays with: requests in a pool, and conversations with tiers below one."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from chapters.ch07_prefix_caching import beyond, simulator
from chapters.ch07_prefix_caching.beyond import Conversations
from chapters.ch07_prefix_caching.simulator import Simulator

ACTIONS = [*simulator.ACTIONS[:-1], *beyond.ACTIONS, simulator.ACTIONS[-1]]
OF_TIERS = {action.method for action in beyond.ACTIONS}


class World:
    """An action is passed on to its half, which is then shown. shows: "pool" or "tiers"."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> str:
        """Start over, as at the start."""
        self.pool, self.tiers, self.shows = Simulator(), Conversations(), "pool"
        return "Started over."

    @property
    def events(self) -> list[Any]:
        return self.pool.events

    def __getattr__(self, name: str) -> Callable[..., str]:
        if name not in OF_TIERS and name not in {"typed", *(action.method for action in simulator.ACTIONS)}:
            raise AttributeError(name)
        half = "tiers" if name in OF_TIERS else "pool"
        method = getattr(getattr(self, half), name)

        @wraps(method)
        def act(*arguments: str) -> str:
            self.shows = half
            return method(*arguments)

        return act
