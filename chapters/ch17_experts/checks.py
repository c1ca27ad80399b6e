"""Grading of the exercises of chapter 17: small examples, random ones, then a model with experts in the engine."""

from chapters.ch17_experts import checks_choose, checks_meet
from chapters.grading import Task

TASKS = [
    Task("choose_experts", "An expert for every token", checks_choose.use_choose_experts, checks_choose.CHECKS),
    Task("meet_experts", "One batch, many weights", checks_meet.use_meet_experts, checks_meet.CHECKS),
]
