"""python -m chapters: the course in the terminal."""

import argparse
import importlib
import io
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from chapters import lab_notebook, quiz
from chapters.course import EXERCISES, PART_TWO, ROOT, Chapter, Progress, all_chapters, find_chapter
from chapters.examine import NotExamined
from chapters.nano_engine.steps import STEPS, passed_steps
from chapters.plain_text import described, spelled, unfolded
from chapters.reading import minutes_of, only_short, shown
from chapters.report import record, report
from chapters.story import Story, busy
from chapters.submission import LIMIT_S, readable
from chapters.words import ENGLISH, Words, default_language, languages, translated, words_of
from nanovllm.tools.demo_model import DemoModelError, demo_model_path
from nanovllm.tools.own_process import run_as_process

OTHERS = {  # commands that are not about one chapter: a module with add_arguments(parser) and run(args, console)
    "minutes": ("reading", "say how long the texts take, the short paths and the whole"),
    "site": ("site.command", "build the course as web pages"),
    "pictures": ("pictures", "draw the pictures in the texts"),
    "capstone": ("capstone.command", "serve a trace of requests with your own policies; repair broken engines"),
    "nano": ("nano_engine.command", "write your own nano engine, in eight steps"),
    "student": ("teaching.student", "write the course without solutions, or assignments to hand out"),
    "grade": ("teaching.grade", "grade a class: a folder with each student's submission"),
    "slides": ("teaching.slides", "build slides and handouts of the chapters"),
    "exam": ("teaching.exam", "write an exam with numbers of its own, and its solutions"),
}

