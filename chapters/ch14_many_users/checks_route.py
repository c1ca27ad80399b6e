"""Grading of `route`: on small examples, then in front of fleets of real schedulers in virtual time."""

from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

from chapters.ch14_many_users.fleet import NUM_BLOCKS, Fleet, Job, Router
from chapters.ch14_many_users.routing import POLICIES
from chapters.ch14_many_users.workload import own_tokens, shared_prefixes
from chapters.ch14_many_users.world import Result, result_of
from chapters.expect import Wrong, cases, expect, unchanged
from chapters.grading import Bench

Route = Callable[[dict[Any, Any], list[bytes], list[int], int], int]


def names_of(text: str, num_blocks: int) -> list[bytes]:
    return [f"{text}{i}".encode() for i in range(num_blocks)]


class Asked:
    """The student's router: its memory, and a look at what it does with what it is given."""

    def __init__(self, function: Route, num_blocks: int = NUM_BLOCKS) -> None:
        self.function, self.num_blocks, self.memory = function, num_blocks, dict[Any, Any]()

    def __call__(self, names: list[bytes], loads: list[int]) -> int:
        with unchanged("names and loads, which you were given, have been changed", names, loads):
            got: Any = self.function(self.memory, names, loads, self.num_blocks)
        if not isinstance(got, int) or not 0 <= got < len(loads):
            raise Wrong("return the index of a replica", expected=f"0 to {len(loads) - 1}", got=repr(got))
        return got

    def expect(self, expected: int, names: list[bytes], loads: list[int], hint: str) -> None:
        expect(expected, self(names, loads), f"{len(names)} blocks, loads {loads}: {hint}")


def ask(function: Route, *prompts: tuple[int, list[bytes], list[int], str]) -> None:
    """Prompts that come one after another: where each has to go, its blocks, the loads, and why."""
    router = Asked(function)
    for prompt in prompts:
        router.expect(*prompt)


A, B, NOBODY = names_of("a", 16), names_of("b", 16), "nobody has any of its blocks"
EXAMPLES = cases(
    ask,
    {
        "A prompt like no other goes where the least is to be done": [
            *(
                ((loads.index(min(loads)), A[:5], loads, NOBODY),)
                for loads in ([500, 100, 900], [0, 0], [7], [3, 2, 2])
            ),
            ((1, [], [10, 9], "a prompt shorter than a block has no names"),),
        ],
        "A prompt that begins as another did goes where that one went": [
            (
                (2, A, [9, 9, 0], NOBODY),
                (2, A, [0, 0, 0], "replica 2 has all of them"),
                (2, [*A, b"own"], [0, 0, 900], "1,024 tokens are there; 900 are waiting there"),
                (0, B, [0, 0, 0], f"another prompt: {NOBODY}"),
                (0, [*B[:10], b"x", b"y"], [0, 0, 0], "replica 0 has its first ten blocks"),
            )
        ],
        "Not at any price: a replica with too much to do does not get it, and another one learns the prompt": [
            (
                (0, A, [0, 0, 0], NOBODY),
                (1, A, [5000, 0, 0], "replica 0 would save 1,024 tokens, and has 5,000 to do first"),
                (1, A, [5000, 500, 0], "now replica 1 has the blocks, too"),
                (2, A, [5000, 1100, 0], "1,100 tokens are more than 1,024"),
            )
        ],
        "Of two that have a part, the longer part counts": [
            (
                (0, A[:4], [0, 9, 9], NOBODY),
                (1, A[:12], [9999, 0, 9], "replica 0 has too much to do"),
                (1, A[:14], [0, 0, 0], "replica 0 has 4 of its blocks, replica 1 has 12"),
                (1, A[:5], [0, 0, 0], "replica 0 has 4 of its blocks, replica 1 has all 5"),
                (0, A[:14], [0, 700, 999], "640 tokens more to compute at replica 0, and 700 fewer before"),
            )
        ],
    },
)


def count(thing: Any) -> int:
    if isinstance(thing, dict):
        return sum(count(key) + count(value) for key, value in thing.items())
    return sum(map(count, thing)) if isinstance(thing, list | tuple | set | frozenset | deque) else 1


def check_forgets(function: Route, bench: Bench) -> None:
    """What a replica will have evicted is forgotten; what is used again and again is not"""
    router = Asked(function, num_blocks=40)
    hint = "its pool has 40 blocks, and 64 others have been sent there since"
    router.expect(0, names_of("old", 8), [0, 9], NOBODY)
    router.expect(0, names_of("used", 8), [0, 9], NOBODY)
    for number in range(8):
        router.expect(0, names_of(f"new{number} ", 8), [0, 9999], "replica 1 has too much to do")
        router.expect(0, names_of("used", 8), [300, 0], "replica 0 has used these blocks lately: it still has them")
    router.expect(1, names_of("old", 8), [100, 0], hint)
    router = Asked(function, num_blocks=10)
    router.expect(0, names_of("a", 8), [0, 9], NOBODY)
    router.expect(0, names_of("b", 6), [0, 9999], "replica 1 has too much to do")
    hint = "its pool has 10 blocks. b's six came; a's last four had to go, and its first four are there"
    router.expect(0, names_of("a", 8), [250, 0], hint)
    router = Asked(function, num_blocks=10)
    for number in range(500):
        router(names_of(f"{number} ", 4), [0, 1, 2])
    if (num_kept := count(router.memory)) > 300:
        hint = "500 prompts went to three replicas with 10 blocks each; memory must not grow for ever"
        raise Wrong(hint, expected="a few things for each block that a replica may have", got=f"{num_kept} things")


def check_stampede(function: Route, bench: Bench) -> None:
    """Everybody asks the same at once: all replicas answer"""
    beginning = own_tokens(1024)
    jobs = [Job(0.001 * i, beginning + own_tokens(80), 16) for i in range(64)]
    fleet = Fleet(8, Asked(function)).run(jobs)
    counts = [sum(job.replica == i for job in jobs) for i in range(8)]
    if max(counts) > 16 or not min(counts):
        hint = "64 requests with the same beginning within 64 ms, 8 replicas: how many went to each"
        raise Wrong(hint, expected="about 8 to each", got=counts)
    again = Fleet(8, Asked(function)).run(Job(job.arrival_s, job.prompt, 16) for job in jobs)
    hint = "the same requests once more, with a new memory: the same replicas"
    expect([job.replica for job in fleet.jobs], [job.replica for job in again.jobs], hint)


def run_fleet(num_replicas: int, router: Router) -> Result:
    return result_of(Fleet(num_replicas, router).run(islice(shared_prefixes(num_replicas), 40 * num_replicas)))


@cache
def run_fleet_with(policy: str, num_replicas: int) -> Result:
    return run_fleet(num_replicas, POLICIES[policy](num_replicas))


def check_fleet(function: Route, bench: Bench) -> None:
    """A fleet of 8 and one of 16: nearly the hits of routing by prefix, and nobody waits long"""
    for num_replicas in (8, 16):
        got = run_fleet(num_replicas, Asked(function))
        by_prefix, least = (run_fleet_with(policy, num_replicas) for policy in ("by prefix", "least loaded"))
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


CHECKS = (*EXAMPLES, check_forgets, check_stampede, check_fleet)
