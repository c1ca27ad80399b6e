"""python -m chapters student: the course without its solutions, or assignments to hand out."""

import argparse
from pathlib import Path

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="the folder to write, new or empty")


def run(args: argparse.Namespace, console: Console) -> int:
    from chapters.teaching.edition import write_edition

    write_edition(args.out)
    console.print(f"written: {args.out}", markup=False, soft_wrap=True)
    return 0
