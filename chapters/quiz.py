"""Quizzes: quiz.toml of a chapter, asked and scored.

A question has `ask`, `why` (said when the answer is right) and either

    options = [{ text = "...", right = true }, { text = "...", why = "the misunderstanding behind it" }]

or a number that the engine gives:

    answer = 12
    rounded = true        # only if it is: what rounds to it is right
    unit = "blocks"  # what may follow the number; left out where the number is an id, say
    wrong = { 8 = "the misunderstanding behind this number" }
    engine = '''Python that sets `answer`, run by a test'''

Options may have an `engine`, too: its `answer` is the index of the right one.
"""

import math
import random
import re
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from chapters.course import Chapter
from chapters.sealed import unseal
from chapters.words import ENGLISH, Words, languages_of

TRIES = 2  # to a question; then the solution is said
MOST_LINES = 5  # that are read for a question, with those that are no answer
GROUPS = {"de": ",."}  # by language: signs before groups of three digits; in others the comma
PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?")  # a number


def load(chapter: Chapter, language: str = "en") -> list[dict[str, Any]]:
    """In another language, where there is quiz.de.toml: its texts, with the answers of the English one."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # not there for everybody

    def read(name: str) -> list[dict[str, Any]]:
        path = chapter.folder / f"{name}.toml"
        sealed = path.with_suffix(".sealed")  # in a student's edition
        text = unseal(sealed.read_text("utf-8")) if sealed.exists() else path.read_text("utf-8")
        return tomllib.loads(text)["question"]

    questions = read("quiz")
    if language in languages_of(chapter)[1:]:
        return [_in_other_words(*both) for both in zip(questions, read(f"quiz.{language}"), strict=True)]
    return questions


def _in_other_words(question: dict[str, Any], texts: dict[str, Any]) -> dict[str, Any]:
    options = zip(question.get("options", []), texts.get("options", []), strict=True)
    merged = question | texts
    return merged | {"options": [option | text for option, text in options]} if "options" in merged else merged


def run(chapter: Chapter, console: Console, read: Callable[[str], str], words: Words = ENGLISH) -> tuple[int, int]:
    """Ask every question; `read` gets an answer. Returns (right answers, questions). EOFError ends it."""
    questions = load(chapter, words.language)
    groups = groups_of(words.language if words.language in languages_of(chapter) else "en")
    num_right = 0
    heading = words("quiz.heading", number=chapter.number, title=words.title(chapter))
    console.print(f"\n[bold]{heading}[/], {words('quiz.questions', count=len(questions))}\n")
    for number, question in enumerate(questions, start=1):
        console.print(Markdown(f"**{number}.** {question['ask']}"))
        right, comment = _ask(question, number, console, read, words, groups)
        num_right += right
        console.print(f"[green]{words('quiz.right')}[/]" if right else f"[red]{words('quiz.no')}[/]", end=" ")
        console.print(Markdown(comment))
        console.print()
    console.print(f"[bold]{words('quiz.score', right=num_right, count=len(questions))}[/]")
    return num_right, len(questions)


def shuffled(question: dict, number: int) -> list[dict]:
    """The options in the same order each time, and not the author's."""
    options = list(question["options"])
    random.Random(number).shuffle(options)
    return options


def verdicts(question: dict, number: int) -> dict[Any, tuple[bool, str]]:
    """For each letter of an option, or each number that is known: is it right, and what is said. None: all else.

    Of a right answer it is said why, of a wrong one which misunderstanding is behind it. solution() is said later.
    """
    if "answer" in question:
        wrong = {value: (False, hint) for value, hint in question["wrong"].items()}
        return {str(question["answer"]): (True, question["why"]), **wrong, None: (False, "")}
    options = zip("abcdef", shuffled(question, number), strict=False)
    right, no_answer = (True, question["why"]), (False, "")
    return {letter: right if o.get("right") else (False, o["why"]) for letter, o in options} | {None: no_answer}


def solution(question: dict, number: int, words: Words = ENGLISH) -> str:
    """What is said after the last try."""
    if "answer" in question:
        return words("quiz.it_is", answer=f"{question['answer']:,}", why=question["why"])
    right = next(letter for letter, (is_right, _) in verdicts(question, number).items() if is_right)
    return words("quiz.answer_is", letter=right, why=question["why"])


def within(question: dict) -> float:
    """How far from a known number a given one may be: half of the answer's last digit, if that is a rounded number."""
    num_decimals = len(str(question["answer"]).partition(".")[2])
    return (0.5 * 10**-num_decimals if question.get("rounded") else 0.0) + 1e-9


def _ask(
    question: dict, number: int, console: Console, read: Callable[[str], str], words: Words, groups: str
) -> tuple[bool, str]:
    """Is it right, at last, and what is to be said of it."""
    said, is_number = verdicts(question, number), "answer" in question
    letters, num_tries = list(said)[:-1], 0
    for letter, option in zip(letters, [] if is_number else shuffled(question, number), strict=False):
        console.print(Markdown(f"{letter}) {option['text']}"))
    comment = ""
    for num_left in reversed(range(MOST_LINES)):
        unit = f" ({question['unit']})" if "unit" in question else ""
        prompt = words("quiz.ask_number", unit=unit) if is_number else f"a-{letters[-1]}: "
        given = read(prompt).strip().lower()
        answer = known(question, given, groups) if is_number else given
        if answer not in letters and not (is_number and answer is None):
            letter = words("quiz.type_a_letter", letters=", ".join(map(str, letters)))
            console.print(words("quiz.type_a_number") if is_number else letter)
            if num_left == 1:
                console.print(words("quiz.last_line"))
            continue
        right, comment = said[answer]
        num_tries += 1
        if right or num_tries == TRIES:
            return right, comment if right else f"{comment} {solution(question, number, words)}".strip()
        console.print(f"[red]{words('quiz.no')}[/]", end=" ")
        console.print(Markdown(f"{comment} {words('quiz.again')}".strip()))
    return False, f"{comment} {solution(question, number, words)}".strip()


def known(question: dict, given: str, groups: str = ",") -> str | None:
    """The number of verdicts() that is meant; None for another number, "" for what is none."""
    number = number_in(given, groups)
    if not math.isfinite(number):
        return ""
    values = [value for value in verdicts(question, 0) if value is not None]
    return next((value for value in values if abs(number - float(value)) <= within(question)), None)


def groups_of(language: str) -> str:
    return GROUPS.get(language, ",")


def number_in(given: str, groups: str) -> float:
    """The number that was typed; NaN if it is none. numberIn() in site/assets/course.js reads the same.

    groups: signs that are left out between groups of exactly three digits, as in 49,152. Any other comma is a decimal
    point.
    """
    text = given.strip().lower()
    for sign in groups:
        point = "." if sign == "," else ","
        if re.fullmatch(rf"[+-]?[1-9][0-9]{{0,2}}([{sign}][0-9]{{3}})+([{point}][0-9]*)?", text):
            text = text.replace(sign, "")
    text = text.replace(",", ".")
    return float(text) if PLAIN.fullmatch(text) else math.nan
