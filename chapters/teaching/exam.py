"""python -m chapters exam: an exam whose numbers, questions and order depend on its seed, and its solutions."""

import argparse
from pathlib import Path

from rich.console import Console

from chapters.course import TITLES, find_chapter

NUM_QUESTIONS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed", default="1", metavar="TEXT", help="any text; each text gives a different exam (default: 1)"
    )
    parser.add_argument("--chapters", type=int, nargs="+", metavar="N", help="ask only about these (default: all)")
    number = f"how many questions (default: {NUM_QUESTIONS})"
    parser.add_argument("--questions", type=int, default=NUM_QUESTIONS, metavar="K", help=number)
    parser.add_argument("--out", type=Path, default=Path("build/exam"), help="the folder (default: build/exam)")
    parser.add_argument("--solutions", action="store_true", help="also write the solutions and the marking scheme")


def run(args: argparse.Namespace, console: Console) -> int:
    from chapters.teaching import exam_paper

    chapters = sorted({find_chapter(number).number for number in args.chapters or TITLES})
    paper = exam_paper.draw_paper(args.seed, chapters, args.questions)
    args.out.mkdir(parents=True, exist_ok=True)
    old = next(args.out.glob("solutions.*"), None)
    if old and not args.solutions:  # it may be the only place where the seed is written
        raise ValueError(f"{old} is there: add --solutions, or name another folder with --out")
    for name, with_solutions in (("exam", False), ("solutions", True))[: 1 + args.solutions]:
        for suffix, write in ((".md", exam_paper.as_markdown), (".html", exam_paper.as_html)):
            path = args.out / f"{name}{suffix}"
            path.write_text(write(paper, with_solutions), "utf-8")
            print(f"written: {path}")
    print(f"{len(paper.asked)} questions, {paper.points} points, about {paper.minutes} minutes")
    return 0
