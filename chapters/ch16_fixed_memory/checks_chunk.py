"""Grading of `delta_chunk`: states that one can follow by hand, random ones, then the layers of a hybrid model.

The state stays here. The student's function is given read(), which may be called once.
"""

import random
from collections.abc import Callable
from typing import Any

from chapters.expect import Wrong, cases, differs, ensure, unchanged
from chapters.grading import Bench

Vector = list[float]
Matrix = list[Vector]
Read = Callable[[list[Vector]], list[Vector]]
DeltaChunk = Callable[
    [Read, list[Vector], list[Vector], list[Vector], list[float], list[float]], tuple[list[Vector], float, list[Vector]]
]
# Headings.
MATRIX, DELTA, DECAY = "A state is a matrix", "The delta rule", "Letting go, and what else a token says"
BY_TOKEN = "Token by token"


class Source:
    """The state before the chunk: read() is given to the student's function."""

    def __init__(self, state: Matrix, num_tokens: int) -> None:
        self.state, self.most, self.num_calls = state, 2 * num_tokens, 0

    def read(self, vectors: Any) -> list[Vector]:
        self.num_calls += 1
        if self.num_calls > 1:
            hint = "read is called a second time: the state may be gone through only once for a chunk"
            raise Wrong(hint, section=BY_TOKEN)
        are_vectors = isinstance(vectors, list) and all(is_numbers(x, len(self.state)) for x in vectors)
        ensure(are_vectors, f"read takes a list of vectors of {len(self.state)} numbers", got=vectors)
        if len(vectors) > self.most:
            hint = "read gets too many vectors: with so many you could ask for the state itself, which is large"
            raise Wrong(hint, expected=f"at most {self.most}", got=len(vectors), section=BY_TOKEN)
        return [look_up(self.state, x) for x in vectors]


def look_up(state: Matrix, x: Vector) -> Vector:
    return [sum(a * row[j] for a, row in zip(x, state, strict=True)) for j in range(len(state[0]))]


def slowly(
    state: Matrix, q: list[Vector], k: list[Vector], v: list[Vector], decay: list[float], beta: list[float]
) -> tuple[list[Vector], Matrix]:
    """What each token reads, and the state after them: token by token."""
    outputs = []
    for t in range(len(k)):
        state = [[decay[t] * number for number in row] for row in state]
        change = [beta[t] * (wanted - found) for wanted, found in zip(v[t], look_up(state, k[t]), strict=True)]
        state = [[x + a * c for x, c in zip(row, change, strict=True)] for row, a in zip(state, k[t], strict=True)]
        outputs.append(look_up(state, q[t]))
    return outputs, state


def put_together(state: Matrix, k: list[Vector], left: float, lines: list[Vector]) -> Matrix:
    """left * S + outer(k[0], lines[0]) + ..."""
    new = [[left * number for number in row] for row in state]
    for key, line in zip(k, lines, strict=True):
        new = [[x + a * y for x, y in zip(row, line, strict=True)] for row, a in zip(new, key, strict=True)]
    return new


def is_number(thing: Any) -> bool:
    return isinstance(thing, (int, float)) and not isinstance(thing, bool)


def is_numbers(thing: Any, size: int) -> bool:
    return isinstance(thing, list) and len(thing) == size and all(map(is_number, thing))


def is_matrix(thing: Any, num_rows: int, num_columns: int) -> bool:
    return isinstance(thing, list) and len(thing) == num_rows and all(is_numbers(row, num_columns) for row in thing)


def are_close(a: Vector, b: Vector) -> bool:
    return not any(differs(x, y, 1e-7, 1e-7) for x, y in zip(a, b, strict=True))


def shown(numbers: Any) -> Any:
    """So that a student need not read 17 digits."""
    return [shown(x) for x in numbers] if isinstance(numbers, list) else round(numbers, 4)


