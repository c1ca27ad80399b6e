"""Grading of `choose_snapshots`: by where requests begin, with the real Scheduler and SnapshotCache."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from chapters.ch16_fixed_memory.placing import (
    BLOCK_SIZE,
    UNBOUNDED,
    Requests,
    every_block,
    hard_workloads,
    play,
    random_ids,
)
from chapters.expect import Wrong, cases, ensure
from chapters.grading import Bench
from nanovllm.core.snapshots.policy import Policy

Choose = Callable[[int, int, int], dict[int, bool]]
FEW, SOME, SHARE = 8, 16, 0.8
WHY = "Why a prefix cache cannot share a state"
LONG, ROOM = 8000, 12  # tokens of the longest prompts, and snapshots for them


def checked(function: Choose) -> Policy:
    """The student's function, as the block manager asks it, with a look at every answer."""

    def policy(num_tokens: int, num_matched: int, block_size: int) -> dict[int, bool]:
        found: Any = function(num_tokens, num_matched, block_size)
        when = f"{num_tokens} tokens, {num_matched} of them matched, blocks of {block_size}"
        ensure(isinstance(found, dict), f"{when}: return a dict {{position: is it wanted?}}", got=found)
        last = (num_tokens - 1) // block_size * block_size
        for position, is_wanted in found.items():
            is_number = isinstance(position, int) and not isinstance(position, bool) and position >= 0
            ensure(is_number, f"{when}: a position is a number of tokens", got=position)
            hint = f"{when}: a snapshot belongs to the hash of the block that ends there, so positions are multiples"
            ensure(position % block_size == 0, f"{hint} of {block_size}", got=position)
            hint = f"{when}: of every prompt a token is left to be computed, so no prompt can begin after {last}"
            ensure(position <= last, hint, got=position)
            ensure(isinstance(is_wanted, bool), f"{when}: position {position} is wanted or not", got=is_wanted)
        return found

    return policy


def ask_form(function: Choose, num_tokens: int, num_matched: int, block_size: int) -> None:
    checked(function)(num_tokens, num_matched, block_size)


def compare(function: Choose, requests: Requests, max_snapshots: int, expected: dict[int, int], hint: str) -> None:
    """expected: {request: where it must begin, at least}."""
    starts = play(requests, checked(function), max_snapshots)
    for i, least in expected.items():
        if starts[i] < least:
            where = f"request {i + 1} of {len(requests)}, with room for {max_snapshots} snapshots"
            raise Wrong(f"{where}: {hint}", expected=f"begins at {least} or later", got=f"begins at {starts[i]}")


def own(*lengths: int, shared: int = 0) -> Requests:
    """Prompts that share so many tokens; lengths: of all of each."""
    rng = random.Random(sum(lengths))
    beginning = random_ids(rng, shared)
    return [(beginning + random_ids(rng, length - shared), [7]) for length in lengths]


def continued(length: int, *longer: int) -> Requests:
    """Each prompt is the one before and so many tokens more."""
    rng = random.Random(length)
    prompts = [random_ids(rng, length)]
    for n in longer:
        prompts.append(prompts[-1] + random_ids(rng, n))
    return [(prompt, [7]) for prompt in prompts]


def ask_unforeseen(function: Choose, shared: int) -> None:
    hint = f"two prompts of {LONG:,} tokens share {shared:,}, which nobody could know: is there a position that both "
    hint += "pass, after half of what they share, and are a prompt's positions so few that all find room?"
    compare(function, own(LONG, LONG, shared=shared), ROOM, {1: shared // 2}, hint)


def check_others_between(function: Choose, bench: Bench) -> None:
    """Between two requests that share their beginning come three that nobody repeats"""
    fork, requests = 1488, own(*[2200] * 6, shared=1500)
    rng = random.Random(3)
    requests = [request for one in requests for request in (one, *((random_ids(rng, 2200), [7]) for _ in range(3)))]
    marks = checked(function)(2200, fork, BLOCK_SIZE)
    hint = "a snapshot was taken where the prompt leaves the cache, but others have pushed it out"
    if not marks.get(fork):
        hint = f"at {fork} two prompts have parted, so a third is expected there, too: this is no guess"
    elif sum(marks.values()) > 2:
        hint = "a position that is only a guess must not be called wanted: with so many wanted ones of prompts that "
        hint += "nobody repeats, the one at the fork is pushed out"
    compare(function, requests, FEW, dict.fromkeys(range(8, len(requests), 4), fork), hint)


@cache
def unbounded() -> dict[str, int]:
    """What a snapshot at every block saves, if there is room for all."""
    return {name: sum(play(requests, every_block, UNBOUNDED)) for name, requests in hard_workloads().items()}


def check_workloads(function: Choose, bench: Bench) -> None:
    """The four workloads: four fifths of what a snapshot at every block would save, with room for 16"""
    for name, requests in hard_workloads().items():
        saved, most = sum(play(requests, checked(function), SOME)), unbounded()[name]
        if saved < SHARE * most:
            hint = f"{name}: tokens that are not computed, with room for {SOME} snapshots"
            raise Wrong(hint, expected=f"at least {SHARE:.0%} of {most:,}", got=f"{saved:,}, {saved / most:.0%}")


def check_in_the_engine(function: Choose, bench: Bench) -> None:
    """A hybrid model begins where your snapshots are: the same tokens as without a cache"""
    _ = bench.model  # where there is none there is no torch either
    from chapters.ch16_fixed_memory.checks_engine import answer_with_snapshots

    answer_with_snapshots(checked(function))


END = "the prompt before this one ended near here: is there a snapshot at the last full block that leaves a token?"
FORK = "it shares 1,500 tokens with those before. The first two parted at 1,488, which num_matched told the second"
CHECKS = (
    *cases(
        ask_form,
        {
            ("Positions lie at the ends of blocks, and leave a token to compute", WHY): [
                (n, matched, size)
                for n in (600, 1024, 33, 17, 16, 15, 1, 5200)
                for size in (16, 384, 1)
                for matched in (0, n // 2 // size * size, n // size * size)
            ]
        },
    ),
    *cases(
        compare,
        {
            "Prompts that continue the one before": [
                (own(*[603] * 4, shared=600), FEW, {1: 592, 2: 592, 3: 592}, END),
                (continued(500, 30, 9, 300), FEW, {1: 496, 2: 528, 3: 528}, END),
                (continued(592, 0, 0), FEW, {1: 576, 2: 576}, f"a prompt of 592 tokens, again. {END}"),
            ],
            "Prompts that share 1,500 tokens, and then 700 of their own": [
                (own(*[2200] * 20, shared=1500), FEW, dict.fromkeys(range(2, 20), 1488), FORK)
            ],
        },
    ),
    *cases(
        ask_unforeseen,
        {"Two prompts that share an unknown number of tokens": [(n,) for n in (550, 1000, 2400, 5100, 7000)]},
    ),
    check_others_between,
    check_workloads,
    check_in_the_engine,
)