INSTALLED_BY = {  # what not every installation has
    "accelerate": 'pip install -e ".[demo]"',
    "gguf": 'pip install -e ".[demo]"',
    "marimo": 'pip install -e ".[labs]"',
    "tomli": 'pip install -e ".[labs]"',
    "playwright": "pip install playwright",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m chapters", description="The course. Without arguments: where am I?"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in (
        ("read", "show a chapter's text"),
        ("lab", "open a chapter's lab, a notebook"),
        ("quiz", "ask a chapter's questions"),
        ("check", "grade your exercise.py for a chapter"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("chapter", type=int)
        if name == "lab":
            how = command.add_mutually_exclusive_group()
            how.add_argument("--plain", action="store_true", help="run it here and print its tables")
            how.add_argument("--browser", action="store_true", help="open it in a browser, even if this is no terminal")
            how.add_argument("--write", action="store_true", help="run it here and keep what the texts quote (authors)")
        if name == "check":
            which = command.add_mutually_exclusive_group()
            which.add_argument("--solution", action="store_true", help="grade our solution instead")
            files = "grade these files instead, and all .py files of these folders (for teachers)"
            which.add_argument("--file", type=Path, nargs="+", metavar="PATH", help=files)
            command.add_argument("--task", metavar="NAME", help="only this one")
            command.add_argument("--json", action="store_true", help="print a JSON record for each file, one per line")
            limit = f"wall time for one check (default: {LIMIT_S:g})"
            command.add_argument("--limit", type=seconds, default=LIMIT_S, metavar="SECONDS", help=limit)
            jobs = "tasks at a time, each with an engine of its own (default: 2, if the machine has two cores)"
            about = "use no model: checks that need one stay open"
            command.add_argument("--no-model", action="store_true", help=about)
            command.add_argument("--jobs", type=whole_number, default=0, metavar="N", help=jobs)
        if name == "read":
            command.add_argument("--short", action="store_true", help="only its short path")
        if name in ("read", "quiz"):
            what = "for translated chapters (default: NANOVLLM_LANGUAGE, or en)"
            command.add_argument("--language", choices=languages(), default=default_language(), help=what)
        if name in ("lab", "check"):
            command.add_argument("--model", help="checkpoint directory or hub id (default: the demo model)")
    asked = (sys.argv[1:] if argv is None else argv)[:1]
    for name, (module, text) in OTHERS.items():
        if (ROOT / module.replace(".", "/")).with_suffix(".py").exists():  # a student's edition has none of a teacher
            command = commands.add_parser(name, help=text, description=text)
            if asked == [name]:  # the others need not be imported
                other = importlib.import_module(f"chapters.{module}")
                other.add_arguments(command)
                command.set_defaults(run=other.run)
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a student wrote may be in no encoding of this terminal
        sys.stdout.reconfigure(errors="backslashreplace")
    console, progress = Console(highlight=False), Progress()
    try:
        if args.command is None:
            return show_progress(console, progress, words_of(default_language()))
        if args.command in OTHERS:
            return args.run(args, console)
        return globals()[f"run_{args.command}"](find_chapter(args.chapter), args, console, progress)
    except (ValueError, OSError, DemoModelError) as error:  # among them MissingWing, which says what to do
        print(f"python -m chapters: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        remedy = f":  {INSTALLED_BY[package]}" if package in INSTALLED_BY else ""
        print(f"python -m chapters: this needs {error.name}, which is not installed here{remedy}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        console.print()
        return 130
    finally:
        if progress.problem:
            what = f"what you do is not remembered: {progress.problem}; XDG_DATA_HOME can name another folder"
            print(f"python -m chapters: {what}", file=sys.stderr)


def show_progress(console: Console, progress: Progress, words: Words) -> int:
    columns = ("chapter", "minutes", "read", "quiz", "exercises")
    table = Table("", *(words(f"progress.{name}") for name in columns), pad_edge=False)
    todo: list[str] = []
    short_minutes = 0
    kept = [(chapter, progress.get(chapter)) for chapter in all_chapters()]
    for chapter, done in kept:
        minutes = minutes_of(chapter)
        short_minutes += minutes[0]
        tasks = EXERCISES[chapter.number]
        if chapter.number == PART_TWO:
            table.add_section()
            table.add_row("", words("progress.part_two"))
        solved, score = [name for name in done.get("solved", []) if name in tasks], done.get("quiz")
        read = words("progress.short") if done.get("short") else ""
        if done.get("read"):
            read = words("progress.yes")
        table.add_row(
            str(chapter.number),
            words.title(chapter),
            shown(minutes),
            read,
            words("progress.of", done=score[0], count=score[1]) if score else "",
            words("progress.of", done=len(solved), count=len(tasks)),
        )
        missing = {"read": done.get("read"), "quiz": score, "check": len(solved) == len(tasks)}
        todo += [f"python -m chapters {name} {chapter.number}" for name, is_done in missing.items() if not is_done]
    console.print(table)
    if any(done.get("short") for _, done in kept) and not any(done.get("read") for _, done in kept):
        paths = [f"python -m chapters read {chapter.number} --short" for chapter, done in kept if not done.get("short")]
        todo = paths or todo
    if hours := round(short_minutes / 60):
        console.print(words("progress.paths", command="[bold]python -m chapters read N --short[/]", hours=hours))
    passed = passed_steps(progress)
    console.print(
        words("progress.nano", done=len(passed), count=len(STEPS), command="[bold]python -m chapters nano[/]")
    )
    if todo:
        console.print(words("progress.next", command=f"[bold]{todo[0]}[/]"))
    else:
        close = words("progress.to_close", file="chapters/one_request.md")
        console.print(f"[green]{words('progress.all_done')}[/] {close}")
    return 0


def run_read(chapter: Chapter, args: argparse.Namespace, console: Console, progress: Progress) -> int:
    words = words_of(args.language)
    path = translated(chapter.folder / "README.md", words.language)
    text = path.read_text("utf-8")
    if args.short:
        text = only_short(text, words if path.name != "README.md" else ENGLISH)
    page = Markdown(described(spelled(unfolded(text)), path))
    if console.is_terminal:
        os.environ.setdefault("LESS", "-R")  # or less, the usual pager, shows the codes of colors
        with console.pager(styles=True):
            console.print(page)
    else:
        console.print(page)
    progress.note(chapter, **{"short" if args.short else "read": True})
    return 0


def run_lab(chapter: Chapter, args: argparse.Namespace, console: Console, progress: Progress) -> int:
    notebook = chapter.folder / "lab.py"
    if args.write:
        lab_notebook.write(chapter, args.model)
        return 0
    if not args.plain and (args.browser or console.is_terminal):
        if find_spec("marimo") is not None:
            return lab_notebook.open_in_browser(notebook, local_model(args.model))
        what = (
            'This lab is a notebook to play with and to change:  pip install -e ".[labs]"  Here it prints its tables.\n'
        )
        console.print(what, markup=False)
    with busy("the lab begins"):
        lab_notebook.run(notebook, Story(args.model))
    return 0


def run_quiz(chapter: Chapter, args: argparse.Namespace, console: Console, progress: Progress) -> int:
    num_right, num_questions = quiz.run(
        chapter, console, console.input if sys.stdin.isatty() else read_line, words_of(args.language)
    )
    progress.note(chapter, quiz=[num_right, num_questions])
    return 0 if num_right == num_questions else 1


def read_line(prompt: str) -> str:
    """From a file or a pipe, whose lines may have no end."""
    print(prompt, end="", flush=True)
    if not (line := sys.stdin.readline(1000)):
        raise EOFError
    return line


def run_check(chapter: Chapter, args: argparse.Namespace, console: Console, progress: Progress) -> int:
    if args.no_model:
        refuse_beside("--no-model", {"--model": args.model}, "checks that need one stay open")
    own = chapter.folder / f"{'solution' if args.solution else 'exercise'}.py"
    files = find_files(args.file) if args.file else [own]
    model, why_not = (None, "--no-model") if args.no_model else find_model(args.model)
    if model is None:
        print(f"Checks that need a model stay open: {why_not}", file=sys.stderr)
    num_passed = num_not_examined = 0
    for file in files:
        if len(files) > 1 and not args.json:
            console.print(f"\n{readable(file)}", style="bold", markup=False, soft_wrap=True)
        shown = None if args.json else console
        try:
            results = report(chapter, file, model, args.limit, shown, args.task or "", args.jobs)
        except NotExamined as error:
            if len(files) == 1:
                raise
            print(f"python -m chapters: {readable(file)}: {error}", file=sys.stderr)
            num_not_examined += 1
            continue
        num_passed += all(result.passed for result in results)
        if args.json:
            print(json.dumps(record(chapter, file, results)), flush=True)
    if len(files) > 1 and not args.json:
        console.print(f"\n{num_passed} of {len(files)} files passed")
    if not args.solution and not args.file:
        verdicts = {r.task.name: r.passed for r in results if r.passed or r.problem}  # not of checks without a model
        progress.note(chapter, solved=verdicts)
        unsolved = [r.task.name for r in results if not r.passed]
        if unsolved and not args.task and not args.json:
            quickly = "" if args.no_model else " Quickly, without the model: --no-model."
            console.print(f"One alone: --task {unsolved[0]}.{quickly}", style="dim")
    return 2 if num_not_examined else 0 if num_passed == len(files) else 1


def find_files(paths: list[Path]) -> list[Path]:
    """These files, and of a folder all that a shell's *.py names. Raises ValueError if there is nothing."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("[!.]*.py")) if path.is_dir() else [path] if path.exists() else []
        if not found:
            raise ValueError(f"{readable(path)} is {'a folder without .py files' if path.is_dir() else 'not a file'}")
        files += found
    return files


def find_model(name: str | None) -> tuple[str | None, str]:
    """A checkpoint, or why there is none."""
    if find_spec("torch") is None:
        return None, "torch is not installed"
    try:
        return local_model(name) or str(demo_model_path()), ""
    except DemoModelError as error:
        return None, str(error)


def local_model(name: str | None) -> str | None:
    """A path that exists, in full: checks, graders and notebooks run in other folders. Other names stay as they are."""
    path = os.path.expanduser(name or "")
    return os.path.abspath(path) if os.path.exists(path) else name


def refuse_beside(option: str, others: dict[str, object], why: str) -> None:
    """others: {option: is it given?}. Raises ValueError if any of them is, and would do nothing."""
    if given := [other for other, is_given in others.items() if is_given]:
        raise ValueError(f"{option} takes no {' and no '.join(given)}: {why}")


def whole_number(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return value


def seconds(text: str) -> float:
    if not 0 < (value := float(text)) <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from above 0 to 86,400")
    return value


if __name__ == "__main__":
    if sys.flags.optimize:  # without assertions, check_integrity() finds nothing wrong
        os.environ.pop("PYTHONOPTIMIZE", None)
        os.execv(sys.executable, [sys.executable, "-m", "chapters", *sys.argv[1:]])
    run_as_process(main)
