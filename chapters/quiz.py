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
        ask = _ask_number if "answer" in question else _ask_option
        right, comment = ask(question, number, console, read)
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


def _ask_option(question: dict, number: int, console: Console, read: Callable[[str], str]) -> tuple[bool, str]:
    options = shuffled(question, number)
    for letter, option in zip("abcdef", options, strict=False):
        console.print(Markdown(f"{letter}) {option['text']}"))
    letters = "abcdef"[: len(options)]
    right = letters[next(i for i, option in enumerate(options) if option.get("right"))]
    for _ in range(MOST_TRIES):
        answer = read(f"{letters[0]}-{letters[-1]}: ").strip().lower()
        if answer == right:
            return True, question["why"]
        if answer in list(letters):
            return False, f"{options[letters.index(answer)]['why']} The answer is {right}: {question['why']}"
        console.print(f"Type one of the letters {', '.join(letters)}.")
    return False, f"The answer is {right}: {question['why']}"


def _ask_number(question: dict, number: int, console: Console, read: Callable[[str], str]) -> tuple[bool, str]:
    for _ in range(MOST_TRIES):
        try:
            given = float(read(f"a number ({question['unit']}): ").replace(",", "").strip())
        except ValueError:
            console.print("Type a number.")
            continue
        if given == question["answer"]:
            return True, question["why"]
        hint = next((text for value, text in question.get("wrong", {}).items() if float(value) == given), "")
        return False, f"{hint} It is {question['answer']:,}: {question['why']}"
    return False, f"It is {question['answer']:,}: {question['why']}"
