"""Our solutions of the exercises of chapter 16."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

Vector = list[float]


def delta_chunk(
    read: Callable[[list[Vector]], list[Vector]],
    q: list[Vector],
    k: list[Vector],
    v: list[Vector],
    decay: list[float],
    beta: list[float],
) -> tuple[list[Vector], float, list[Vector]]:
    """See exercise.py."""
    num_tokens = len(k)
    in_state = read([*k, *q])
    left, lines, outputs = 1.0, list[Vector](), list[Vector]()

    def look_up(x: Vector, before: Vector) -> Vector:
        """What x reads now; before: what it reads in the state before the chunk."""
        found = [left * number for number in before]
        for key, line in zip(k, lines, strict=False):
            share = sum(a * b for a, b in zip(x, key, strict=True))
            found = [number + share * written for number, written in zip(found, line, strict=True)]
        return found

    for t in range(num_tokens):
        left *= decay[t]
        lines = [[decay[t] * number for number in line] for line in lines]
        found = look_up(k[t], in_state[t])
        lines.append([beta[t] * (wanted - number) for wanted, number in zip(v[t], found, strict=True)])
        outputs.append(look_up(q[t], in_state[num_tokens + t]))
    return outputs, left, lines


@dataclass(frozen=True, eq=False)
class Fork:
    """A position at which prompts that have come together part. passing: those that could begin there, in order."""

    position: int
    passing: list[int]
    deeper: "tuple[Fork, ...]"


Plan = tuple[int, list[Fork]]  # tokens that are saved, and where snapshots are taken


def plan_snapshots(prompts: list[list[int]], block_size: int, room: int) -> list[list[int]]:
    """See exercise.py."""
    positions: list[list[int]] = [[] for _ in prompts]
    roots = find_forks(prompts, block_size, list(range(len(prompts))), 0)
    _, taken = best_plans(roots, 0, room)[room]
    for fork in taken:
        first = fork.passing[0]
        positions[first].append(fork.position)
    return positions


def find_forks(prompts: list[list[int]], block_size: int, together: list[int], start: int) -> tuple[Fork, ...]:
    """Of prompts that have come together up to start: where two or more go on together, and how far."""
    forks = []
    for group in next_block(prompts, block_size, together, start):
        if len(group) == 1:
            continue
        end = start + block_size
        while next_block(prompts, block_size, group, end) == [group]:  # nobody leaves, so a snapshot is better later
            end += block_size
        forks.append(Fork(end, group, find_forks(prompts, block_size, group, end)))
    return tuple(forks)


def next_block(prompts: list[list[int]], block_size: int, together: list[int], start: int) -> list[list[int]]:
    """These prompts, grouped by their next block; without those that could not begin after it."""
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number in together:
        end = start + block_size
        if end < len(prompts[number]):
            groups[tuple(prompts[number][start:end])].append(number)
    return list(groups.values())


@cache
def best_plans(forks: tuple[Fork, ...], above: int, room: int) -> list[Plan]:
    """The best plan for these forks and all deeper ones, with 0, 1, ... room snapshots.

    above: the position of the nearest snapshot on the way to them.
    """
    plans: list[Plan] = [(0, [])] * (room + 1)
    for fork in forks:
        without = best_plans(fork.deeper, above, room)
        beyond = best_plans(fork.deeper, fork.position, room)
        gain = (len(fork.passing) - 1) * (fork.position - above)  # the first one passes before there is a snapshot
        own = [without[0]]
        for num in range(1, room + 1):
            saved, taken = beyond[num - 1]
            own.append(max(without[num], (gain + saved, [fork, *taken]), key=num_saved))
        plans = [
            max((joined(plans[i], own[num - i]) for i in range(num + 1)), key=num_saved) for num in range(room + 1)
        ]
    return plans


def joined(one: Plan, other: Plan) -> Plan:
    return one[0] + other[0], one[1] + other[1]


def num_saved(plan: Plan) -> int:
    return plan[0]


def read_guesses(
    step: Callable[[Any, Any], tuple[Any, Any]],
    memory: dict[str, Any],
    num_held: int,
    known: list[Any],
    guesses: list[Any],
) -> list[Any]:
    """See exercise.py."""
    state, outputs = memory["state"], []
    for row in memory.get("log", [])[:num_held]:
        state, _ = step(state, row)
    for row in known:
        state, output = step(state, row)
        outputs.append(output)
    memory["state"], memory["log"] = state, [*guesses]
    for row in guesses:
        state, output = step(state, row)
        outputs.append(output)
    return outputs
