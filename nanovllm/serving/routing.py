"""Which of several engines gets a request, by what their KV events have announced (chapter 14).

It needs no model and sees no engine's tables: standard library and core only. examples/ray_serve.py calls it on Ray
Serve; examples/bench_routing.py and the course's fleet in virtual time, before the real scheduler.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from nanovllm.core.block_hash import BlockHasher, extra_keys
from nanovllm.features.cache_reports.events import MEDIUM_GPU, AllBlocksCleared, BlockStored, KVCacheEvent

Engine = TypeVar("Engine", bound=Hashable)  # what a router calls an engine by
MAX_ENDED_IDS = 10_000  # more requests than end between a client's leaving and the choice of an engine for it


class Announced:
    """Which blocks engines have: what they have announced and not taken back, and what prompts under way leave there.

    Engines have equal checkpoints and options. What lies in tiers below an engine's pool is not counted.

    block_hashes  engine -> hashes of the blocks that it has announced
    under_way     engine -> {hash: how many prompts under way there have this block}
    """

    def __init__(self, block_size: int, hash_algo: str = "xxh64") -> None:
        self.block_size, self.hasher = block_size, BlockHasher(block_size, hash_algo)
        self.block_hashes: dict[Hashable, set[bytes]] = {}
        self.under_way: dict[Hashable, Counter[bytes]] = {}

    def take(self, engine: Hashable, events: Iterable[KVCacheEvent]) -> None:
        """Take in events of one engine, in the order in which they happened."""
        block_hashes = self.block_hashes.setdefault(engine, set())
        for event in events:
            if isinstance(event, AllBlocksCleared):
                block_hashes.clear()
            elif event.medium == MEDIUM_GPU:
                change = block_hashes.update if isinstance(event, BlockStored) else block_hashes.difference_update
                change(event.block_hashes)

    def forget(self, engine: Hashable) -> None:
        """It is gone, and its pool with it."""
        self.block_hashes.pop(engine, None)
        self.under_way.pop(engine, None)

    def sent(self, engine: Hashable, block_hashes: Sequence[bytes]) -> None:
        """A prompt with these blocks has been sent there. The next one with the same beginning will find it."""
        self.under_way.setdefault(engine, Counter()).update(block_hashes)

    def ended(self, engine: Hashable, block_hashes: Sequence[bytes]) -> None:
        """The prompt is under way no longer: from now on, only what has been announced counts."""
        counts = self.under_way[engine]
        counts.subtract(block_hashes)
        for block_hash in block_hashes:
            if not counts[block_hash]:
                del counts[block_hash]

    def block_hashes_of(self, token_ids: Sequence[int], cache_salt: str | None = None) -> list[bytes]:
        """Hashes of a prompt's full blocks. Every engine computes the same ones."""
        block_hashes: list[bytes] = []
        for index in range(len(token_ids) // self.block_size):
            tokens = token_ids[index * self.block_size : (index + 1) * self.block_size]
            keys = extra_keys(index, self.block_size, cache_salt)
            block_hashes.append(self.hasher.hash_block(block_hashes[-1] if block_hashes else None, tokens, keys))
        return block_hashes

    def num_tokens(self, engine: Hashable, block_hashes: Sequence[bytes]) -> int:
        """How many tokens at the beginning of a prompt with these blocks the engine does not have to compute."""
        here, coming = self.block_hashes.get(engine, ()), self.under_way.get(engine, ())
        found = takewhile(lambda block_hash: block_hash in here or block_hash in coming, block_hashes)
        return self.block_size * sum(1 for _ in found)


def soonest(block_hashes: Sequence[bytes], loads: Mapping[Engine, int], announced: Announced) -> Engine:
    """The engine where the fewest tokens stand before a prompt's first one; of equals, the first.

    Those are the tokens that it has to compute in any case (loads), minus those that the prompt need not wait for.
    """
    return min(loads, key=lambda engine: loads[engine] - announced.num_tokens(engine, block_hashes))


class InTurn:
    """What soonest is measured against: a request goes to the engine that has gone without one for longest."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.last_sent: dict[Any, int] = {}  # engine -> the number of the last request that it got

    def __call__(self, block_hashes: Sequence[bytes], loads: Mapping[Engine, int], announced: Announced) -> Engine:
        engine = min(loads, key=lambda engine: self.last_sent.get(engine, 0))
        self.num_sent += 1
        self.last_sent[engine] = self.num_sent
        return engine


@dataclass
class UnderWay:
    """A request, from choose() to ended().

    num_done: blocks at its beginning that the engine does not have to compute for it, or has announced since.
    """

    engine: Hashable
    block_hashes: list[bytes]
    num_done: int


class Traffic:
    """What a router knows: what engines have announced, and which requests are under way where.

    No two requests have the same id.
    """

    def __init__(self, block_size: int) -> None:
        self.announced, self.route = Announced(block_size), soonest
        self.under_way: dict[str, UnderWay] = {}  # by request id
        self.ended_ids: dict[str, None] = {}  # of the last requests to end, the newest at the end
        self.num_chosen = 0
        self.last_chosen: dict[Hashable, int] = {}  # engine -> the number of the last request that it got
        self.gone: set[Hashable] = set()  # engines that may not be listened to any more

    def use(self, route: Callable[..., Any]) -> None:
        """Another function than soonest, with the same arguments."""
        self.route = route

    def take(self, engine: Hashable, events: list[KVCacheEvent]) -> None:
        """See Announced.take. An engine that leaves goes on announcing while it ends its requests: to no avail."""
        if engine not in self.gone:
            self.announced.take(engine, events)

    def choose(self, request_id: str, token_ids: Sequence[int], cache_salt: str | None, engines: list[Any]) -> Any:
        """One of these engines; until ended(), the request counts there. It may be asked again: then it was refused.

        It may be asked after ended(), too, when a client leaves at once: such a request counts nowhere.

        Of engines that are equally good, the one that has gone without a request for longest gets it. Otherwise
        prompts that nobody has would all go to the first idle engine, and push each other out of its pool.
        """
        self._take_back(request_id)
        self.gone.difference_update(engines)
        block_hashes = self.announced.block_hashes_of(token_ids, cache_salt)
        loads = self.loads(sorted(engines, key=lambda engine: self.last_chosen.get(engine, 0)))
        engine = self.route(block_hashes, loads, self.announced)
        if request_id not in self.ended_ids:
            num_done = self.announced.num_tokens(engine, block_hashes) // self.announced.block_size
            self.under_way[request_id] = UnderWay(engine, block_hashes, num_done)
            self.announced.sent(engine, block_hashes)
        self.num_chosen += 1
        self.last_chosen[engine] = self.num_chosen
        return engine

    def ended(self, request_id: str) -> None:
        """It has its answer, or its client has left."""
        self._take_back(request_id)
        self.ended_ids[request_id] = None
        if len(self.ended_ids) > MAX_ENDED_IDS:
            del self.ended_ids[next(iter(self.ended_ids))]

    def _take_back(self, request_id: str) -> None:
        request = self.under_way.pop(request_id, None)
        if request is not None:
            self.announced.ended(request.engine, request.block_hashes)

    def forget(self, engine: Hashable) -> None:
        """It has died, or it leaves: nothing is known of it any more, until it is among the engines of choose()."""
        self.gone.add(engine)
        self.announced.forget(engine)
        self.last_chosen.pop(engine, None)
        self.under_way = {
            request_id: request for request_id, request in self.under_way.items() if request.engine != engine
        }

    def known(self) -> dict[Hashable, dict[str, int]]:
        """What is known of each engine that has announced anything."""
        loads = self.loads(self.announced.block_hashes)
        return {
            engine: {"num_blocks": len(self.announced.block_hashes[engine]), "load": loads[engine]} for engine in loads
        }

    def loads(self, engines: Iterable[Engine]) -> dict[Engine, int]:
        """Tokens that each has still to compute: of prompts what it has not announced, of an answer the next token."""
        loads = dict.fromkeys(engines, 0)
        for request in self.under_way.values():
            if request.engine in loads:
                loads[request.engine] += max(1, self.num_tokens_left(request))
        return loads

    def num_tokens_left(self, request: UnderWay) -> int:
        """Tokens of its prompt that are still to be computed, as far as one knows."""
        here = self.announced.block_hashes.get(request.engine, ())
        while request.num_done < len(request.block_hashes) and request.block_hashes[request.num_done] in here:
            request.num_done += 1
        return self.announced.block_size * (len(request.block_hashes) - request.num_done)
