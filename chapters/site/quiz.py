"""A chapter's quiz on its page: the questions of quiz.toml in the terminal's order and words, asked by course.js."""

import base64
import hashlib
import html
import json
from typing import Any

from chapters import quiz
from chapters.course import Chapter
from chapters.site.markdown import MARKDOWN, inline_html
from chapters.words import ENGLISH, Words


def quiz_section(chapter: Chapter, words: Words = ENGLISH) -> str:
    questions = quiz.load(chapter, words.language)
    items = (
        question_html(question, number, len(questions), words) for number, question in enumerate(questions, start=1)
    )
    command = f"python -m chapters quiz {chapter.number}"
    return f"""<section class="quiz" aria-label="{words("quiz.title")}">
<noscript><p class="note">{words("quiz.needs_script")} <code>{command}</code></p></noscript>
<div class="questions" hidden>{"".join(items)}
<div class="score" tabindex="-1" hidden><p></p>
<button type="button" class="again">{words("quiz.begin_again")}</button></div></div>
</section>
"""


def question_html(question: dict[str, Any], number: int, num_questions: int, words: Words) -> str:
    ask = _number(question, words) if "answer" in question else _options(question, number)
    answers = sealed(question, number, words)
    # What was answered is kept by this name: a question that has changed since is asked again.
    name = f"nanovllm-quiz-{hashlib.sha256(answers.encode()).hexdigest()[:16]}"
    return f"""<div class="question" data-name="{name}" data-tries="{quiz.TRIES}" data-sealed="{answers}" hidden>
<p class="count">{words("quiz.question", number=number, count=num_questions)}</p>
<div class="ask" tabindex="-1" id="question-{number}">{MARKDOWN.render(question["ask"])}</div>
{ask}
<div class="verdict" role="status"></div>
<button type="button" class="next" hidden>{words("quiz.next" if number < num_questions else "quiz.result")}</button>
</div>
"""


def sealed(question: dict[str, Any], number: int, words: Words) -> str:
    """The answers, not to be read by accident (chapters/sealed.py): JSON in base64, which every browser can open.

    said: for each answer its value (a letter, or a number and how far from it one may be; null: every other number),
    whether it is right, and the HTML of what is said. again: what follows a wrong answer while a try is left; solution:
    what follows the last.
    """
    is_number = "answer" in question
    said = [
        {
            "value": float(value) if is_number and value is not None else value,
            "within": quiz.within(question) if is_number and value is not None else 0,
            "right": right,
            "verdict": _verdict(right, text, words),
        }
        for value, (right, text) in quiz.verdicts(question, number).items()
    ]
    solution = f"<p>{inline_html(quiz.solution(question, number, words))}</p>"
    answers = {"said": said, "again": f"<p>{words('quiz.again')}</p>", "solution": solution}
    return base64.b64encode(json.dumps(answers).encode()).decode()


def _verdict(right: bool, text: str, words: Words) -> str:
    good, bad = words("quiz.right"), words("quiz.no")
    word = f'<strong class="good">{good}</strong>' if right else f'<strong class="bad">{bad}</strong>'
    return f"<p>{word} {inline_html(text)}</p>"


def _options(question: dict[str, Any], number: int) -> str:
    options = "".join(
        f'<button type="button" class="option" value="{letter}"><b>{letter}</b>'
        f"<span>{inline_html(option['text'])}</span></button>"
        for letter, option in zip("abcdef", quiz.shuffled(question, number), strict=False)
    )
    return f'<div class="options" role="group" aria-labelledby="question-{number}">{options}</div>'


def _number(question: dict[str, Any], words: Words) -> str:
    return f"""<form class="number" data-groups="{quiz.groups_of(words.language)}">
<label>{words("quiz.your_answer")} <input name="number" inputmode="text" autocomplete="off">
{html.escape(question.get("unit", ""))}</label>
<button>{words("quiz.answer")}</button>
</form>"""
