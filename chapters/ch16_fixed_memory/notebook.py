"""A state of fixed size, as a notebook by the door: who is in which room (chapter 16).

Each name and each room is a random vector of length 1. The notebook is a matrix. A line of it is written with the name
as the key and the room as the value, by the rule of the layers in features/hybrid/delta_rule.py; in plain lists,
for a browser to run it. It is asked with a name, and answers with the room that comes nearest.
"""

import math
import random
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

SIZE = 8  # numbers of a vector: the notebook has SIZE rows and SIZE columns
PEOPLE = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Joan Kai Lena Max Nora Olaf Pia".split()
ROOMS = (
    "attic barn bath cellar chapel den forge garage garden gym hall kitchen larder library lobby mill nursery office "
    "parlour porch shed stable studio tower"
).split()
Vector = list[float]
State = list[Vector]  # a row for each number of a key, a column for each number of a value
Line = tuple[str, str]  # (name, room)


class Rule(NamedTuple):
    """corrects: what the key gives already is taken off before it is written. beta: how much of it is written."""

    name: str
    corrects: bool
    beta: float


RULES = Rule("add up", False, 1.0), Rule("delta rule", True, 1.0), Rule("delta rule, half", True, 0.5)
DECAYS = 1.0, 0.9, 0.7
ADD_UP, DELTA, HALF = RULES


@cache
def vector_of(word: str) -> tuple[float, ...]:
    rng = random.Random(word)
    numbers = [rng.gauss(0, 1) for _ in range(SIZE)]
    length = math.sqrt(sum(x * x for x in numbers))
    return tuple(x / length for x in numbers)


def zeros(num_rows: int = SIZE, num_columns: int = SIZE) -> State:
    return [[0.0] * num_columns for _ in range(num_rows)]


def write(state: State, key: Iterable[float], value: Iterable[float], rule: Rule, decay: float = 1.0) -> State:
    """The state after it has taken in one key and value."""
    key = list(key)
    state = [[decay * x for x in row] for row in state]
    found = read(state, key) if rule.corrects else [0.0] * len(state[0])
    change = [rule.beta * (v - f) for v, f in zip(value, found, strict=True)]
    return [[x + k * c for x, c in zip(row, change, strict=True)] for row, k in zip(state, key, strict=True)]


def read(state: State, query: Iterable[float]) -> Vector:
    """S^T q: the rows, each times a number of the query, added up."""
    total = [0.0] * len(state[0])
    for q, row in zip(query, state, strict=True):
        total = [t + q * x for t, x in zip(total, row, strict=True)]
    return total


def dot(a: Iterable[float], b: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def state_after(lines: Iterable[Line], rule: Rule, decay: float) -> State:
    state = zeros()
    for name, room in lines:
        state = write(state, vector_of(name), vector_of(room), rule, decay)
    return state


class Answer(NamedTuple):
    """found: the room that is nearest to what was read. strength: how much of the right room was read; 1 is all."""

    name: str
    room: str
    found: str
    strength: float

    @property
    def is_right(self) -> bool:
        return self.room == self.found


def ask_all(state: State, rooms: dict[str, str]) -> list[Answer]:
    """Everybody who is in the notebook, in the order in which they came. rooms: by name, the newest."""
    answers = []
    for name, room in rooms.items():
        got = read(state, vector_of(name))
        found = max(ROOMS, key=lambda each: dot(got, vector_of(each)))
        answers.append(Answer(name, room, found, dot(got, vector_of(room))))
    return answers


def num_right(lines: list[Line], rule: Rule, decay: float = 1.0) -> int:
    return sum(answer.is_right for answer in ask_all(state_after(lines, rule, decay), dict(lines)))


class Notebook:
    """The lines written so far, and how they are written. What it holds is computed from the lines each time."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.rule, self.decay = ADD_UP, DECAYS[0]

    @property
    def state(self) -> State:
        return state_after(self.lines, self.rule, self.decay)

    @property
    def answers(self) -> list[Answer]:
        return ask_all(self.state, dict(self.lines))

    def right_so_far(self, rule: Rule) -> list[int]:
        """After each line: how many answers were right."""
        state, rooms, found = zeros(), dict[str, str](), []
        for name, room in self.lines:
            state = write(state, vector_of(name), vector_of(room), rule, self.decay)
            rooms[name] = room
            found.append(sum(answer.is_right for answer in ask_all(state, rooms)))
        return found

    def come_in(self) -> Line:
        """Somebody who was not there yet. Raises ValueError when all are."""
        number = len(dict(self.lines))
        if number == len(PEOPLE):
            raise ValueError("All sixteen are in the house. Let somebody move (c), or start over (r).")
        self.lines.append((PEOPLE[number], ROOMS[7 * number % len(ROOMS)]))
        return self.lines[-1]

    def move(self) -> Line:
        """Whoever has not moved for longest. Raises ValueError while nobody is there."""
        if not self.lines:
            raise ValueError("Nobody is in the house. Write a line (w) first.")
        last = {name: number for number, (name, _) in enumerate(self.lines)}
        name = min(last, key=last.__getitem__)
        rng = random.Random(f"{name} {len(self.lines)}")
        self.lines.append((name, rng.choice([room for room in ROOMS if room != dict(self.lines)[name]])))
        return self.lines[-1]
