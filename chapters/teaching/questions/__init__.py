"""The exam's questions: functions that draw numbers and let the engine say the answer."""

import importlib

from chapters.teaching.questions.bank import BANK, Entry

FILES = "ch01 ch02 ch03_04 ch05 ch06 ch07 ch07_why ch08 ch09_10 ch11_12 ch13 ch14 ch15 ch16 ch17".split()


def all_questions() -> dict[str, Entry]:
    """Every question by its name, in the order of the chapters."""
    for name in FILES:
        importlib.import_module(f"chapters.teaching.questions.{name}")
    return BANK
