"""python -m chapters student: the course without its solutions, or assignments to hand out."""

import argparse
from pathlib import Path

from rich.console import Console

PLATFORMS = ("colab", "otter", "nbgrader", "gradescope")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="the folder to write: new, empty, or nbgrader's")
    about = "write assignments for these chapters instead; each works alone"
    parser.add_argument("--assignment", type=int, nargs="+", metavar="N", help=about)
    about = "with --assignment: write notebooks or archives for this platform"
    parser.add_argument("--for", choices=PLATFORMS, dest="platform", help=about)


def run(args: argparse.Namespace, console: Console) -> int:
    from chapters.course import all_chapters, find_chapter
    from chapters.nano_engine.steps import ENGINE, STEPS
    from chapters.teaching.assignments import write_assignments
    from chapters.teaching.edition import check_exercises, check_skeleton, write_edition

    if args.platform and not args.assignment:
        raise ValueError(f"--for {args.platform} needs --assignment with the numbers of chapters")
    chapters = [find_chapter(number) for number in dict.fromkeys(args.assignment or ())]
    check_exercises(chapters or all_chapters())
    check_skeleton(ENGINE, STEPS)
    written = [args.out]
    if chapters:
        written = write_assignments(args.out, chapters, args.platform)
    else:
        write_edition(args.out)
    for path in written:
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    return 0
