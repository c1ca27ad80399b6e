"""Grading of the exercises of chapter 14: on small examples, then on the real scheduler in virtual time.

No clock of this machine is asked: a step takes what fleet.Cost says, so the same code always gets the same result.
"""

from contextlib import nullcontext

from chapters.ch14_many_users import checks_abort, checks_admit, checks_provision, checks_route
from chapters.grading import Task
from chapters.patching import replaced
from nanovllm.core.scheduler import Scheduler

TASKS = [
    Task(
        "abort",
        "A client that leaves must leave nothing behind",
        lambda function: replaced(Scheduler, "abort", function),
        checks_abort.CHECKS,
    ),
    Task("admit", "Too many: whom to send away", nullcontext, checks_admit.CHECKS),
    Task("route", "A hundred machines", nullcontext, checks_route.CHECKS),
    Task("provision", "Ten thousand users", nullcontext, checks_provision.CHECKS),
]
