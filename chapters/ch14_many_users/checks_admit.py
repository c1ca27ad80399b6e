"""Grading of `admit`: on small examples, then on a server in virtual time that gets more than it can answer."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from chapters.ch14_many_users.fleet import Job
from chapters.ch14_many_users.overload import Gate, State, admit_all, at_most, in_time, serve
from chapters.ch14_many_users.workload import alone
from chapters.expect import Wrong, cases
from chapters.grading import Bench

Admit = Callable[[State, float], bool]


def ask(function: Admit, expected: bool, deadline_s: float, hint: str, **changed: Any) -> None:
    state = State(**{"num_waiting": 0, "num_running": 4, "max_num_seqs": 4, "num_free_blocks": 50} | changed)
    got: Any = function(state, deadline_s)
    if got is not expected:
        raise Wrong(f"{hint}; {state}, deadline {deadline_s:g} s", expected=expected, got=got)


def check_idle(function: Admit, bench: Bench) -> None:
    """An engine with room takes everybody"""
    for rate in (0.0, 0.1, 50.0):
        ask(function, True, 0.1, "nobody is there", num_running=0, num_blocks_needed=5, requests_per_s=rate)
        hint = "a seat and blocks are free and nobody waits: the request begins at once, whatever was measured"
        ask(function, True, 0.1, hint, num_running=3, num_blocks_needed=50, requests_per_s=rate)


def ask_full(function: Admit, expected: bool, deadline_s: float, num_waiting: int, rate: float, hint: str) -> None:
    ask(function, expected, deadline_s, hint, num_waiting=num_waiting, num_blocks_needed=5, requests_per_s=rate)


def check_blocks(function: Admit, bench: Bench) -> None:
    """A free seat is no use without blocks"""
    hint = "a seat is free, but not enough blocks: it waits as the others do"
    seat: dict[str, Any] = {"num_running": 2, "num_free_blocks": 10, "requests_per_s": 1.0}
    ask(function, False, 0.3, hint, num_blocks_needed=11, **seat)
    ask(function, True, 9.0, hint, num_blocks_needed=11, **seat)
    hint = "a seat is free, but somebody is waiting already, for blocks: the newcomer stands behind them"
    ask(function, False, 0.3, hint, num_waiting=1, num_blocks_needed=1, **seat)


def bursts(num_bursts: int, every_s: float, size: int) -> list[Job]:
    jobs = alone(1000.0, 300, 60, num_bursts * size, seed=3)
    for number, job in enumerate(jobs):
        job.arrival_s = number // size * every_s + 0.01 * (number % size)
    return jobs


TRACES: dict[str, tuple[Callable[[], list[Job]], float]] = {  # what comes, and the deadline in seconds
    "twice what the server can do": (lambda: alone(26.6, 300, 60, 180), 1.0),
    "long prompts, half more than the server can do": (lambda: alone(8.5, 1500, 20, 120, seed=2), 2.0),
    "as much as the server can do": (lambda: alone(13.3, 300, 60, 180, seed=4), 1.0),
    "60 within 0.6 s, every 6 s": (lambda: bursts(3, 6.0, 60), 4.0),
    "twice what the server can do, and little time": (lambda: alone(26.6, 300, 60, 180, seed=6), 0.3),
}


GATES: dict[str, Callable[[float], Gate]] = {
    "ours": lambda deadline_s: in_time(0.75 * deadline_s),
    "a server that lets everybody in": lambda deadline_s: admit_all,
    "a queue with 2 places": lambda deadline_s: at_most(2),
    "a queue with 8 places": lambda deadline_s: at_most(8),
}


class Outcome(NamedTuple):
    """Requests, counted."""

    in_time: int
    late: int
    sent_away: int


def outcome(name: str, gate: Gate) -> Outcome:
    make, deadline_s = TRACES[name]
    jobs = make()
    serve(jobs, gate)
    in_time, sent_away = sum(job.keeps(deadline_s) for job in jobs), sum(job.refused for job in jobs)
    return Outcome(in_time, len(jobs) - in_time - sent_away, sent_away)


@cache
def outcome_with(gate: str, name: str) -> Outcome:
    return outcome(name, GATES[gate](TRACES[name][1]))


def compare_trace(function: Admit, name: str, other: str) -> None:
    deadline_s = TRACES[name][1]
    got = outcome(name, lambda state: function(state, deadline_s))
    ours, theirs = outcome_with("ours", name), outcome_with(other, name).in_time
    hint = "a little late is worth nothing, and holds a seat: the prompt is computed after the wait, so aim lower"
    if got.sent_away > ours.sent_away:
        hint = "some were sent away that would have been in time, and seats stayed empty: let in more"
    if got.in_time < 0.8 * ours.in_time or got.in_time <= theirs:
        expected = f"about {ours.in_time} requests answered in time, as with ours; {other} has {theirs}"
        found = f"{got.in_time}; {got.late} were late, {got.sent_away} sent away"
        raise Wrong(f"{name}, deadline {deadline_s:g} s: {hint}", expected=expected, got=found)


UNKNOWN = "requests_per_s=0: nobody has had to wait so far; as many may wait as there are seats"
OVERLOAD, EDGE, SHORT = list(TRACES)[:2], list(TRACES)[2:4], list(TRACES)[4:]
CHECKS = (
    check_idle,
    *cases(
        ask_full,
        {
            "All seats are taken: how long will it take until one is free for the newcomer?": [
                (True, 10.0, 3, 2.0, "the queue moves by 2 a second: the newcomer waits 2 s of 10"),
                (False, 10.0, 29, 2.0, "the queue moves by 2 a second: the newcomer waits 15 s"),
                (True, 10.0, 29, 50.0, "the queue moves by 50 a second: 30 of them wait 0.6 s"),
                (False, 0.2, 0, 2.0, "nobody waits, but it takes 0.5 s until a seat is free"),
            ]
        },
    ),
    check_blocks,
    *cases(ask_full, {"Nothing has been measured yet": [(num < 4, 1.0, num, 0.0, UNKNOWN) for num in (0, 3, 4)]}),
    *cases(
        compare_trace,
        {
            "More comes than can be answered: most seats serve somebody whose answer is in time": [
                (name, "a server that lets everybody in") for name in OVERLOAD
            ],
            "Where the queue will be served in time, hardly anybody is sent away": [
                (name, "a queue with 2 places") for name in EDGE
            ],
            "A short deadline: the queue must be shorter, too": [(name, "a queue with 8 places") for name in SHORT],
        },
    ),
)
