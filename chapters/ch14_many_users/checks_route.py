"""Grading of `route`: on small examples, then in front of fleets of real schedulers in virtual time."""

from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

from chapters.ch14_many_users.fleet import BLOCK_SIZE, Fleet, Job
from chapters.ch14_many_users.routing import POLICIES
from chapters.ch14_many_users.workload import own_tokens, shared_prefixes
from chapters.ch14_many_users.world import Result, result_of
from chapters.expect import Wrong, cases, expect, unchanged
from chapters.grading import Bench
from nanovllm.features.cache_reports.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from nanovllm.serving.routing import Announced

Told = tuple[int, KVCacheEvent]  # by which replica
Route = Callable[[dict[Any, Any], list[bytes], list[int], list[Told]], int]


def block_hashes_of(text: str, num_blocks: int) -> list[bytes]:
    return [f"{text}{i}".encode() for i in range(num_blocks)]


def stored(replica: int, block_hashes: list[bytes]) -> Told:
    return replica, BlockStored(
        block_hashes, None, [0] * BLOCK_SIZE * len(block_hashes), BLOCK_SIZE, None, MEDIUM_GPU, None
    )


def removed(replica: int, block_hashes: list[bytes]) -> Told:
    return replica, BlockRemoved(block_hashes, MEDIUM_GPU)


class Asked:
    """The student's router: its memory, and a look at what it does with what it is given."""

    def __init__(self, function: Route) -> None:
        self.function, self.memory, self.events = function, dict[Any, Any](), list[Told]()

    def __call__(self, block_hashes: list[bytes], loads: dict[int, int], announced: Announced | None = None) -> int:
        """announced: not for students, who follow the events."""
        given, events, self.events = list(loads.values()), self.events, []
        with unchanged(
            "block_hashes, loads and events, which you were given, have been changed", block_hashes, given, events
        ):
            got: Any = self.function(self.memory, block_hashes, given, events)
        if not isinstance(got, int) or not 0 <= got < len(loads):
            raise Wrong("return the index of a replica", expected=f"0 to {len(loads) - 1}", got=repr(got))
        return got

    def expect(self, expected: int, block_hashes: list[bytes], loads: list[int], hint: str) -> None:
        got = self(block_hashes, dict(enumerate(loads)))
        expect(expected, got, f"{len(block_hashes)} blocks, loads {loads}: {hint}")


class AskedFleet(Fleet):
    """A fleet whose events go to the student's router."""

    route: Asked

    def hear(self, index: int, batch: KVEventBatch) -> None:
        self.route.events += ((index, event) for event in batch.events)


def ask(function: Route, *steps: Told | tuple[int, list[bytes], list[int], str]) -> None:
    """Events and prompts as they come one after another; of a prompt where it has to go, its blocks, the loads, why."""
    router = Asked(function)
    for step in steps:
        if len(step) == 2:
            router.events.append(step)
        else:
            router.expect(*step)


A, B, NOBODY = block_hashes_of("a", 16), block_hashes_of("b", 16), "nobody has any of its blocks"
EXAMPLES = cases(
    ask,
    {
        "A prompt like no other goes where there is the least to do": [
            *(
                ((loads.index(min(loads)), A[:5], loads, NOBODY),)
                for loads in ([500, 100, 900], [0, 0], [7], [3, 2, 2])
            ),
            ((1, [], [10, 9], "a prompt shorter than a block has no hashes"),),
        ],
        "A prompt goes to the replica that has announced its beginning": [
            (
                stored(2, A),
                (2, A, [0, 0, 0], "replica 2 has all of them"),
                (2, [*A, b"own"], [0, 0, 900], "1,024 tokens are there; 900 are waiting there"),
                (0, B, [0, 0, 0], f"another prompt: {NOBODY}"),
                (1, B, [900, 0, 0], "replica 0 was sent these blocks, and has not announced any"),
                stored(0, B[:6]),
                stored(0, B[6:]),
                (0, [*B[:10], b"x", b"y"], [0, 0, 0], "replica 0 has its first ten blocks"),
            )
        ],
        "Not at any price: if that replica has too much to do, another one gets the prompt and learns it": [
            (
                stored(0, A),
                (1, A, [5000, 0, 0], "replica 0 would save 1,024 tokens, but has 5,000 to do first"),
                stored(1, A),
                (1, A, [5000, 500, 0], "now replica 1 has the blocks, too"),
                (2, A, [5000, 1100, 0], "1,100 tokens are more than 1,024"),
            )
        ],
        "Of two that have a part, the longer part counts": [
            (
                stored(0, A[:4]),
                stored(1, A[:12]),
                (1, A[:14], [0, 0, 0], "replica 0 has 4 of its blocks, replica 1 has 12"),
                (1, A[:5], [0, 0, 0], "replica 0 has 4 of its blocks, replica 1 has all 5"),
                (0, A[:14], [0, 700, 999], "512 tokens more to compute at replica 0, and 700 fewer before"),
            )
        ],
        "What a replica has given up is forgotten": [
            (
                stored(0, A),
                stored(1, A[:8]),
                (0, A, [0, 0], "replica 0 has all 16 blocks, replica 1 has 8"),
                removed(0, A[4:]),
                (1, A, [0, 0], "replica 0 has 4 blocks left, replica 1 has 8"),
                removed(0, A[4:]),
                (0, A, [200, 500], "replica 0 has said twice that 12 blocks have gone: 4 are left, as before"),
                (1, A, [9, 0], "replica 1 has 8 blocks, replica 0 has 4"),
                stored(0, A[4:]),
                (0, A, [500, 0], "replica 0 has all 16 blocks again"),
                (0, AllBlocksCleared()),
                (1, A, [0, 400], "replica 0 has cleared its cache; replica 1 has 8 blocks"),
                stored(0, A[:9]),
                (0, A, [0, 0], "replica 0 has 9 blocks since"),
                removed(0, A[:1]),
                (1, A, [0, 0], "replica 0 has lost its first block: what comes after it cannot be found there"),
            )
        ],
    },
)


