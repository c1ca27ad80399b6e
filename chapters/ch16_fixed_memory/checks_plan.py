"""Grading of `plan_snapshots`: by where prompts begin, compared with all other plans, and with the engine's policy."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from typing import Any

from chapters.ch16_fixed_memory.placing import Requests, play, random_ids
from chapters.expect import Wrong, cases, ensure, expect, unchanged
from chapters.grading import Bench
from nanovllm.core.snapshots.policy import snapshot_positions

Plan = list[list[int]]
PlanSnapshots = Callable[[list[list[int]], int, int], Plan]
SMALL_BLOCK, BLOCK = 4, 16  # of jobs in letters, and of large ones
WHY = "Why a prefix cache cannot share a state"


def last_position(prompt: list[int], block_size: int) -> int:
    """The last one at which a prompt can begin: a token is left to compute."""
    return (len(prompt) - 1) // block_size * block_size


def starts_of(prompts: list[list[int]], plan: Plan, block_size: int) -> list[int]:
    """Where each prompt begins."""
    taken: dict[int, set[tuple[int, ...]]] = {}  # position -> what snapshots there have read
    starts = []
    for prompt, positions in zip(prompts, plan, strict=True):
        reached = [
            n for n, texts in taken.items() if n <= last_position(prompt, block_size) and tuple(prompt[:n]) in texts
        ]
        starts.append(max(reached, default=0))
        for position in positions:
            taken.setdefault(position, set()).add(tuple(prompt[:position]))
    return starts


def checked(function: PlanSnapshots, prompts: list[list[int]], block_size: int, room: int, told: str) -> Plan:
    """The student's plan, if it is one. told: the job, for messages."""
    with unchanged("prompts have been changed: they have yet to run", prompts):
        plan: Any = function(prompts, block_size, room)
    is_plan = isinstance(plan, list) and all(isinstance(positions, list) for positions in plan)
    ensure(is_plan, f"{told}: return a list of positions for each prompt, a list of lists", got=plan)
    expect(len(prompts), len(plan), f"{told}: one list for each prompt, empty where it takes no snapshot")
    for number, (prompt, positions) in enumerate(zip(prompts, plan, strict=True)):
        where, last = f"{told}: prompt {number}, of {len(prompt)} tokens", last_position(prompt, block_size)
        for position in positions:
            is_number = isinstance(position, int) and not isinstance(position, bool) and position > 0
            ensure(is_number, f"{where}: a position is a number of tokens, and more than 0", got=position)
            hint = f"{where}: a snapshot belongs to the hash of the block that ends there, so positions are multiples"
            ensure(position % block_size == 0, f"{hint} of {block_size}", got=position)
            hint = f"{where}: of every prompt a token is left to compute, so no prompt can begin after {last}"
            ensure(position <= last, hint, got=position)
    num_taken = sum(map(len, plan))
    ensure(num_taken <= room, f"{told}: too many snapshots", expected=f"at most {room}", got=f"{num_taken}: {plan}")
    return plan


# -- small jobs: every plan is tried ----------------------------------------------------------------------------------


def job(texts: str) -> list[list[int]]:
    """A prompt for each word. A letter is a block of four tokens; one more token follows, unless the word has a dot."""
    prompts = []
    for number, word in enumerate(texts.split()):
        blocks = [100 * ord(letter) + i for letter in word.removesuffix(".") for i in range(SMALL_BLOCK)]
        prompts.append(blocks if word.endswith(".") else [*blocks, number])
    return prompts


def all_plans(prompts: list[list[int]], room: int) -> Iterator[Plan]:
    """Those that could be best: snapshots of shared beginnings, each taken by the first prompt that has it."""
    passing: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        for end in range(SMALL_BLOCK, last_position(prompt, SMALL_BLOCK) + 1, SMALL_BLOCK):
            passing.setdefault(tuple(prompt[:end]), []).append(number)
    useful = [(numbers[0], len(beginning)) for beginning, numbers in passing.items() if len(numbers) > 1]
    for taken in combinations(useful, min(room, len(useful))):
        plan: Plan = [[] for _ in prompts]
        for number, position in taken:
            plan[number].append(position)
        yield plan


def taken_by_the_first(prompts: list[list[int]], plan: Plan) -> Plan:
    """The same snapshots, each taken by the first prompt that passes it."""
    moved: Plan = [[] for _ in prompts]
    for prompt, positions in zip(prompts, plan, strict=True):
        for position in positions:
            first = next(n for n, other in enumerate(prompts) if other[:position] == prompt[:position])
            moved[first].append(position)
    return moved


def ask_form(function: PlanSnapshots, texts: str, room: int) -> Plan:
    told = (
        f"prompts {texts} (a letter is a block of {SMALL_BLOCK} tokens, and one more token follows; none after a dot)"
    )
    return checked(function, job(texts), SMALL_BLOCK, room, f"{told}, room for {room}")


def ask(function: PlanSnapshots, texts: str, room: int, hint: str) -> None:
    prompts, plan = job(texts), ask_form(function, texts, room)
    best = max(all_plans(prompts, room), key=lambda each: sum(starts_of(prompts, each, SMALL_BLOCK)))
    moved = taken_by_the_first(prompts, plan)
    most, saved, moved_saves = (sum(starts_of(prompts, each, SMALL_BLOCK)) for each in (best, plan, moved))
    if saved < most:
        told = f"prompts {texts} (a letter is {SMALL_BLOCK} tokens, then one more; none after a dot), room for {room}"
        hint = EARLIER if moved_saves > saved else hint
        raise Wrong(f"{told}: {hint}", expected=f"{most} tokens saved, by {best}", got=f"{saved} saved, by {plan}")


