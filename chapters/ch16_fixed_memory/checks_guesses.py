"""Grading of `read_guesses`: states that are the text they have read, random runs, then a hybrid model that drafts."""

import random
from collections.abc import Callable, Iterator
from typing import Any

from chapters.expect import Wrong, cases, expect
from chapters.grading import Bench

ReadGuesses = Callable[[Callable, dict[str, Any], int, list[Any], list[Any]], list[Any]]
Call = tuple[int, str, str]  # accepted draft tokens of the last call, known tokens, draft tokens


class Row(str):
    """The input of a token: a letter."""


class State:
    """What has been read. An output is that, too, as a str."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"state of {self.text!r}"


class Layer:
    """step(), which counts its calls."""

    num_calls = 0

    def step(self, state: Any, row: Any) -> tuple[State, str]:
        for thing, kind, what in ((state, State, "a state"), (row, Row, "a row")):
            if not isinstance(thing, kind):
                raise Wrong(f"step(state, row) was called with something other than {what}", got=thing)
        self.num_calls += 1
        text = state.text + row
        return State(text), text


def parts(thing: Any) -> Iterator[State | Row]:
    """States and rows in it."""
    if isinstance(thing, (State, Row)):
        yield thing
    elif isinstance(thing, dict):
        yield from (part for pair in thing.items() for each in pair for part in parts(each))
    elif hasattr(thing, "__iter__") and not isinstance(thing, str):
        yield from (part for each in thing for part in parts(each))
    elif hasattr(thing, "__dict__"):
        yield from parts(vars(thing))


def ask(function: ReadGuesses, *calls: Call) -> None:
    """The calls of one sequence."""
    layer, memory, text, last = Layer(), dict[str, Any](state=State("")), "", ""
    told = []
    for num_held, known, guesses in calls:
        told.append(f"({num_held} accepted, known {known!r}, draft tokens {guesses!r})")
        compare(function, layer, memory, (num_held, known, guesses), text, last, "calls " + ", ".join(told[-3:]))
        text, last = text + last[:num_held] + known, guesses


def compare(
    function: ReadGuesses, layer: Layer, memory: dict[str, Any], call: Call, before: str, last: str, when: str
) -> None:
    """before: the text that the state has taken in; last: draft tokens of the last call."""
    num_held, known, guesses = call
    held, text = last[:num_held], before + last[:num_held] + known
    given = [Row(c) for c in known], [Row(c) for c in guesses]
    layer.num_calls = 0
    got: Any = function(layer.step, memory, num_held, *given)
    for rows in given:
        rows[:] = [Row("?") for _ in rows]  # the engine uses its lists for something else
    expected = [(text + guesses)[: n + 1] for n in range(len(before + held), len(text + guesses))]
    if not isinstance(got, list) or len(got) != len(expected):
        hint = f"return a list, an output for each row of this call, {len(known)} known and {len(guesses)} drafted; "
        hint += "accepted draft tokens got theirs from the last call"
        raise Wrong(f"{when}: {hint}", expected=expected, got=got)
    for row, (ours, theirs) in enumerate(zip(expected, got, strict=True)):
        expect(ours, theirs, f"{when}: row {row} has read {why(theirs, before, held, last)}")
    state = memory.get("state")
    if not isinstance(state, State) or state.text != text:
        found = getattr(state, "text", "")
        hint = "memory['state'] must be the state after the last known row"
        if found.startswith(text) and len(found) > len(text):
            hint = "a draft token of this call is in memory['state']: if it is rejected, nothing gets it out again"
        raise Wrong(f"{when}: {hint}", expected=State(text), got=state)
    check_memory(memory, guesses, when)
    expected_calls = f"{len(held + known + guesses)} calls of step: {len(held)} + {len(known)} + {len(guesses)}"
    if layer.num_calls != len(held + known + guesses):
        hint = "step is called once for each accepted draft token, each known row, and each draft token"
        raise Wrong(f"{when}: {hint}", expected=expected_calls, got=layer.num_calls)


def why(got: Any, before: str, held: str, last: str) -> str:
    """What has gone wrong, as far as it can be seen."""
    found = got if isinstance(got, str) else ""
    if "?" in found:
        return "a row that the engine has put into its list since then: what you keep must be a list of your own"
    if held and not found.startswith(before + held):
        return f"no {held!r}, which was accepted: these rows do not come again, and the state has to take them in"
    if len(held) < len(last) and found.startswith(before + last[: len(held) + 1]):
        return f"a rejected token: of {last!r}, {held!r} was accepted" if held else f"{last!r}, which was rejected"
    return "something other than the tokens before it"


def check_memory(memory: dict[str, Any], guesses: str, when: str) -> None:
    found = list({id(part): part for part in parts(memory)}.values())
    states, rows = ([part for part in found if isinstance(part, kind)] for kind in (State, Row))
    if len(states) > 1:
        hint = "memory holds other states besides memory['state']: a state takes as much room as 85 rows"
        raise Wrong(f"{when}: {hint}", expected="one state", got=states)
    if len(rows) > len(guesses):
        hint = "memory holds rows besides this call's draft tokens: what the state has taken in is never needed again"
        raise Wrong(f"{when}: {hint}", expected=list(guesses), got=rows)


def check_random(function: ReadGuesses, bench: Bench) -> None:
    """200 sequences of random steps"""
    rng = random.Random(16)
    for _ in range(200):
        calls: list[Call] = []
        num_draft_tokens = 0
        for _ in range(rng.randint(1, 9)):
            known = "".join(rng.choices("abcdefgh", k=rng.choice([1, 1, 1, 5])))
            guesses = "".join(rng.choices("ABCDEFGH", k=rng.choice([0, 1, 3, 6])))
            calls.append((rng.randint(0, num_draft_tokens), known, guesses))
            num_draft_tokens = len(guesses)
        ask(function, *calls)


def check_in_the_engine(function: ReadGuesses, bench: Bench) -> None:
    """A hybrid model drafts and checks with your function in its layers: the same tokens as without draft tokens"""
    _ = bench.model  # where there is none there is no torch either
    from chapters.ch16_fixed_memory.checks_engine import answer_with_drafts

    answer_with_drafts(function)


CHECKS = (
    *cases(
        ask,
        {
            "No draft tokens: the state goes on from call to call": [((0, "the", ""), (0, " ", ""), (0, "c", ""))],
            "Draft tokens are read, and not one of them stays": [
                ((0, "the", " ca"),),
                ((0, "the", " ca"), (0, "n", "")),
            ],
            "Accepted draft tokens, all or some, are in the state when the next rows are read": [
                ((0, "the", " ca"), (3, "t", "")),
                ((0, "the", " ca"), (1, "d", "og"), (2, "s", "")),
                ((0, "the", " ca"), (2, "o", "w"), (0, "k", "e"), (1, "r", "")),
            ],
            "A draft token counts for one call": [
                ((0, "a", "bcd"), (2, "x", ""), (0, "y", "")),
                ((0, "a", "bcd"), (0, "x", "y"), (1, "z", "")),
                ((0, "a", "bcd"), (3, "e", "fgh"), (3, "i", "jkl"), (3, "m", "")),
            ],
        },
    ),
    check_random,
    check_in_the_engine,
)
