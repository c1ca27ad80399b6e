"""Grading of the exercises of chapter 16: by hand, on the real scheduler, and in a small hybrid model.

Whatever needs no model needs no torch either: a browser grades it, too.
"""

from contextlib import nullcontext

from chapters.ch16_fixed_memory import checks_delta, checks_guesses, checks_snapshots
from chapters.grading import Task

TASKS = [
    Task("delta_step", "The delta rule", nullcontext, checks_delta.CHECKS),
    Task("choose_snapshots", "Which snapshots to take", nullcontext, checks_snapshots.CHECKS),
    Task("read_guesses", "What draft tokens do to a state", nullcontext, checks_guesses.CHECKS),
]
