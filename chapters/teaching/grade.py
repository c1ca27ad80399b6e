"""python -m chapters grade: a class's submissions, side by side, into a table, and into marks.

Each is checked as `python -m chapters check` does it, in a container or in a process with an empty environment, with a
copy of the course. Rows are written when they are known: whatever ends this, they stay, and when it is run again they
are not graded again, unless they may come to more: see table.is_worth_another_try().
"""

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from chapters.submission import LIMIT_S

BYTES_OF_A_JOB = 2 << 30  # Python, PyTorch, and the engine with the demo model take less than one and a half
DESCRIPTION = "Grade a class. FOLDER has a folder for each student with exercise.py or chNN/exercise.py, or files "
DESCRIPTION += "named STUDENT_chNN.py, or what Moodle or Canvas exports; or notebooks (chNN.ipynb) in place of these "
DESCRIPTION += "files. Without --container, submissions run with your rights."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from chapters.__main__ import seconds, whole_number

    parser.description = DESCRIPTION
    parser.add_argument("folder", type=Path, help="the folder of the class")
    about = "a row for each student, with a column in percent for each chapter, as Moodle and Canvas import it"
    parser.add_argument("--marks", type=Path, metavar="FILE", help=about)
    about = "with --marks: the class, as Moodle or Canvas exports it; who is missing gets a row, too"
    parser.add_argument("--roster", type=Path, metavar="FILE", help=about)
    about = "a row for each submission, with every message (default: beside the marks, as details.csv)"
    parser.add_argument("--csv", type=Path, metavar="FILE", help=about)
    parser.add_argument("--similar", type=Path, metavar="FILE", help="also write a table of pairs that share most code")
    about = "run submissions in containers of this image, with docker or podman (chapters/teaching/Dockerfile)"
    parser.add_argument("--container", metavar="IMAGE", help=about)
    about = "grade these chapters (default: all); a single one also holds for files whose name has no chapter"
    parser.add_argument("--chapters", type=int, nargs="+", default=[], metavar="N", help=about)
    about = "submissions at a time (default: one for each core, as far as each has 2 GiB of free memory)"
    parser.add_argument("--jobs", type=whole_number, metavar="N", help=about)
    limit = f"wall time for one check (default: {LIMIT_S:g})"
    parser.add_argument("--limit", type=seconds, default=LIMIT_S, metavar="SECONDS", help=limit)
    parser.add_argument("--model", help="checkpoint directory or hub id (default: the demo model)")


def run(args: argparse.Namespace, console: Console) -> int:
    if sys.platform == "win32":
        raise ValueError("a class is graded on Linux or macOS (on Windows: WSL); here: check CHAPTER --file FOLDER")
    from chapters.__main__ import find_model
    from chapters.course import EXERCISES, find_chapter
    from chapters.teaching.edition import check_exercises
    from chapters.teaching.isolation import WARNING, Container, Process
    from chapters.teaching.marks import Roster, as_it_was, write_marks
    from chapters.teaching.similar import MEANING, require_copydetect
    from chapters.teaching.submissions import find_submissions, others_in
    from chapters.teaching.table import Grader, sort_rows, write_pairs
    from nanovllm.files.system import available_bytes

    if not (args.csv or args.marks):
        raise ValueError("name a file for the table, --csv FILE, or for the marks, --marks FILE")
    if args.roster and not args.marks:
        raise ValueError("--roster needs --marks FILE, which is written from it")
    details = args.csv or args.marks.with_name("details.csv")
    files = [file.resolve() for file in (args.roster, args.marks, details, args.similar) if file]
    if len({*files}) < len(files):
        raise ValueError(f"roster, marks, details ({details}) and similar pairs must be different files")
    for file in files:
        if not file.parent.is_dir():
            raise ValueError(f"{file.parent} is not a folder")
        if file.is_dir():
            raise ValueError(f"{file} is a folder; name a file")
    for number in args.chapters:
        find_chapter(number)
    if args.similar:
        require_copydetect()
    roster = Roster(args.roster) if args.roster else None
    submissions = find_submissions(args.folder, args.chapters)
    if roster is not None:
        roster.check(submissions)
    check_exercises(map(find_chapter, {each.chapter for each in submissions} & EXERCISES.keys()))
    place = Container.of(args.container) if args.container else Process()
    if others := others_in(args.folder):
        console.print(f"No submissions, and left alone: {', '.join(others)}", markup=False, soft_wrap=True)
    if isinstance(place, Process):
        print(WARNING, file=sys.stderr)
    model, why_not = find_model(args.model)
    if model is None:
        console.print(f"Checks that need a model stay open, and so do their tasks: {why_not}", markup=False)
    grader = Grader(details, submissions, model, args.limit, place)
    if grader.num_known:
        console.print(f"{grader.num_known} of {len(submissions)} are in {details} already", markup=False)
    if grader.num_again:
        why = "the checks could not be run, or had no model, another one, or less time"
        console.print(f"graded again: {grader.num_again} ({why})", markup=False, soft_wrap=True)
    # Where there is too little, the kernel ends a submission, which then has crashed.
    num_jobs = min(os.cpu_count() or 1, max(1, available_bytes() // BYTES_OF_A_JOB))
    grader.run(args.jobs or num_jobs, console)
    rows = sort_rows(details, submissions, args.chapters)
    num_passed = sum(row["passed"] == "yes" for row in rows)
    console.print(f"{details}: {len(rows)} rows, {num_passed} passed", markup=False, soft_wrap=True)
    unknown = [row for row in rows if row["note"] and not row["checks"]]
    if unknown:
        what = f"{len(unknown)} came to no verdict, and so to 0; the column note says why. The first: "
        console.print(what + as_it_was(unknown[0]["note"]), markup=False, soft_wrap=True)
    if args.marks:
        found = [row | {"student": as_it_was(row["student"])} for row in rows]
        told = write_marks(args.marks, roster, found)
        console.print(f"{args.marks}: written", markup=False, soft_wrap=True)
        for sentence in told:
            console.print(f"  {sentence}", markup=False, soft_wrap=True)
    if args.similar:
        num_pairs = write_pairs(args.similar, submissions)
        console.print(f"{args.similar}: {num_pairs} pairs. {MEANING}", markup=False, soft_wrap=True)
    return 0
