"""Grading of the exercises of chapter 16: by hand, on the real scheduler, and in a small hybrid model.

Whatever needs no model needs no torch either: a browser grades it, too.
"""

from contextlib import nullcontext

from chapters.ch16_fixed_memory import checks_chunk, checks_guesses, checks_plan
from chapters.grading import Task

TASKS = [
    Task("delta_chunk", "Token by token", nullcontext, checks_chunk.CHECKS),
    Task("plan_snapshots", "Which snapshots to take", nullcontext, checks_plan.CHECKS),
    Task("read_guesses", "What draft tokens do to a state", nullcontext, checks_guesses.CHECKS),
]
