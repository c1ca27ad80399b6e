"""Grading of `delta_step`: states that one can follow by hand, random ones, then the layers of a hybrid model."""

import random
from collections.abc import Callable
from typing import Any

from chapters.expect import Wrong, cases, ensure, unchanged
from chapters.grading import Bench

Numbers = list[float]
Matrix = list[Numbers]
DeltaStep = Callable[[Matrix, Numbers, Numbers, Numbers, float, float], tuple[Matrix, Numbers]]
MATRIX, DECAY = "A state is a matrix", "Letting go, and what else a token says"  # headings


def slowly(state: Matrix, q: Numbers, k: Numbers, v: Numbers, decay: float, beta: float) -> tuple[Matrix, Numbers]:
    """Another way to the same result: decay * (I - beta k k^T) state + beta k v^T."""
    rows, columns = range(len(k)), range(len(v))
    kept = [[decay * ((i == n) - beta * k[i] * k[n]) for n in rows] for i in rows]
    new = [[sum(kept[i][n] * state[n][j] for n in rows) + beta * k[i] * v[j] for j in columns] for i in rows]
    return new, [sum(q[i] * new[i][j] for i in rows) for j in columns]


def is_numbers(thing: Any, size: int) -> bool:
    return isinstance(thing, list) and len(thing) == size and all(isinstance(x, (int, float)) for x in thing)


def are_close(a: Numbers, b: Numbers) -> bool:
    return all(abs(x - y) <= 1e-9 * (1 + abs(x)) for x, y in zip(a, b, strict=True))


def shown(numbers: Any) -> Any:
    """So that a student need not read 17 digits."""
    return [shown(x) for x in numbers] if isinstance(numbers, list) else round(numbers, 4)


def ask(
    function: DeltaStep, state: Matrix, q: Numbers, k: Numbers, v: Numbers, decay: float, beta: float, hint: str
) -> Matrix:
    """Compares, and returns the new state."""
    given = f"state {shown(state)}, q {shown(q)}, k {shown(k)}, v {shown(v)}, decay {decay:.3g}, beta {beta:.3g}"
    if len(state) > 3:
        given = f"a state of {len(state)} x {len(v)} random numbers, decay {decay:.3g}, beta {beta:.3g}"
    changed = "the state or a vector that was given has been changed, and other requests begin from such a snapshot"
    with unchanged(changed, state, q, k, v):
        found: Any = function(state, q, k, v, decay, beta)
    if not (isinstance(found, tuple) and len(found) == 2):
        raise Wrong("return two things: the new state, and what q reads", got=found)
    new, output = found
    is_state = isinstance(new, list) and len(new) == len(k) and all(is_numbers(row, len(v)) for row in new)
    ensure(is_state, f"the new state is a list of {len(k)} lists of {len(v)} numbers; {given}", got=new)
    ensure(is_numbers(output, len(v)), f"q reads a list of {len(v)} numbers; {given}", got=output)
    shared = any(a is b for a in new for b in state)
    ensure(not shared, "the new state shares a row with the given one: a change of one changes both")
    expected_state, expected_output = slowly(state, q, k, v, decay, beta)
    if not all(map(are_close, expected_state, new)):
        raise Wrong(f"the new state: {hint}; {given}", expected=shown(expected_state), got=shown(new))
    if not are_close(expected_output, output):
        hint = "the state is right, but not what q reads there: it reads the new state, all of it, and nothing else"
        raise Wrong(f"{hint}; {given}", expected=shown(expected_output), got=shown(output))
    return new


def check_random(function: DeltaStep, bench: Bench) -> None:
    """Sequences of 30 tokens agree with another formula, for states of many shapes"""
    rng = random.Random(16)
    for key_dim, value_dim in ((1, 1), (1, 4), (4, 1), (5, 3), (6, 8)):
        state = [[0.0] * value_dim for _ in range(key_dim)]
        for number in range(30):
            q, k, v = ([rng.gauss(0, 1) for _ in range(size)] for size in (key_dim, key_dim, value_dim))
            length = sum(x * x for x in k) ** 0.5
            k = [x / length for x in k]
            state = ask(function, state, q, k, v, rng.uniform(0.5, 1), rng.random(), f"token {number}")


def check_in_the_engine(function: DeltaStep, bench: Bench) -> None:
    """A hybrid model answers with your step in every head of its layers: the same tokens"""
    _ = bench.model  # where there is none there is no torch either
    from chapters.ch16_fixed_memory.checks_engine import answer_with_step

    answer_with_step(function)


EMPTY, ONE, OTHER = [[0.0, 0.0], [0.0, 0.0]], [1.0, 0.0], [0.0, 1.0]
FULL = [[3.0, 4.0], [5.0, 6.0]]
BETWEEN = [0.6, 0.8]
WIDE = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
ADDED = "the key gave something already: only what is missing up to v is added, not all of v"
CHECKS = (
    *cases(
        ask,
        {
            ("Into an empty state", MATRIX): [
                (EMPTY, ONE, ONE, [5.0, 7.0], 1.0, 1.0, "the key's row gets the value"),
                (EMPTY, OTHER, ONE, [5.0, 7.0], 1.0, 1.0, "the key's row gets the value; the other key gives nothing"),
                (EMPTY, ONE, ONE, [6.0, 8.0], 1.0, 0.5, "beta is 0.5: half of the value is written"),
                (EMPTY, ONE, ONE, [6.0, 8.0], 1.0, 0.0, "beta is 0: nothing is written"),
                (EMPTY, BETWEEN, BETWEEN, [10.0, 20.0], 1.0, 1.0, "number i of the key is row i's share of the value"),
                ([[0.0] * 3] * 2, ONE, ONE, [1.0, 2.0, 3.0], 1.0, 1.0, "two rows for the key, three columns for v"),
            ],
            "A key that is known gets the new value in place of the old one": [
                (FULL, ONE, ONE, [9.0, 9.0], 1.0, 1.0, ADDED),
                (FULL, ONE, ONE, [3.0, 4.0], 1.0, 1.0, "the key gives v already: there is nothing to change"),
                (FULL, ONE, ONE, [9.0, 10.0], 1.0, 0.5, f"beta is 0.5, so half of it; {ADDED}"),
                (WIDE, ONE, OTHER, [0.0, 0.0, 0.0], 1.0, 1.0, ADDED),
            ],
            "A key between others reads from all rows, and writes into all": [
                (FULL, ONE, BETWEEN, [5.8, 7.2], 1.0, 1.0, "0.6 of row 0 and 0.8 of row 1 make v already: no change"),
                (FULL, ONE, BETWEEN, [15.8, 7.2], 1.0, 1.0, "10 are missing in column 0: row 0 gets 6, row 1 gets 8"),
                (WIDE, BETWEEN, BETWEEN, [1.0, 0.0, 1.0], 1.0, 0.5, ADDED),
            ],
            ("Forgetting comes first", DECAY): [
                (FULL, OTHER, ONE, [9.0, 9.0], 0.5, 0.0, "beta is 0, decay 0.5: half of what was there, in every row"),
                (EMPTY, ONE, ONE, [6.0, 8.0], 0.5, 1.0, "decay is for what was there before, not for what is written"),
                (FULL, ONE, ONE, [9.0, 8.0], 0.5, 0.5, "what the key gives is read after the decay: here [1.5, 2]"),
                (WIDE, ONE, BETWEEN, [1.0, 1.0, 1.0], 0.0, 1.0, "decay 0: as if the state had been empty"),
            ],
        },
    ),
    check_random,
    check_in_the_engine,
)
