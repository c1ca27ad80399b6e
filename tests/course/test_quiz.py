"""The quizzes: what the engine says of each answer, and how they are asked."""

import io

from rich.console import Console

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


@for_each_chapter
def test_quiz_is_asked(chapter, capsys):
    """All right with the right answers; with the wrong ones, each gets its explanation."""
    questions = quiz.load(chapter)

    def play(pick) -> tuple[int, str]:
        todo = iter(questions)
        console = Console(file=io.StringIO(), width=200)

        def read(prompt: str) -> str:
            question = next(todo)
            return pick(question, str(console.file.getvalue()))

        num_right, _ = quiz.run(chapter, console, read)
        return num_right, console.file.getvalue()

    def letter_of(text: str, shown: str) -> str:
        rendered = Console(file=io.StringIO(), width=200)
        rendered.print(quiz.Markdown(f"a) {text}"))
        line = rendered.file.getvalue().splitlines()[0][3:].rstrip()
        return next(row[0] for row in reversed(shown.splitlines()) if row[1:3] == ") " and row[3:].rstrip() == line)

    def right(question, shown):
        if "answer" in question:
            return str(question["answer"])
        return letter_of(next(o["text"] for o in question["options"] if o.get("right")), shown)

    def wrong(question, shown):
        if "answer" in question:
            return next(iter(question["wrong"]))
        return letter_of(next(o["text"] for o in question["options"] if not o.get("right")), shown)

    assert play(right)[0] == len(questions)
    num_right, shown = play(wrong)
    assert num_right == 0 and shown.count("The answer is") + shown.count("It is ") >= len(questions)


def test_a_quiz_without_answers_ends():
    """Five tries a question; then it is said what is right."""
    console, questions = Console(file=io.StringIO(), width=200), quiz.load(CHAPTERS[0])
    tries = iter(["", "z", "\x00", "abc", "?"] * len(questions))
    assert quiz.run(CHAPTERS[0], console, lambda prompt: next(tries)) == (0, len(questions))
    said = console.file.getvalue()
    assert next(tries, None) is None and said.count("The answer is") + said.count("It is ") >= len(questions)


def test_a_quiz_reads_a_line_without_end(monkeypatch, capsys):
    """As from /dev/zero: its pieces are answers, of which there may be five to a question."""
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 1_000_000))
    assert main(["quiz", "1"]) == 1 and "0 of" in capsys.readouterr().out
