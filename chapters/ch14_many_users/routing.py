"""Routers: which replica gets the next request.

Each is told the hashes of the prompt's blocks, the replicas' loads in tokens, and what the replicas have announced.
"""

from collections.abc import Callable

from chapters.ch14_many_users.fleet import Router
from nanovllm.serving.routing import Announced, InTurn, soonest


def least_loaded(block_hashes: list[bytes], loads: dict[int, int], announced: Announced) -> int:
    """To the one that has the least to compute."""
    return min(loads, key=loads.__getitem__)


def by_prefix(block_hashes: list[bytes], loads: dict[int, int], announced: Announced) -> int:
    """One home for each beginning. The first block's hash says where: its remainder is the machine's number."""
    if not block_hashes:
        return least_loaded(block_hashes, loads, announced)
    return int.from_bytes(block_hashes[0], "big") % len(loads)


POLICIES: dict[str, Callable[[], Router]] = {
    "round robin": InTurn,
    "least loaded": lambda: least_loaded,
    "by prefix": lambda: by_prefix,
    "cache-aware": lambda: soonest,
}
