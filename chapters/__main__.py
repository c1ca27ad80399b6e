"""python -m chapters: the course in the terminal."""

import argparse
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from chapters import quiz
from chapters.course import PART_TWO, TITLES, Chapter, Progress, all_chapters, find_chapter
from chapters.grading import Bench
from chapters.report import grade_all
from chapters.story import Story
from nanovllm.tools.demo_model import DemoModelError, demo_model_path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m chapters", description="The course. Without arguments: where am I?"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in (
        ("read", "show a chapter's text"),
        ("lab", "play a chapter's lab"),
        ("quiz", "ask a chapter's questions"),
        ("check", "grade your exercise.py of a chapter"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("chapter", type=int)
        if name == "lab":
            command.add_argument("--plain", action="store_true", help="print it all, without keys to press")
            command.add_argument("--browser", action="store_true", help="serve it to a web browser of this machine")
        if name == "check":
            which = command.add_mutually_exclusive_group()
            which.add_argument("--solution", action="store_true", help="grade our solution instead")
            which.add_argument("--file", type=Path, help="grade this file instead (for teachers)")
        if name in ("lab", "check"):
            command.add_argument("--model", help="checkpoint directory or hub id (default: the demo model)")
    site = commands.add_parser(
        "site", help="build the course as web pages", description="build the course as web pages"
    )
    site.add_argument("--out", type=Path, default=Path("build/site"), help="the folder (default: build/site)")
    site.add_argument("--offline", action="store_true", help="put the labs' runtime beside the pages, for no network")
    site.add_argument("--serve", action="store_true", help="show it on this machine")
    site.add_argument("--port", type=int, default=8000)
    site.add_argument(
        "--record", type=int, nargs="*", metavar="N", help="run these labs (none named: all) and keep what they print"
    )
    args = parser.parse_args(argv)
    console, progress = Console(highlight=False), Progress()
    try:
        if args.command is None:
            return show_progress(console, progress)
        if args.command == "site":
            return run_site(args)
        return globals()[f"run_{args.command}"](find_chapter(args.chapter), args, console, progress)
    except (ValueError, OSError, DemoModelError) as error:
        print(f"python -m chapters: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        console.print()
        return 130


def show_progress(console: Console, progress: Progress) -> int:
    table = Table("", "chapter", "read", "quiz", "exercises")
    todo: list[str] = []
    for chapter in all_chapters():
        done, tasks = progress.get(chapter), [task.name for task in chapter.module("checks").TASKS]
        if chapter.number == PART_TWO:
            table.add_section()
            table.add_row("", "Part two: beyond the walkthrough")
        solved, score = [name for name in done.get("solved", []) if name in tasks], done.get("quiz")
        table.add_row(
            str(chapter.number),
            chapter.title,
            "yes" if done.get("read") else "",
            f"{score[0]} of {score[1]}" if score else "",
            f"{len(solved)} of {len(tasks)}",
        )
        missing = {"read": done.get("read"), "quiz": score, "check": len(solved) == len(tasks)}
        todo += [f"python -m chapters {name} {chapter.number}" for name, is_done in missing.items() if not is_done]
    console.print(table)
    console.print(f"Next: [bold]{todo[0]}[/]" if todo else "[green]All done.[/] To close: chapters/one_request.md")
    return 0


def run_read(chapter: Chapter, args: argparse.Namespace, console: Console, progress: Progress) -> int:
    text = Markdown((chapter.folder / "README.md").read_text("utf-8"))
    if console.is_terminal:
        with console.pager(styles=True):
            console.print(text)
    else:
        console.print(text)
    progress.note(chapter, read=True)
    return 0


def run_lab(chapter: Chapter, args: argparse.Namespace, console: Console, progress: Progress) -> int:
    lab = chapter.module("lab")
    playable, served = hasattr(lab, "make_app"), "TEXTUAL_DRIVER" in os.environ  # textual-serve started this process
    if args.browser and not playable:
        raise ValueError(f"the lab of chapter {chapter.number} is a story; it has nothing to play with in a browser")
    plain = args.plain or not (console.is_terminal or served or args.browser)
    if playable and not plain:
        if find_spec("textual") is not None:
            if args.browser:
                return serve(chapter, args.model)
            lab.make_app(args.model).run()
            return 0
        console.print('This lab is one to play with:  pip install -e ".[labs]"  Here it is a story.\n', markup=False)
    lab.tell(Story(args.model, plain))
    return 0


def serve(chapter: Chapter, model: str | None) -> int:
    from textual_serve.server import Server

    command = [sys.executable, "-m", "chapters", "lab", str(chapter.number), *(["--model", model] if model else [])]
    Server(shlex.join(command)).serve()
    return 0


def run_quiz(chapter: Chapter, args: argparse.Namespace, console: Console, progress: Progress) -> int:
    num_right, num_questions = quiz.run(chapter, console, console.input)
    best = progress.get(chapter).get("quiz", [0])[0]
    progress.note(chapter, quiz=[max(num_right, best), num_questions])
    return 0 if num_right == num_questions else 1


def run_site(args: argparse.Namespace) -> int:
    from chapters.site import build, server, stories

    if args.record is not None:
        for number in args.record or TITLES:
            stories.record(find_chapter(number))
        return 0
    build.build(args.out, args.offline)
    print(f"written: {args.out / 'index.html'}")
    if args.serve:
        server.serve(args.out, args.port)
    return 0


def run_check(chapter: Chapter, args: argparse.Namespace, console: Console, progress: Progress) -> int:
    if args.file is not None:
        module = chapter.submission(args.file)
    else:
        module = chapter.module("solution" if args.solution else "exercise")
    bench = Bench(args.model or str(demo_model_path()))
    results = grade_all(chapter.module("checks").TASKS, module, bench, console)
    if not args.solution and args.file is None:
        progress.note(chapter, solved=[result.task.name for result in results if result.passed])
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
