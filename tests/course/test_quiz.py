"""The quizzes: what the engine says of each answer, and how they are asked."""

import io
import math

import pytest

from chapters import quiz
from chapters.__main__ import main
from chapters.words import ENGLISH, languages_of
from tests.course.course_text import CHAPTERS, for_each_chapter


def answer_of_the_engine(question):
    namespace: dict = {}
    exec(question["engine"], namespace)
    return namespace["answer"]


@for_each_chapter
def test_quiz(chapter):
    questions = quiz.load(chapter)
    assert len(questions) >= 5
    assert sum("answer" in question for question in questions) >= 1
    for question in questions:
        assert question["ask"] and question["why"]
        if "answer" in question:
            assert answer_of_the_engine(question) == question["answer"], question["ask"]
            assert question["wrong"]
            assert all(isinstance(hint, str) for hint in question["wrong"].values()), "0.5 as a key needs quotes"
            assert quiz.known(question, str(question["answer"])) == str(question["answer"])
            assert all(quiz.known(question, value) == value for value in question["wrong"])
        else:
            right = [option for option in question["options"] if option.get("right")]
            assert len(right) == 1 and len(question["options"]) >= 3
            if "engine" in question:
                assert question["options"][answer_of_the_engine(question)] in right, question["ask"]
            assert all(option["why"] for option in question["options"] if option not in right)


IN_LANGUAGES = [(chapter, language) for chapter in CHAPTERS for language in languages_of(chapter)]


def shares(chapter, language: str, choose) -> tuple[float, float]:
    """In a chapter's quiz, how many right answers whoever draws lots expects, and whoever takes an option of this
    length (max or min), by lot among several."""
    by_lot = by_length = 0.0
    for question in quiz.load(chapter, language):
        if options := question.get("options"):
            lengths = [len(option["text"]) for option in options]
            [right] = (len(option["text"]) for option in options if option.get("right"))
            by_lot += 1 / len(options)
            by_length += (right == choose(lengths)) / lengths.count(choose(lengths))
    return by_lot, by_length


@pytest.mark.parametrize("choose", [max, min])
@pytest.mark.parametrize(("chapter", "language"), IN_LANGUAGES, ids=lambda each: getattr(each, "number", each))
def test_the_length_of_an_option_does_not_give_it_away(chapter, language, choose):
    """The right option of a chapter's questions is the longest no more often than by chance, nor is it the shortest."""
    by_lot, by_length = shares(chapter, language, choose)
    assert by_length <= by_lot + 1e-9


@pytest.mark.parametrize("choose", [max, min])
def test_nor_is_the_longest_option_always_wrong(choose):
    totals = (sum(column) for column in zip(*(shares(chapter, "en", choose) for chapter in CHAPTERS), strict=True))
    by_lot, by_length = totals
    assert by_length == pytest.approx(by_lot, rel=0.2)


@pytest.mark.parametrize(("chapter", "language"), IN_LANGUAGES, ids=lambda each: getattr(each, "number", each))
def test_what_a_number_is_of(chapter, language):
    """The terminal asks for "a number (tokens)". A unit may follow a number; of an id, nothing does."""
    for question in quiz.load(chapter, language):
        if "unit" in question:
            words = question["unit"].lower().split()
            assert words and not set(words) & {"the", "its", "id", "number", "numbers", "seine", "nummer"}
            assert not set("()") & set(question["unit"]), question["unit"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *(("2.95", "2.95"), ("2.952", "2.95"), ("2.9549", "2.95"), ("2.96", None), ("3", None)),
        *(("3.4", "3.4"), ("3.402", "3.4"), ("3.44", None), ("4.2", None), ("x", "")),
    ],
)
def test_what_rounds_to_the_answer_is_right(given, meant):
    """And only what rounds to a wrong number, to as many digits, gets that one's hint."""
    question = {
        "answer": 2.95,
        "why": "1 + 0.8 + 0.64 + 0.512",
        "rounded": True,
        "wrong": {"3.4": "not three times 0.8", "4": "not all four"},
    }
    assert quiz.known(question, given) == meant


