"""A chapter's quiz on its page: the questions of quiz.toml in the terminal's order and words, asked by site.js."""

import html
from typing import Any

from chapters import quiz
from chapters.course import Chapter
from chapters.site.text import MARKDOWN, inline_html
from chapters.words import ENGLISH, Words


def quiz_section(chapter: Chapter, words: Words = ENGLISH) -> str:
    questions = quiz.load(chapter, words.language)
    items = (
        question_html(question, number, len(questions), words) for number, question in enumerate(questions, start=1)
    )
    command = f"python -m chapters quiz {chapter.number}"
    return f"""<section class="quiz" aria-labelledby="quiz">
<h2 id="quiz">{words("quiz.title")}</h2>
<noscript><p class="note">{words("quiz.needs_script")} <code>{command}</code></p></noscript>
<div class="questions" hidden>{"".join(items)}
<div class="score" tabindex="-1" hidden><p></p>
<button type="button" class="again">{words("quiz.begin_again")}</button></div></div>
</section>
"""


def question_html(question: dict[str, Any], number: int, num_questions: int, words: Words) -> str:
    ask = _number if "answer" in question else _options
    return f"""<div class="question" data-tries="{quiz.TRIES}" hidden>
<p class="count">{words("quiz.question", number=number, count=num_questions)}</p>
<div class="ask" tabindex="-1" id="question-{number}">{MARKDOWN.render(question["ask"])}</div>
{ask(question, number, words)}
<template class="once-more"><p>{words("quiz.again")}</p></template>
<template class="solution"><p>{inline_html(quiz.solution(question, number, words))}</p></template>
<div class="verdict" role="status"></div>
<button type="button" class="next" hidden>{words("quiz.next" if number < num_questions else "quiz.result")}</button>
</div>
"""


def verdict(right: bool, text: str, words: Words) -> str:
    good, bad = words("quiz.right"), words("quiz.no")
    word = f'<strong class="good">{good}</strong>' if right else f'<strong class="bad">{bad}</strong>'
    return f"<p>{word} {inline_html(text)}</p>"


def _options(question: dict[str, Any], number: int, words: Words) -> str:
    rows, said = [], quiz.verdicts(question, number)
    for letter, option in zip(said, quiz.shuffled(question, number), strict=False):
        right, text = said[letter]
        rows.append(
            f'<button type="button" class="option" value="{"right" if right else "wrong"}"><b>{letter}</b>'
            f"<span>{inline_html(option['text'])}</span></button><template>{verdict(right, text, words)}</template>"
        )
    return f'<div class="options" role="group" aria-labelledby="question-{number}">{"".join(rows)}</div>'


def _number(question: dict[str, Any], number: int, words: Words) -> str:
    templates = (
        f'<template value="{"else" if given is None else given}" '
        f'data-within="{0 if given is None else quiz.within(question, given)}" data-right="{int(said[0])}">'
        f"{verdict(*said, words)}</template>"
        for given, said in quiz.verdicts(question, number).items()
    )
    return f"""<form class="number">
<label>{words("quiz.your_answer")} <input name="number" inputmode="decimal" autocomplete="off">
{html.escape(question["unit"])}</label>
<button>{words("quiz.answer")}</button>
{"".join(templates)}
</form>"""