def ask(
    function: DeltaChunk,
    state: Matrix,
    q: list[Vector],
    k: list[Vector],
    v: list[Vector],
    decay: list[float],
    beta: list[float],
    hint: str,
) -> None:
    num_tokens, value_dim = len(k), len(v[0])
    given = f"state {shown(state)}, q {shown(q)}, k {shown(k)}, v {shown(v)}, decay {decay}, beta {beta}"
    if len(state) > 3:
        given = f"{num_tokens} tokens, a state of {len(state)} x {value_dim}, all numbers random"
    source = Source(state, num_tokens)
    with unchanged("a list that was given has been changed: the engine still needs it", q, k, v, decay, beta):
        found: Any = function(source.read, q, k, v, decay, beta)
    if not (isinstance(found, tuple) and len(found) == 3):
        raise Wrong("return a tuple of three things: outputs, left and lines", got=found)
    outputs, left, lines = found
    form = f"a list of {num_tokens} lists of {value_dim} numbers"
    ensure(is_matrix(outputs, num_tokens, value_dim), f"outputs is {form}; {given}", got=outputs)
    ensure(is_number(left), f"left is a number; {given}", got=left)
    ensure(is_matrix(lines, num_tokens, value_dim), f"lines is {form}; {given}", got=lines)
    expected_outputs, expected_state = slowly(state, q, k, v, decay, beta)
    for t, (ours, theirs) in enumerate(zip(expected_outputs, outputs, strict=True)):
        if not are_close(ours, theirs):
            raise Wrong(f"token {t} reads something else: {hint}; {given}", expected=shown(ours), got=shown(theirs))
    new_state = put_together(state, k, left, lines)
    if not all(map(are_close, expected_state, new_state)):
        hint = "outputs are right, but not the state that left and lines make: left has faded with every token, and a "
        hint += "line with every token after its own"
        if len(state) > 3:
            raise Wrong(f"{hint}; {given}")
        raise Wrong(f"{hint}; {given}", expected=shown(expected_state), got=shown(new_state))


def random_vector(rng: random.Random, size: int) -> Vector:
    return [rng.gauss(0, 1) for _ in range(size)]


def random_key(rng: random.Random, size: int) -> Vector:
    numbers = random_vector(rng, size)
    length = sum(x * x for x in numbers) ** 0.5
    return [x / length for x in numbers]


def ask_random(
    function: DeltaChunk, num_tokens: int, key_dim: int, value_dim: int, decays: tuple[float, float], hint: str
) -> None:
    rng = random.Random(num_tokens)
    state = [random_vector(rng, value_dim) for _ in range(key_dim)]
    q, k = ([make(rng, key_dim) for _ in range(num_tokens)] for make in (random_vector, random_key))
    v = [random_vector(rng, value_dim) for _ in range(num_tokens)]
    decay, beta = ([rng.uniform(*bounds) for _ in range(num_tokens)] for bounds in (decays, (0.0, 1.0)))
    ask(function, state, q, k, v, decay, beta, hint)


def check_in_the_engine(function: DeltaChunk, bench: Bench) -> None:
    """A hybrid model answers with your chunks in every head of its layers: the same tokens"""
    _ = bench.model  # where there is none there is no torch either
    from chapters.ch16_fixed_memory.checks_engine import answer_with_chunks

    answer_with_chunks(function)