def count(thing: Any) -> int:
    if isinstance(thing, dict):
        return sum(count(key) + count(value) for key, value in thing.items())
    return sum(map(count, thing)) if isinstance(thing, list | tuple | set | frozenset | deque) else 1


def check_memory(function: Route, bench: Bench) -> None:
    """Memory does not grow with blocks that no replica has any more"""
    router = Asked(function)
    for number in range(500):
        block_hashes = block_hashes_of(f"{number} ", 4)
        router.events += [stored(number % 3, block_hashes)]
        router(block_hashes, {0: 0, 1: 1, 2: 2})
        router.events += [removed(number % 3, block_hashes)]
    router([], {0: 0, 1: 0, 2: 0})
    if (num_kept := count(router.memory)) > 300:
        hint = "500 prompts were stored and removed again by three replicas, which have nothing now"
        raise Wrong(hint, expected="a few things for each block that a replica has", got=f"{num_kept} things")


def check_stampede(function: Route, bench: Bench) -> None:
    """Everybody asks the same at once: all replicas answer"""
    beginning = own_tokens(1024)
    jobs = [Job(0.001 * i, beginning + own_tokens(80), 16) for i in range(64)]
    fleet = AskedFleet(8, Asked(function)).run(jobs)
    counts = [sum(job.replica == i for job in jobs) for i in range(8)]
    if max(counts) > 16 or not min(counts):
        hint = "64 requests with the same beginning within 64 ms, 8 replicas: how many went to each"
        raise Wrong(hint, expected="about 8 to each", got=counts)
    again = AskedFleet(8, Asked(function)).run(Job(job.arrival_s, job.prompt, 16) for job in jobs)
    hint = "the same requests once more, with a new memory: the same replicas"
    expect([job.replica for job in fleet.jobs], [job.replica for job in again.jobs], hint)


def run(fleet: Fleet) -> Result:
    num_replicas = len(fleet.replicas)
    return result_of(fleet.run(islice(shared_prefixes(num_replicas), 30 * num_replicas)))


@cache
def run_with(policy: str, num_replicas: int) -> Result:
    return run(Fleet(num_replicas, POLICIES[policy]()))


def check_fleet(function: Route, bench: Bench) -> None:
    """A fleet of 8 and one of 16: nearly the hits of routing by prefix, and nobody waits long"""
    for num_replicas in (8, 16):
        got = run(AskedFleet(num_replicas, Asked(function)))
        by_prefix, least = (run_with(policy, num_replicas) for policy in ("by prefix", "least loaded"))
        where = f"{num_replicas} replicas"
        if got.hit_rate < 0.75 * by_prefix.hit_rate:
            expected = f"at least {0.75 * by_prefix.hit_rate:.0%}; routing by prefix has {by_prefix.hit_rate:.0%}"
            hint = "blocks found in the cache; a prompt goes elsewhere only where that saves more than its blocks cost"
            raise Wrong(f"{where}: {hint}", expected=expected, got=f"{got.hit_rate:.0%}")
        for what, most in (("p99", 1.15), ("mean", 0.75)):
            theirs_s, least_s = (getattr(result, f"ttft_{what}_s") for result in (got, least))
            if theirs_s > most * least_s:
                expected = f"at most {1e3 * most * least_s:.0f} ms; routing to the least loaded has {1e3 * least_s:.0f}"
                hint = f"TTFT, {what}; what a replica has to compute counts as much as what the prompt lacks there"
                raise Wrong(f"{where}: {hint}", expected=expected, got=f"{1e3 * theirs_s:.0f} ms")


CHECKS = (*EXAMPLES, check_memory, check_stampede, check_fleet)
