"""Routers: which replica gets the next request. Each is told the names of its blocks, and the loads in tokens."""

from collections import OrderedDict
from collections.abc import Callable

from chapters.ch14_many_users.fleet import BLOCK_SIZE, NUM_BLOCKS, Router


class RoundRobin:
    """In turn."""

    def __init__(self, num_replicas: int) -> None:
        self.num_sent = -1

    def __call__(self, names: list[bytes], loads: list[int]) -> int:
        self.num_sent += 1
        return self.num_sent % len(loads)


class LeastLoaded:
    """To the one that has the least to compute."""

    def __init__(self, num_replicas: int) -> None:
        pass

    def __call__(self, names: list[bytes], loads: list[int]) -> int:
        return loads.index(min(loads))


class ByPrefix:
    """One home for each beginning. The first block's name is a hash already; its remainder says where."""

    def __init__(self, num_replicas: int) -> None:
        pass

    def __call__(self, names: list[bytes], loads: list[int]) -> int:
        return int.from_bytes(names[0], "big") % len(loads) if names else loads.index(min(loads))


class CacheAware:
    """Where the first token is to be expected first: after the tokens that the replica has to compute, and those of the
    prompt that it does not have.

    What is where, the router remembers from what it has sent: for each replica as many names as its pool has blocks.
    Those that were used longest ago are forgotten first, the deepest of a prompt before the others, as in the pool.
    """

    def __init__(self, num_replicas: int, num_blocks: int = NUM_BLOCKS) -> None:
        self.sent = [OrderedDict[bytes, None]() for _ in range(num_replicas)]
        self.num_blocks = num_blocks

    def __call__(self, names: list[bytes], loads: list[int]) -> int:
        costs = [load + BLOCK_SIZE * self.num_missing(i, names) for i, load in enumerate(loads)]
        index = costs.index(min(costs))
        sent = self.sent[index]
        for name in reversed(names):
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self.num_blocks:
            sent.popitem(last=False)
        return index

    def num_missing(self, index: int, names: list[bytes]) -> int:
        sent = self.sent[index]
        return next((len(names) - i for i, name in enumerate(names) if name not in sent), 0)


POLICIES: dict[str, Callable[[int], Router]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "by prefix": ByPrefix,
    "cache-aware": CacheAware,
}
