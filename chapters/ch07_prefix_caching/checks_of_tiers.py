"""How the last exercise of chapter 7 is graded: which tier is asked for which blocks."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from chapters.ch07_prefix_caching.beyond import ORDERS, Conversations, DictStore
from chapters.expect import Wrong, cases, expect
from chapters.grading import Bench, Task
from chapters.patching import replaced
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.store import Record, Store
from nanovllm.core.tiers.tiers import MAX_IN_VAIN, Awaited, Tiers

OURS = Tiers.ask


@contextmanager
def use_next_run(function: Callable[..., Any]) -> Iterator[None]:
    def ask(tiers: Tiers, seq: Sequence, awaited: Awaited, num_hits: int) -> bool:
        keys = [record.key for record in awaited.records]
        answer = function([*keys], num_hits, awaited.num_in_vain, [*tiers.stores])
        if answer is None:
            return False
        awaited.store, count = understood(answer, tiers.stores)
        awaited.wanted = awaited.records[num_hits : num_hits + count]
        awaited.first = num_hits
        awaited.fetch = awaited.store.fetch(awaited.wanted)
        return True

    with replaced(Tiers, "ask", ask):
        yield


def understood(answer: Any, stores: list[Store]) -> tuple[Store, int]:
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    if not is_pair or answer[0] not in stores or type(answer[1]) is not int or answer[1] < 1:
        hint = "the answer must be None, or one of the stores and a number of blocks, one at least"
        raise Wrong(hint, expected="(store, number) or None", got=answer)
    return answer


# -- chains of which stores have parts --------------------------------------------------------------------------------


class Listed:
    """A store that has these blocks of a chain, "a" to "h"."""

    def __init__(self, medium: str, has: str) -> None:
        self.medium, self.has = medium, has

    def __repr__(self) -> str:
        return f"<{self.medium}: {self.has or 'nothing'}>"

    def may_have(self, key: bytes) -> bool:
        return key.decode() in self.has


def compare(
    function: Any,
    num_in_pool: int,
    memory: str,
    disk: str,
    expected: tuple[str, int] | None,
    why: str,
    num_in_vain: int = 0,
) -> None:
    stores: list[Any] = [Listed("memory", memory), Listed("disk", disk)]
    answer = function([bytes([name]) for name in b"abcdefgh"], num_in_pool, num_in_vain, stores)
    if answer is not None:
        store, count = understood(answer, stores)
        answer = store.medium, count
    after = f", num_in_vain={num_in_vain}" if num_in_vain else ""
    asked = (
        f"chain a to h, num_in_pool={num_in_pool}{after}, memory has {memory or 'nothing'}, disk {disk or 'nothing'}"
    )
    expect(expected, answer, f"{asked}: {why}")


BEGINS = "the run begins with the first block that the pool lacks"
ENDS = "a run ends before the first block that its store lacks; nothing after a gap can be used"
ONE = "a run comes from one store; what follows it is asked for when the run has been delivered"
FIRST = "of two stores that have the run's first block, the one that is first in the list is faster"
GONE = f"{MAX_IN_VAIN} answers brought nothing, so nothing is asked for any more"
AGAIN = f"fewer than {MAX_IN_VAIN} answers brought nothing, so the stores are asked again"

CHAINS = cases(
    compare,
    {
        "the blocks that follow those in the pool": [
            (0, "abcdefgh", "", ("memory", 8), BEGINS),
            (3, "defgh", "", ("memory", 5), BEGINS),
            (7, "", "h", ("disk", 1), BEGINS),
        ],
        "a run ends at a gap": [
            (0, "abd", "", ("memory", 2), ENDS),
            (2, "", "abcdfgh", ("disk", 2), ENDS),
            (1, "cdefgh", "", None, "no store has block b, so the blocks after it cannot be used"),
        ],
        "each run from one store, the faster first": [
            (1, "bc", "bcd", ("memory", 2), FIRST),
            (0, "ab", "abcdefgh", ("memory", 2), ONE),
            (2, "ab", "abcdefgh", ("disk", 6), "memory lacks block c, and the disk has it"),
            (0, "cd", "abcdef", ("disk", 6), "memory lacks block a. The disk has a to f: that is one run, not three"),
        ],
        "nothing to ask for": [
            (8, "abcdefgh", "abcdefgh", None, "the pool has all of it"),
            (0, "", "", None, "no store has anything: all of it is computed"),
        ],
        "too many answers in vain end the asking": [
            (2, "", "cdefgh", None, GONE, MAX_IN_VAIN),
            (0, "abcdefgh", "abcdefgh", None, GONE, MAX_IN_VAIN),
            (2, "", "cdefgh", ("disk", 6), AGAIN, MAX_IN_VAIN - 1),
            (1, "bc", "bcdefgh", ("memory", 2), AGAIN, 1),
        ],
    },
)


# -- in the real Tiers ------------------------------------------------------------------------------------------------

TRIED: list[dict[str, int]] = [
    {},
    {"disk": 0},
    {"memory": 0},
    {"memory": 40, "disk": 20},
    {"pool": 40, "memory": 0, "disk": 40},
]


class Losing(DictStore):
    """Every second time it delivers only the first half of what it was asked for, which may be nothing."""

    num_fetches = 0

    def fetch(self, records: list[Record]) -> "Future[list[Any]]":
        self.num_fetches += 1
        return super().fetch(records[: len(records) // 2] if self.num_fetches % 2 else records)


def play(world: Conversations) -> list[tuple[str, dict[str, int]]]:
    """Who came, and where the tokens of each prompt came from. Halfway through, the process ends."""
    for number in range(len(ORDERS[world.order])):
        if number == 14:
            world.restart()
        world.come_back()
    return [(visit.name, visit.tokens()) for visit in world.visits]


def compare_worlds(make: Callable[[], Conversations], what: str) -> None:
    with replaced(Tiers, "ask", OURS):
        expected = play(make())
    for (name, ours), (_, theirs) in zip(expected, play(make()), strict=True):
        expect(ours, theirs, f"{what}, {name}: different blocks were found than with our function")


def answers_conversations(function: Any, bench: Bench) -> None:
    """the real Tiers: four people talk in turn, with tiers of several sizes"""
    order = next(iter(ORDERS))
    for sizes in TRIED:
        compare_worlds(lambda: Conversations(order, **sizes), f"sizes {sizes or 'of the lab'}")  # noqa: B023


def answers_with_a_losing_disk(function: Any, bench: Bench) -> None:
    """the real Tiers: a disk that delivers less than it was asked for"""

    def make() -> Conversations:
        world = Conversations(memory=0)
        world.disk = Losing(80)
        world._begin()
        return world

    compare_worlds(make, "a disk that delivers less than it was asked for")


TIERS = Task("next_run", "Beyond memory", use_next_run, (*CHAINS, answers_conversations, answers_with_a_losing_disk))
