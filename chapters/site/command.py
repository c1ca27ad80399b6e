"""python -m chapters site: the course as web pages."""

import argparse
from pathlib import Path

from rich.console import Console

from chapters.course import TITLES, find_chapter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("build/site"), help="the folder (default: build/site)")
    parser.add_argument(
        "--offline", action="store_true", help="put the labs' runtime beside the pages, to need no network"
    )
    parser.add_argument(
        "--with-model", action="store_true", help="put the demo model beside the pages, 100 MB (needs ziglang and npm)"
    )
    parser.add_argument("--serve", action="store_true", help="show it on this machine")
    parser.add_argument("--port", type=int, default=8000, help="with --serve (default: 8000)")
    parser.add_argument(
        "--record", type=int, nargs="*", metavar="N", help="run these labs (none named: all) and keep what they print"
    )
    parser.add_argument("--draw", action="store_true", help="draw diagrams that have changed (needs npm and chromium)")


def run(args: argparse.Namespace, console: Console) -> int:
    from chapters.site import check_installed, diagrams, server, stories

    if args.draw:
        diagrams.draw_all()
        return 0
    if args.record is not None:
        for number in args.record or TITLES:
            stories.record(find_chapter(number))
        return 0
    check_installed()
    from chapters.site import build

    build.build(args.out, args.offline, args.with_model)
    print(f"written: {args.out / 'index.html'}")
    if args.serve:
        server.serve(args.out, args.port)
    return 0
