"""Grading of the exercises of chapter 15: on small examples, then in engines that compute in float32."""

from contextlib import nullcontext

from chapters.ch15_which_weights import checks_adapters
from chapters.grading import Task

TASKS = [
    Task("add_adapters", "The rows of a step", nullcontext, checks_adapters.ADD_CHECKS),
    Task("slot_for", "Who may come in", nullcontext, checks_adapters.SLOT_CHECKS),
    Task("id_of_weights", "What goes into a block hash", nullcontext, checks_adapters.ID_CHECKS),
]
