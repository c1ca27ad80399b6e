"""The quizzes: what the engine says of each answer, and how they are asked."""

import io

import pytest

from chapters import quiz
from chapters.__main__ import main
from tests.course.course_text import CHAPTERS, for_each_chapter


@for_each_chapter
def test_quiz(chapter):
    questions = quiz.load(chapter)
    assert len(questions) >= 5
    assert sum("answer" in question for question in questions) >= 1
    for question in questions:
        assert question["ask"] and question["why"]
        if "answer" in question:
            namespace: dict = {}
            exec(question["engine"], namespace)
            assert namespace["answer"] == question["answer"], question["ask"]
            assert question["unit"] and question["wrong"]
            assert all(float(value) != question["answer"] for value in question["wrong"])
        else:
            right = [option for option in question["options"] if option.get("right")]
            assert len(right) == 1 and len(question["options"]) >= 3
            assert all(option["why"] for option in question["options"] if option not in right)


class Printed(list):
    """What a console gets, before it is laid out."""

    def print(self, what: object = "", end: str = "") -> None:
        self.append(getattr(what, "markup", what))


@for_each_chapter
@pytest.mark.parametrize("is_right", [True, False])
def test_quiz_is_asked(chapter, is_right):
    """All right with the right answers; with wrong ones, each gets its explanation."""
    console, questions, expected = Printed(), quiz.load(chapter), []
    todo = iter(questions)

    def read(prompt: str) -> str:
        question = next(todo)
        if "answer" in question:
            number, why = next(iter(question["wrong"].items()))
            expected.append(question["why"] if is_right else f"{why} It is {question['answer']:,}: {question['why']}")
            return f" {question['answer']:,}" if is_right else number
        option = next(option for option in question["options"] if option.get("right", False) == is_right)
        letter = next(line[0] for line in reversed(console) if line[1:] == f") {option['text']}")
        expected.append(question["why"] if is_right else option["why"])
        return letter.upper()

    assert quiz.run(chapter, console, read) == (len(questions) * is_right, len(questions))
    for text in expected:
        assert any(line.startswith(text) for line in console), text


def test_a_quiz_without_answers_ends():
    """Five tries a question; then it is said what is right."""
    console, questions = Printed(), quiz.load(CHAPTERS[0])
    tries = iter(["", "z", "\x00", "abc", "?"] * len(questions))
    assert quiz.run(CHAPTERS[0], console, lambda prompt: next(tries)) == (0, len(questions))
    said = [line for line in console if line.startswith(("The answer is", "It is"))]
    assert next(tries, None) is None and len(said) == len(questions)


def test_a_quiz_reads_a_line_without_end(monkeypatch, capsys):
    """As from /dev/zero: its pieces are answers, of which there may be five to a question."""
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 1_000_000))
    assert main(["quiz", "1"]) == 1 and "0 of" in capsys.readouterr().out
