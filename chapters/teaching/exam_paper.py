"""An exam on paper: which questions it asks, and the paper as Markdown and as HTML to print."""

import html
from dataclasses import dataclass

from chapters.site.markdown import MARKDOWN
from chapters.teaching.questions import all_questions
from chapters.teaching.questions.bank import Draw, Entry, Question

MINUTES_A_POINT = 2
STYLE = """
@page { size: A4; margin: 18mm; }
body { font: 11pt/1.45 Georgia, serif; color: #000; background: #fff; }
body { margin: 1em auto; padding: 0 1em; max-width: 174mm; }
h1 { font-size: 17pt; margin: 0; }
h2 { font-size: 12pt; margin: 1.6em 0 0.3em; border-top: 1px solid #000; padding-top: 0.5em; }
h2 small { float: right; font-weight: normal; }
code, pre { font: 9.5pt/1.4 ui-monospace, Consolas, monospace; }
pre { border: 1px solid #999; padding: 0.6em; overflow-x: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
td, th { border: 1px solid #999; padding: 0.15em 0.6em; text-align: left; }
.name { margin-top: 1.4em; }
.name span { display: inline-block; width: 60mm; border-bottom: 1px solid #000; }
.space { margin-top: 0.8em; background: repeating-linear-gradient(#fff 0 8.7mm, #bbb 8.7mm 9mm); }
.space { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.question, pre, table { break-inside: avoid; }
.question > p { margin: 0.5em 0; }
.marks { font-size: 10pt; }
@media print { body { padding: 0; margin: 0; } }
"""


@dataclass(frozen=True)
class Paper:
    seed: str
    asked: list[tuple[Entry, Question]]

    @property
    def points(self) -> int:
        return sum(question.points for _, question in self.asked)

    @property
    def minutes(self) -> int:
        return MINUTES_A_POINT * self.points


def draw_paper(seed: str, chapters: list[int], num_questions: int) -> Paper:
    """One question of each chapter in turn, in an order drawn by the seed. ValueError for more than there are."""
    bank = [entry for entry in all_questions().values() if entry.chapter in chapters]
    if not 0 < num_questions <= len(bank):
        of = ", ".join(map(str, chapters))
        raise ValueError(
            f"--questions must be from 1 to {len(bank)}, found {num_questions}: so many are on chapters {of}"
        )
    draw = Draw(f"{seed}/paper")
    piles = [draw.some(pile, len(pile)) for n in chapters if (pile := [entry for entry in bank if entry.chapter == n])]
    piles, chosen = draw.some(piles, len(piles)), list[Entry]()
    while len(chosen) < num_questions:
        chosen += [pile.pop() for pile in piles if pile][: num_questions - len(chosen)]
    return Paper(seed, [(entry, entry.drawn(seed)) for entry in draw.some(chosen, len(chosen))])


def title(with_solutions: bool) -> str:
    return "Exam: solutions and marking" if with_solutions else "Exam"


def summary(paper: Paper, with_solutions: bool) -> str:
    """Only the solutions name the seed: with it, anybody can write them."""
    seed = f" Seed {paper.seed}." if with_solutions else ""
    return f"{len(paper.asked)} questions, {paper.points} points, {paper.minutes} minutes.{seed}"


def heading(number: int, question: Question) -> tuple[str, str]:
    return f"Question {number}", f"{question.points} points"


def as_markdown(paper: Paper, with_solutions: bool) -> str:
    lines = [f"# {title(with_solutions)}", summary(paper, with_solutions)]
    lines += [] if with_solutions else ["Name:"]
    for number, (entry, question) in enumerate(paper.asked, 1):
        lines += [f"## {', '.join(heading(number, question))}", question.text]
        if with_solutions:
            lines += [answer_of(question), marks_of(entry, question)]
        else:
            lines += ["___"] * (question.points + 1)  # a rule to write on
    return "\n\n".join(lines) + "\n"


def answer_of(question: Question) -> str:
    separator = "\n\n" if question.answer.startswith("|") else " "  # a table begins its own paragraph
    return f"**Answer:**{separator}{question.answer}"


def marks_of(entry: Entry, question: Question) -> str:
    marks = [f"- {points} {'point' if points == 1 else 'points'}: {reason}" for points, reason in question.marks]
    return "\n".join([*marks, f"- (chapter {entry.chapter}, `{entry.name}`)"])


def as_html(paper: Paper, with_solutions: bool) -> str:
    """A page of its own: nothing else is needed to show it or to print it."""
    body = ""
    for number, (entry, question) in enumerate(paper.asked, 1):
        name, points = heading(number, question)
        body += f'<section class="question"><h2>{name} <small>{points}</small></h2>\n{MARKDOWN.render(question.text)}'
        if with_solutions:
            marks = MARKDOWN.render(marks_of(entry, question))
            body += f'{MARKDOWN.render(answer_of(question))}<div class="marks">{marks}</div>'
        else:
            body += f'<div class="space" style="height: {9 * (question.points + 1)}mm"></div>'
        body += "</section>\n"
    name = "" if with_solutions else '<p class="name">Name: <span></span> Date: <span></span></p>'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title(with_solutions)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title(with_solutions)}</h1>
<p>{html.escape(summary(paper, with_solutions))}</p>
{name}
{body}</body>
</html>
"""