def check_random(function: PlanSnapshots, bench: Bench) -> None:
    """100 small jobs at random: no plan saves more than yours"""
    rng = random.Random(16)
    for number in range(100):
        words = ["".join(rng.choices("AB", weights=(3, 1), k=rng.randint(1, 5))) for _ in range(rng.randint(1, 8))]
        ask(
            function,
            " ".join(word + rng.choice(["", "", "."]) for word in words),
            number % 4,
            "another plan saves more",
        )


# -- large jobs: the engine's policy does not know what comes ---------------------------------------------------------


@cache
def large_jobs() -> dict[str, tuple[list[list[int]], int]]:
    """(prompts, room) by what they are. No prompt ends with a full block: the engine takes no snapshot of its own."""
    rng = random.Random(16)
    shared, varied = random_ids(rng, 1500), random_ids(rng, 5200)
    lengths = [rng.randint(4900, 5200) for _ in range(32)]
    popular = [random_ids(rng, BLOCK * rng.randint(20, 180) + 5) for _ in range(12)]
    tools = [popular[0] + random_ids(rng, BLOCK * rng.randint(4, 50)) for _ in range(9)]
    return {
        "1,500 tokens shared, 701 own": ([shared + random_ids(rng, 701) for _ in range(20)], 8),
        "4,900 to 5,200 shared of 6,001": ([varied[:n] + random_ids(rng, 6001 - n) for n in lengths], 8),
        "twelve tenants, some more popular": (
            [popular[min(rng.randrange(12), rng.randrange(12))] + random_ids(rng, 201) for _ in range(60)],
            4,
        ),
        "one system prompt, nine tools": ([rng.choice(tools) + random_ids(rng, 301) for _ in range(60)], 4),
    }


@cache
def policy_saves(name: str) -> int:
    """Tokens that need not be computed if the engine's own policy chooses, while the job runs."""
    prompts, room = large_jobs()[name]
    requests: Requests = [(prompt, [7]) for prompt in prompts]
    return sum(play(requests, snapshot_positions, room))


def ask_large(function: PlanSnapshots, name: str) -> None:
    prompts, room = large_jobs()[name]
    told = f"{len(prompts)} prompts, {name}, blocks of {BLOCK}, room for {room}"
    plan = checked(function, prompts, BLOCK, room, told)
    saved, least = sum(starts_of(prompts, plan, BLOCK)), policy_saves(name)
    if saved < least:
        hint = f"{told}: tokens saved, less than by the engine's policy, which does not know what comes"
        raise Wrong(hint, expected=f"at least {least:,}", got=f"{saved:,}")


def check_in_the_engine(function: PlanSnapshots, bench: Bench) -> None:
    """A hybrid model begins where your snapshots are: the same tokens as without a cache"""
    _ = bench.model  # where there is none there is no torch either
    from chapters.ch16_fixed_memory.checks_engine import CACHED, FORKED, answer_with_plan

    answer_with_plan(checked(function, FORKED, CACHED["block_size"], 2, f"{len(FORKED)} prompts, room for 2"))


EARLIER = "a prompt begins only where an earlier one has taken a snapshot: which is the first that passes this place?"
DEEPEST = "they share more than that, and the deeper a snapshot, the more tokens it saves"
FULL_END = "the same prompt three times, and its last block is full: a token must be left to compute"
MANY = "three prompts begin at the one place, and a single prompt at the other"
FIRST = "the first prompt that passes a place gains nothing from the snapshot there"
BOTH = "a snapshot that comes after another one saves only the tokens between the two"
FOLLOWED = "a snapshot can be followed by another one, for those prompts that go on together"
DEEPER = "the snapshot that saves most if it is the only one need not be in the best plan for two"
CHECKS = (
    *cases(
        ask_form,
        {
            ("Positions lie at the ends of blocks, leave a token, and are no more than there is room for", WHY): [
                (texts, room)
                for texts in ("ABC", "ABC ABD ABE", "ABC. ABC. ABC.", "AB. ABC ABCD.", "A. A. B", "ABCX ABCX ABDX ABDX")
                for room in (0, 1, 2, 5)
            ]
        },
    ),
    *cases(
        ask,
        {
            ("The first prompt that passes a place takes the snapshot, as deep as others share", WHY): [
                ("ABCDE ABCDF", 1, DEEPEST),
                ("ABC ABD ABE", 1, DEEPEST),
                ("C ABC D ABD E ABE", 1, DEEPEST),
                ("ABC. ABC. ABC.", 1, FULL_END),
            ],
            "One snapshot: many prompts that share little, or few that share much": [
                ("AX BCDEFGHX AY BCDEFGHY AZ AW", 1, DEEPEST),
                ("ABX ABY ABZ ABW CDEX CDEY", 1, MANY),
                ("ABCDX EFGHIJKX ABCDY EFGHIJKY ABCDZ", 1, FIRST),
            ],
            "Two snapshots: what one of them saves depends on the other": [
                ("ABCDX ABCDEX ABCDEY ABCDEZ ABCDEV ABCDEW FGHIJKX FGHIJKY", 2, BOTH),
                ("AB ABCD ABCDEF", 2, FOLLOWED),
                ("ABCX ABCY ABCX ABCY ABCX", 3, FOLLOWED),
            ],
            "Where two deep ones are better than one above them": [
                ("AAAAABBBBX AAAAACCCCX AAAAABBBBY AAAAACCCCY AAAAABBBBZ AAAAACCCCZ AAAAABBBBW AAAAACCCCW", 2, DEEPER),
                ("ABCX ABDX ABCY ABDY ABCZ ABDZ", 2, DEEPER),
            ],
        },
    ),
    check_random,
    *cases(ask_large, {"Large jobs: as good as the engine's policy, or better": [(name,) for name in large_jobs()]}),
    check_in_the_engine,
)
