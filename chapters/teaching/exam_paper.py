"""An exam on paper: which questions it asks, and the paper as Markdown and as HTML to print."""

import html
from collections.abc import Iterator
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
code, pre { font: 9.5pt/1.4 ui-monospace, Consolas, monospace; }
pre { border: 1px solid #999; padding: 0.6em; overflow-x: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
td, th { border: 1px solid #999; padding: 0.15em 0.6em; text-align: left; }
.name { margin-top: 1.4em; }
.name span { display: inline-block; width: 60mm; border-bottom: 1px solid #000; }
hr { height: 8.7mm; margin: 0; border: 0; border-bottom: 0.3mm solid #bbb; }
section, pre, table { break-inside: avoid; }
section > p { margin: 0.5em 0; }
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


def questions(paper: Paper, with_solutions: bool) -> Iterator[str]:
    """Each as Markdown, with its answer and what earns points, or with lines to write on."""
    for number, (entry, question) in enumerate(paper.asked, 1):
        parts = [f"## Question {number}, {question.points} points", question.text]
        if with_solutions:
            separator = "\n\n" if question.answer.startswith("|") else " "  # a table begins its own paragraph
            marks = [f"- {points} {'point' if points == 1 else 'points'}: {why}" for points, why in question.marks]
            marks.append(f"- (chapter {entry.chapter}, `{entry.name}`)")
            parts += [f"**Answer:**{separator}{question.answer}", "\n".join(marks)]
        else:
            parts += ["___"] * (question.points + 1)
        yield "\n\n".join(parts)


def as_markdown(paper: Paper, with_solutions: bool) -> str:
    head = [f"# {title(with_solutions)}", summary(paper, with_solutions), *([] if with_solutions else ["Name:"])]
    return "\n\n".join([*head, *questions(paper, with_solutions)]) + "\n"


def as_html(paper: Paper, with_solutions: bool) -> str:
    """A page of its own: nothing else is needed to show it or to print it."""
    asked = (MARKDOWN.render(question) for question in questions(paper, with_solutions))
    body = "".join(f"<section>\n{question}</section>\n" for question in asked)
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
