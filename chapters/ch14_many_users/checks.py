"""Grading of the exercises of chapter 14: on small examples, then on the real scheduler in virtual time.

No clock of this machine is asked: a step takes what fleet.Cost says, so the same code always gets the same result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chapters.ch14_many_users.checks_abort import (
    check_crossed,
    check_engine,
    check_often,
    check_running,
    check_shared,
    check_waiting,
)
from chapters.ch14_many_users.checks_admit import (
    check_blocks,
    check_idle,
    check_little_time,
    check_no_overload,
    check_overload,
    check_queue,
    check_unknown,
)
from chapters.ch14_many_users.checks_route import (
    check_fleet,
    check_forgets,
    check_least,
    check_longest,
    check_overloaded,
    check_returns,
    check_stampede,
)
from chapters.grading import Task
from chapters.patching import replaced
from nanovllm.core.scheduler import Scheduler


@contextmanager
def use_nothing(function: Any) -> Iterator[None]:
    """The checks put the function in themselves."""
    yield


TASKS = [
    Task(
        "abort",
        "Who leaves must leave nothing behind",
        lambda function: replaced(Scheduler, "abort", function),
        (check_waiting, check_running, check_shared, check_crossed, check_often, check_engine),
    ),
    Task(
        "admit",
        "Too many: whom to send away",
        use_nothing,
        (check_idle, check_queue, check_blocks, check_unknown, check_overload, check_no_overload, check_little_time),
    ),
    Task(
        "route",
        "A hundred machines",
        use_nothing,
        (check_least, check_returns, check_overloaded, check_longest, check_forgets, check_stampede, check_fleet),
    ),
]
