"""Quizzes: quiz.toml of a chapter, asked and scored.

A question has `ask`, `why` (said when the answer is right) and either

    options = [{ text = "...", right = true }, { text = "...", why = "the misunderstanding behind it" }]

or a number that the engine gives:

    answer = 12
    unit = "blocks"
    wrong = { 8 = "the misunderstanding behind this number" }
    engine = '''Python that sets `answer`, run by a test'''
"""

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from chapters.course import Chapter

MOST_TRIES = 5  # then what is typed is no answer, and counts as a wrong one


def load(chapter: Chapter) -> list[dict[str, Any]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # not there for everybody

    return tomllib.loads((chapter.folder / "quiz.toml").read_text("utf-8"))["question"]


def run(chapter: Chapter, console: Console, read: Callable[[str], str]) -> tuple[int, int]:
    """Ask every question; `read` gets an answer. Returns (right answers, questions). EOFError ends it."""
    questions = load(chapter)
    num_right = 0
    console.print(f"\n[bold]Chapter {chapter.number}: {chapter.title}[/], {len(questions)} questions\n")
    for number, question in enumerate(questions, start=1):
        console.print(Markdown(f"**{number}.** {question['ask']}"))
        right, comment = _ask(question, number, console, read)
        num_right += right
        console.print("[green]Right.[/]" if right else "[red]No.[/]", end=" ")
        console.print(Markdown(comment))
        console.print()
    console.print(f"[bold]{num_right} of {len(questions)}[/]")
    return num_right, len(questions)


def shuffled(question: dict, number: int) -> list[dict]:
    """The options in the same order each time, and not the author's."""
    options = list(question["options"])
    random.Random(number).shuffle(options)
    return options


def verdicts(question: dict, number: int) -> dict[Any, tuple[bool, str]]:
    """For each letter of an option, or each number that is known: is it right, and what is said. None: all else."""
    why = question["why"]
    if "answer" in question:
        is_it = f"It is {question['answer']:,}: {why}"
        wrong = {float(value): (False, f"{hint} {is_it}") for value, hint in question["wrong"].items()}
        return {float(question["answer"]): (True, why), **wrong, None: (False, is_it)}
    options = dict(zip("abcdef", shuffled(question, number), strict=False))
    is_it = f"The answer is {next(letter for letter in options if options[letter].get('right'))}: {why}"
    said = {
        x: (True, why) if option.get("right") else (False, f"{option['why']} {is_it}") for x, option in options.items()
    }
    return {**said, None: (False, is_it)}


def _ask(question: dict, number: int, console: Console, read: Callable[[str], str]) -> tuple[bool, str]:
    said, is_number = verdicts(question, number), "answer" in question
    letters = list(said)[:-1]
    for letter, option in zip(letters, [] if is_number else shuffled(question, number), strict=False):
        console.print(Markdown(f"{letter}) {option['text']}"))
    for _ in range(MOST_TRIES):
        given = read(f"a number ({question['unit']}): " if is_number else f"a-{letters[-1]}: ").strip().lower()
        with suppress(ValueError):
            if is_number:
                return said.get(float(given.replace(",", "")), said[None])
            if given in letters:
                return said[given]
        console.print("Type a number." if is_number else f"Type one of the letters {', '.join(letters)}.")
    return said[None]
