"""Grading of `admit`: on small examples, then on a server in virtual time to which more comes than it can answer."""

from collections.abc import Callable
from functools import cache
from typing import Any

from chapters.ch14_many_users.fleet import Job
from chapters.ch14_many_users.overload import Gate, State, admit_all, at_most, in_time, serve
from chapters.ch14_many_users.workload import alone
from chapters.expect import Wrong
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


def check_queue(function: Admit, bench: Bench) -> None:
    """All seats are taken: how long will it take until one is free for the newcomer?"""
    full: dict[str, Any] = {"num_blocks_needed": 5, "requests_per_s": 2.0}
    ask(function, True, 10.0, "the queue moves by 2 a second: the newcomer waits 2 s of 10", num_waiting=3, **full)
    ask(function, False, 10.0, "the queue moves by 2 a second: the newcomer waits 15 s", num_waiting=29, **full)
    fast = full | {"requests_per_s": 50.0}
    ask(function, True, 10.0, "the queue moves by 50 a second: 30 of them wait 0.6 s", num_waiting=29, **fast)
    ask(function, False, 0.2, "nobody waits, but it takes 0.5 s until a seat is free", num_waiting=0, **full)


def check_blocks(function: Admit, bench: Bench) -> None:
    """A free seat is no use without blocks"""
    hint = "a seat is free, but not enough blocks: it waits as the others do"
    seat: dict[str, Any] = {"num_running": 2, "num_free_blocks": 10, "num_blocks_needed": 11}
    ask(function, False, 0.3, hint, requests_per_s=1.0, **seat)
    ask(function, True, 9.0, hint, requests_per_s=1.0, **seat)
    hint = "a seat is free, but somebody waits already, for blocks: the newcomer stands behind"
    ask(function, False, 0.3, hint, num_waiting=1, requests_per_s=1.0, **seat | {"num_blocks_needed": 1})


def check_unknown(function: Admit, bench: Bench) -> None:
    """Nothing has been measured yet"""
    hint = "requests_per_s=0: nobody has had to wait so far; as many may wait as there are seats"
    for num_waiting in (0, 3):
        ask(function, True, 1.0, hint, num_waiting=num_waiting, num_blocks_needed=2, requests_per_s=0.0)
    ask(function, False, 1.0, hint, num_waiting=4, num_blocks_needed=2, requests_per_s=0.0)


def bursts(num_bursts: int, every_s: float, size: int) -> list[Job]:
    jobs = alone(1000.0, 300, 60, num_bursts * size, seed=3)
    for number, job in enumerate(jobs):
        job.arrival_s = number // size * every_s + 0.001 * (number % size)
    return jobs


TRACES: dict[str, tuple[Callable[[], list[Job]], float]] = {  # what comes, and the deadline in seconds
    "twice what the server can do": (lambda: alone(26.6, 300, 60, 300), 1.0),
    "long prompts, half more than the server can do": (lambda: alone(8.5, 1500, 20, 200, seed=2), 2.0),
    "as much as the server can do": (lambda: alone(13.3, 300, 60, 300, seed=4), 1.0),
    "60 at once, every 6 s": (lambda: bursts(4, 6.0, 60), 4.0),
    "twice what the server can do, and little time": (lambda: alone(26.6, 300, 60, 300, seed=6), 0.3),
}


GATES: dict[str, Callable[[float], Gate]] = {
    "ours": lambda deadline_s: in_time(0.75 * deadline_s),
    "a server that lets everybody in": lambda deadline_s: admit_all,
    "a queue with 2 places": lambda deadline_s: at_most(2),
    "a queue with 8 places": lambda deadline_s: at_most(8),
}


def num_in_time(name: str, gate: Gate) -> int:
    make, deadline_s = TRACES[name]
    jobs = make()
    serve(jobs, gate)
    return sum(job.keeps(deadline_s) for job in jobs)


@cache
def num_in_time_with(gate: str, name: str) -> int:
    return num_in_time(name, GATES[gate](TRACES[name][1]))


def compare_traces(function: Admit, names: list[str], other: str) -> None:
    for name in names:
        deadline_s = TRACES[name][1]
        got = num_in_time(name, lambda state: function(state, deadline_s))  # noqa: B023
        ours, theirs = num_in_time_with("ours", name), num_in_time_with(other, name)
        where = f"{name}, deadline {deadline_s:g} s"
        if got < 0.8 * ours:
            hint = "answered in time; who comes a little late is worth nothing, and an empty seat isn't either"
            raise Wrong(f"{where}: {hint}", expected=f"about {ours} requests, as with ours", got=got)
        if got <= theirs:
            raise Wrong(f"{where}: answered in time, beside {other}", expected=f"more than {theirs}", got=got)


def check_overload(function: Admit, bench: Bench) -> None:
    """More comes than can be answered: most seats serve somebody whose answer is in time"""
    compare_traces(function, list(TRACES)[:2], "a server that lets everybody in")


def check_no_overload(function: Admit, bench: Bench) -> None:
    """Where the queue will be served in time, hardly anybody is sent away"""
    compare_traces(function, list(TRACES)[2:4], "a queue with 2 places")


def check_little_time(function: Admit, bench: Bench) -> None:
    """A short deadline: the queue must be shorter, too"""
    compare_traces(function, list(TRACES)[4:], "a queue with 8 places")
