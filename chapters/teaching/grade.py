"""python -m chapters grade: a class's submissions, side by side, into a table.

Each is graded as `python -m chapters check` does it, in a process and a folder of its own, with a copy of the course.
Rows are written when they are known: whatever ends this, they stay, and when it is run again they are not graded again.
"""

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from chapters.submission import LIMIT_S

DESCRIPTION = "Grade a class. FOLDER has a folder for each student with exercise.py or chNN/exercise.py, or files "
DESCRIPTION += "named STUDENT_chNN.py, or what Moodle or Canvas exports; or notebooks (chNN.ipynb) in place of these "
DESCRIPTION += (
    "files. Without Landlock, which is a part of Linux, submissions run with your rights: grade in a container."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from chapters.__main__ import seconds

    parser.description = DESCRIPTION
    parser.add_argument("folder", type=Path, help="the folder of the class")
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE", help="the table: a row for each submission")
    parser.add_argument("--similar", type=Path, metavar="FILE", help="also write a table of pairs that share most code")
    about = "grade these chapters (default: all); a single one also holds for files whose name has no chapter"
    parser.add_argument("--chapters", type=int, nargs="+", default=[], metavar="N", help=about)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes at a time (default: one for each core)")
    limit = f"wall time for one check (default: {LIMIT_S:g})"
    parser.add_argument("--limit", type=seconds, default=LIMIT_S, metavar="SECONDS", help=limit)
    parser.add_argument("--model", help="checkpoint directory or hub id (default: the demo model)")


def run(args: argparse.Namespace, console: Console) -> int:
    if sys.platform == "win32":
        raise ValueError("a class is graded on Linux or macOS (on Windows: WSL); here: check CHAPTER --file FOLDER")
    else:
        from chapters.__main__ import find_model
        from chapters.teaching.similar import MEANING
        from chapters.teaching.submissions import find_submissions
        from chapters.teaching.table import Grader, sort_rows, write_pairs

        submissions = find_submissions(args.folder, args.chapters)
        model, why_not = find_model(args.model)
        if model is None:
            console.print(f"Checks that need a model stay open: {why_not}", markup=False)
        grader = Grader(args.csv, submissions, model, args.limit)
        if grader.num_known:
            console.print(f"{grader.num_known} of {len(submissions)} are in {args.csv} already", markup=False)
        grader.run(args.jobs or os.cpu_count() or 1, console)
        rows = sort_rows(args.csv, submissions)
        num_passed = sum(row["passed"] == "yes" for row in rows)
        console.print(f"{args.csv}: {len(rows)} rows, {num_passed} passed", markup=False, soft_wrap=True)
        if args.similar:
            num_pairs = write_pairs(args.similar, submissions)
            console.print(f"{args.similar}: {num_pairs} pairs. {MEANING}", markup=False, soft_wrap=True)
        return 0