EMPTY, ONE, OTHER = [[0.0, 0.0], [0.0, 0.0]], [1.0, 0.0], [0.0, 1.0]
FULL = [[3.0, 4.0], [5.0, 6.0]]
BETWEEN = [0.6, 0.8]
WIDE = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
ADDED = "the key gave something already: only what is missing up to v is added, not all of v"
OWN_LINE = "a token sees its own line"
LINES_TOO = "what a key finds is in the state before the chunk, and in the lines of the tokens before it"
SHARE = "a line counts as much as the key that looks it up agrees with the key of the line: their dot product"
DIVIDES = "the product of the decays is 0 for a computer, or nearly: let each line fade by itself instead of dividing"
ZERO = "decay 0 leaves nothing of what came before, and all of what comes after: no product of decays to divide by"
CHECKS = (
    *cases(
        ask,
        {
            ("One token, into an empty state", MATRIX): [
                (EMPTY, [ONE], [ONE], [[5.0, 7.0]], [1.0], [1.0], f"{OWN_LINE}, so its key gives its value"),
                (EMPTY, [OTHER], [ONE], [[5.0, 7.0]], [1.0], [1.0], "the query is at a right angle to the key"),
                (EMPTY, [ONE], [ONE], [[6.0, 8.0]], [1.0], [0.5], "beta is 0.5: half of the value is written"),
                (EMPTY, [ONE], [BETWEEN], [[10.0, 20.0]], [1.0], [1.0], SHARE),
                ([[0.0] * 3] * 2, [ONE], [ONE], [[1.0, 2.0, 3.0]], [1.0], [1.0], "two rows for the key, three columns"),
            ],
            ("One token, into a state that gives its key something", DELTA): [
                (FULL, [ONE], [ONE], [[9.0, 9.0]], [1.0], [1.0], ADDED),
                (FULL, [OTHER], [ONE], [[9.0, 9.0]], [1.0], [1.0], "the other key still reads row 1 of the state"),
                (FULL, [ONE], [ONE], [[9.0, 10.0]], [1.0], [0.5], f"beta is 0.5, so half of it; {ADDED}"),
                (WIDE, [BETWEEN], [BETWEEN], [[1.0, 0.0, 1.0]], [1.0], [0.5], ADDED),
            ],
            ("One token, before which the state fades", DECAY): [
                (FULL, [OTHER], [ONE], [[9.0, 9.0]], [0.5], [0.0], "beta is 0, decay 0.5: half of what was there"),
                (EMPTY, [ONE], [ONE], [[6.0, 8.0]], [0.5], [1.0], "decay is for what was there before the token wrote"),
                (
                    FULL,
                    [ONE],
                    [ONE],
                    [[9.0, 8.0]],
                    [0.5],
                    [0.5],
                    "what the key gives is read after the decay: [1.5, 2]",
                ),
                (WIDE, [ONE], [BETWEEN], [[1.0, 1.0, 1.0]], [0.0], [1.0], "decay 0: as if the state had been empty"),
            ],
            ("A token finds what earlier tokens of the chunk have written", DELTA): [
                (EMPTY, [ONE] * 2, [ONE] * 2, [[6.0, 8.0]] * 2, [1.0] * 2, [0.5] * 2, LINES_TOO),
                (FULL, [ONE] * 2, [ONE] * 2, [[9.0, 9.0], [1.0, 2.0]], [1.0] * 2, [1.0] * 2, LINES_TOO),
                (EMPTY, [ONE] * 2, [OTHER, ONE], [[5.0, 7.0], [1.0, 2.0]], [1.0] * 2, [1.0] * 2, SHARE),
                (EMPTY, [OTHER] * 2, [ONE, BETWEEN], [[5.0, 10.0]] * 2, [1.0] * 2, [1.0] * 2, SHARE),
                (
                    WIDE,
                    [BETWEEN] * 3,
                    [ONE, BETWEEN, ONE],
                    [[1.0] * 3, [2.0] * 3, [3.0] * 3],
                    [1.0] * 3,
                    [1.0] * 3,
                    SHARE,
                ),
            ],
            ("Earlier lines of the chunk fade, too", DECAY): [
                (
                    EMPTY,
                    [ONE] * 2,
                    [ONE] * 2,
                    [[6.0, 8.0]] * 2,
                    [1.0, 0.5],
                    [1.0, 0.0],
                    "the first line has faded once",
                ),
                (
                    EMPTY,
                    [ONE] * 2,
                    [ONE] * 2,
                    [[6.0, 8.0]] * 2,
                    [0.5] * 2,
                    [0.5] * 2,
                    "what has faded is missing again",
                ),
                (FULL, [OTHER] * 3, [ONE] * 3, [[1.0, 1.0]] * 3, [0.5] * 3, [1.0] * 3, "S has faded with each of them"),
                (FULL, [BETWEEN] * 3, [ONE, OTHER, ONE], [[1.0, 1.0]] * 3, [0.5, 0.0, 0.5], [0.5] * 3, ZERO),
            ],
        },
    ),
    *cases(
        ask_random,
        {
            ("Random chunks agree with the slow way, and the state stays where it is", BY_TOKEN): [
                (num_tokens, key_dim, value_dim, (0.5, 1.0), "with nothing but the dot products of keys and queries")
                for num_tokens, key_dim, value_dim in ((1, 4, 1), (2, 12, 3), (3, 16, 4), (20, 5, 3), (40, 6, 8))
            ],
            ("Long chunks, which leave nothing of the state", DECAY): [
                (150, 4, 2, (0.0, 0.01), DIVIDES),
                (400, 4, 1, (0.05, 0.3), DIVIDES),
            ],
        },
    ),
    check_in_the_engine,
)
