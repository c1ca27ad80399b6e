"""How much a state of fixed size remembers, on average over many random keys and values (chapter 16)."""

import math
import random
from statistics import mean

from chapters.ch16_fixed_memory.notebook import SIZE, Rule, Vector, dot, read, write, zeros

TRIALS = 60
Written = list[tuple[int, int]]  # (number of the key, number of the value)


def random_unit(rng: random.Random) -> Vector:
    numbers = [rng.gauss(0, 1) for _ in range(SIZE)]
    length = math.sqrt(dot(numbers, numbers))
    return [x / length for x in numbers]


def recall(lines: Written, rule: Rule, decays: list[float], asked: list[int], num_values: int, seed: int) -> float:
    """Which part of the keys that are asked for give their newest value, among num_values values.

    decays: a factor for each line, by which everything before it fades.
    """
    rng = random.Random(seed)
    keys = [random_unit(rng) for _ in range(1 + max(key for key, _ in lines))]
    values, state = [random_unit(rng) for _ in range(num_values)], zeros()
    for (key, value), decay in zip(lines, decays, strict=True):
        state = write(state, keys[key], values[value], rule, decay)

    def nearest(got: Vector) -> int:
        return max(range(num_values), key=lambda number: dot(got, values[number]))

    newest = dict(lines)
    return mean(nearest(read(state, keys[key])) == newest[key] for key in asked)


def once_each(num_lines: int, rule: Rule, asked: list[int]) -> float:
    """Every key is written once."""
    lines = [(number, number) for number in range(num_lines)]
    return mean(recall(lines, rule, [1.0] * num_lines, asked, num_lines, seed) for seed in range(TRIALS))


def rewritten(num_lines: int, num_keys: int, rule: Rule, decay: float = 1.0, num_values: int = 24) -> float:
    """A few keys get new values again and again, the one written longest ago first."""
    found = []
    for seed in range(TRIALS):
        rng = random.Random(f"values {seed}")
        lines = [(number % num_keys, rng.randrange(num_values)) for number in range(num_lines)]
        found.append(recall(lines, rule, [decay] * num_lines, list(range(num_keys)), num_values, seed))
    return mean(found)


def new_day(num_before: int, num_after: int, rule: Rule, decay: float) -> float:
    """Before the first of the last num_after lines everything fades once. They are asked for."""
    num_lines = num_before + num_after
    lines = [(number, number) for number in range(num_lines)]
    decays = [decay if number == num_before else 1.0 for number in range(num_lines)]
    asked = list(range(num_before, num_lines))
    return mean(recall(lines, rule, decays, asked, num_lines, seed) for seed in range(TRIALS))