def test_a_count_is_exact():
    question = {"answer": 12, "why": "three times four", "wrong": {"13": "one too many"}}
    assert [quiz.known(question, given) for given in ("12", "12.0", "12.3", "13")] == ["12", "12", None, "13"]


NUMBERS = {  # what is typed -> the number where commas group digits, and where dots do, too
    "49,152": (49152, 49152),
    "49.152": (49.152, 49152),
    "1,234,567.5": (1234567.5, 1234567.5),
    "1.234,5": (None, 1234.5),
    "1,4": (1.4, 1.4),
    "0,025": (0.025, 0.025),
    "1234,567": (1234.567, 1234.567),
    "-12,5 ": (-12.5, -12.5),
    "2.95": (2.95, 2.95),
    "1e3": (1000, 1000),
    **dict.fromkeys(("nan", "inf", "-Infinity", "1e999", "", ",", "1 000", "0x10", "1_000", "1,23,4"), (None, None)),
}


@pytest.mark.parametrize("given", NUMBERS)
def test_a_number_as_people_write_it(given):
    """test_site.py asks the page for the same."""
    found = [quiz.number_in(given, quiz.groups_of(language)) for language in ("en", "de")]
    assert [number if math.isfinite(number) else None for number in found] == [*NUMBERS[given]]


class Printed(list):
    """What a console gets, before it is laid out."""

    def print(self, what: object = "", end: str = "") -> None:
        self.append(getattr(what, "markup", what))


@for_each_chapter
@pytest.mark.parametrize("is_right", [True, False])
def test_quiz_is_asked(chapter, is_right):
    """All right with the right answers; with wrong ones, each gets its explanation, and the last the solution."""
    console, questions, expected = Printed(), quiz.load(chapter), []
    todo = (question for question in questions for _ in range(1 if is_right else quiz.TRIES))

    def read(prompt: str) -> str:
        question = next(todo)
        if "answer" in question:
            number, why = next(iter(question["wrong"].items()))
            said = f"{why} {ENGLISH('quiz.again')}", f"{why} It is {question['answer']:,}: {question['why']}"
            expected.extend([question["why"]] if is_right else said)
            return f" {question['answer']:,}" if is_right else number
        option = next(option for option in question["options"] if option.get("right", False) == is_right)
        letter = next(line[0] for line in reversed(console) if line[1:] == f") {option['text']}")
        expected.append(question["why"] if is_right else option["why"])
        return letter.upper()

    assert quiz.run(chapter, console, read) == (len(questions) * is_right, len(questions))
    for text in expected:
        assert any(line.startswith(text) for line in console), text


def test_the_second_try_counts():
    console, first = Printed(), quiz.load(CHAPTERS[0])[0]
    given = iter([next(iter(first["wrong"])), str(first["answer"])])

    def read(prompt: str) -> str:
        if (text := next(given, None)) is None:
            raise EOFError
        return text

    with pytest.raises(EOFError):
        quiz.run(CHAPTERS[0], console, read)
    assert console.index("[red]No.[/]") < console.index("[green]Right.[/]")
    assert not any(line.startswith("It is") for line in console)


def test_a_quiz_without_answers_ends():
    """Five lines a question; then it is said what is right. Before the last line, it is said that it is the last."""
    console, questions = Printed(), quiz.load(CHAPTERS[0])
    tries = iter(["", "z", "\x00", "abc", "?"] * len(questions))
    assert quiz.run(CHAPTERS[0], console, lambda prompt: next(tries)) == (0, len(questions))
    said = [line for line in console if line.startswith(("The answer is", "It is"))]
    assert next(tries, None) is None and len(said) == len(questions)
    assert console.count(ENGLISH("quiz.last_line")) == len(questions)


def test_a_quiz_reads_a_line_without_end(monkeypatch, capsys):
    """As from /dev/zero: its pieces are answers, of which there may be five to a question."""
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 1_000_000))
    assert main(["quiz", "1"]) == 1 and "0 of" in capsys.readouterr().out
