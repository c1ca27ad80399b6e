"""Which of several engines gets a request, by what their KV events have announced (chapter 14).

It needs no model and sees no engine's tables: standard library and core only. The course's fleet calls it in played
time, examples/ray_serve.py on Ray Serve.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from nanovllm.core.block_hash import BlockHasher, extra_keys
from nanovllm.features.cache_reports.events import MEDIUM_GPU, AllBlocksCleared, BlockStored, KVCacheEvent

Engine = TypeVar("Engine", bound=Hashable)  # what a router calls an engine by


class Announced:
    """Names of blocks that engines have announced and not taken back. Engines have equal checkpoints and options.

    What lies in tiers below an engine's pool is not counted.
    """

    def __init__(self, block_size: int, hash_algo: str = "xxh64") -> None:
        self.block_size, self.hasher = block_size, BlockHasher(block_size, hash_algo)
        self.names: dict[Hashable, set[bytes]] = {}

    def take(self, engine: Hashable, events: Iterable[KVCacheEvent]) -> None:
        """Of one engine, in the order in which they happened."""
        names = self.names.setdefault(engine, set())
        for event in events:
            if isinstance(event, AllBlocksCleared):
                names.clear()
            elif event.medium == MEDIUM_GPU:
                change = names.update if isinstance(event, BlockStored) else names.difference_update
                change(event.block_hashes)

    def forget(self, engine: Hashable) -> None:
        """It is gone, and its pool with it."""
        self.names.pop(engine, None)

    def names_of(self, token_ids: Sequence[int], cache_salt: str | None = None) -> list[bytes]:
        """Names of a prompt's full blocks, which every engine gives them."""
        names: list[bytes] = []
        for index in range(len(token_ids) // self.block_size):
            tokens = token_ids[index * self.block_size : (index + 1) * self.block_size]
            keys = extra_keys(index, self.block_size, cache_salt)
            names.append(self.hasher.hash_block(names[-1] if names else None, tokens, keys))
        return names

    def num_tokens(self, engine: Hashable, names: Sequence[bytes]) -> int:
        """Of a prompt with these names: how many tokens from its beginning the engine does not have to compute."""
        here = self.names.get(engine, ())
        num_blocks = next((index for index, name in enumerate(names) if name not in here), len(names))
        return num_blocks * self.block_size


def soonest(names: Sequence[bytes], loads: Mapping[Engine, int], announced: Announced) -> Engine:
    """The engine where the fewest tokens stand before a prompt's first one; of equals, the first.

    Those are the tokens that it has to compute in any case (loads), minus those that the prompt need not wait for.
    """
    return min(loads, key=lambda engine: loads[engine] - announced.num_tokens(engine, names))


class InTurn:
    """What soonest is measured against: each engine gets as many requests as the others."""

    def __init__(self) -> None:
        self.num_sent = -1

    def __call__(self, names: Sequence[bytes], loads: Mapping[Engine, int], announced: Announced) -> Engine:
        self.num_sent += 1
        return list(loads)[self.num_sent % len(loads)]


class UnderWay(NamedTuple):
    engine: Hashable
    names: list[bytes]


class Traffic:
    """What a router knows: what engines have announced, and which requests are under way where."""

    def __init__(self, block_size: int) -> None:
        self.announced, self.route = Announced(block_size), soonest
        self.under_way: dict[str, UnderWay] = {}  # by request id

    def use(self, route: Callable[..., Any]) -> None:
        """Another function than soonest, with the same arguments."""
        self.route = route

    def take(self, engine: Hashable, events: list[KVCacheEvent]) -> None:
        """See Announced.take."""
        self.announced.take(engine, events)

    def choose(self, request_id: str, token_ids: Sequence[int], cache_salt: str | None, engines: list[Any]) -> Any:
        """One of these engines; until ended(), the request counts there. It may be asked again: then it was refused."""
        self.ended(request_id)
        names = self.announced.names_of(token_ids, cache_salt)
        engine = self.route(names, {engine: self.load(engine) for engine in engines}, self.announced)
        self.under_way[request_id] = UnderWay(engine, names)
        return engine

    def ended(self, request_id: str) -> None:
        """It has its answer, or its client has left."""
        self.under_way.pop(request_id, None)

    def forget(self, engine: Hashable) -> None:
        """It has died."""
        self.announced.forget(engine)
        self.under_way = {name: request for name, request in self.under_way.items() if request.engine != engine}

    def known(self) -> dict[Hashable, dict[str, int]]:
        """Of each engine that has announced anything."""
        engines = self.announced.names.items()
        return {engine: {"num_blocks": len(names), "load": self.load(engine)} for engine, names in engines}

    def load(self, engine: Hashable) -> int:
        """Tokens that it has still to compute: of prompts what it has not announced, of an answer the next token."""
        here = (request.names for request in self.under_way.values() if request.engine == engine)
        size, num_tokens = self.announced.block_size, self.announced.num_tokens
        return sum(max(1, size * len(names) - num_tokens(engine, names)) for names in here)
