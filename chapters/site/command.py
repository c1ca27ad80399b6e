"""python -m chapters site: the course as web pages."""

import argparse
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

OUT, HOST, PORT = Path("build/site"), "127.0.0.1", 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=OUT, help=f"the folder (default: {OUT.as_posix()})")
    parser.add_argument(
        "--offline", action="store_true", help="put the labs' runtime beside the pages, to need no network"
    )
    parser.add_argument(
        "--with-model", action="store_true", help="put the demo model beside the pages, 100 MB (needs ziglang and npm)"
    )
    parser.add_argument("--serve", action="store_true", help="show it in browsers")
    who = f"with --serve: address to listen at; the default, {HOST}, is for browsers on this machine only"
    parser.add_argument("--host", default=HOST, help=who)
    parser.add_argument("--port", type=int, default=PORT, help=f"with --serve (default: {PORT})")
    parser.add_argument("--draw", action="store_true", help="draw diagrams that have changed (needs npm and chromium)")


def run(args: argparse.Namespace, console: Console) -> int:
    from chapters.__main__ import refuse_beside
    from chapters.site import check_installed, diagrams, server

    for_serving = {"--host": args.host != HOST, "--port": args.port != PORT}
    if args.draw:
        unused = {
            "--out": args.out != OUT,
            "--offline": args.offline,
            "--with-model": args.with_model,
            "--serve": args.serve,
            **for_serving,
        }
        refuse_beside("--draw", unused, "it draws diagrams, and builds no site")
        diagrams.draw_all()
        return 0
    if not args.serve:
        refuse_beside("site without --serve", for_serving, "it writes the pages, and shows them to nobody")
    check_installed()
    from chapters.site import build

    with server.server_at(args.host, args.port, args.out) if args.serve else nullcontext() as to_serve:
        build.build(args.out, args.offline, args.with_model)
        print(f"written: {args.out / 'index.html'}")
        if to_serve:
            server.serve(to_serve)
    return 0
