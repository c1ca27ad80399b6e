"""Grading of the exercises of chapter 17: small examples, random ones, then a model with experts in the engine."""

from chapters.ch17_experts import checks_assign, checks_meet
from chapters.grading import Task

TASKS = [
    Task("assign_experts", "Who waits for a popular expert", checks_assign.use_assign_experts, checks_assign.CHECKS),
    Task("meet_experts", "One batch, many weights", checks_meet.use_meet_experts, checks_meet.CHECKS),
]
