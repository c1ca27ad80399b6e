"""python -m chapters nano: write your own nano engine, in eight steps (README.md)."""

import argparse
import shlex
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chapters.course import Progress
from chapters.nano_engine.steps import ENGINE, NANO, STEPS, begun_at, heading, name_of, passed_steps
from chapters.runner import Lost, Run
from chapters.submission import LIMIT_S, readable

PUBLISHED = (  # of its README: Qwen3-0.6B, 256 requests of 100 to 1,024 tokens, answers as long
    ("nano-vllm, a GPU (RTX 4070 Laptop), Qwen3-0.6B", "1,434"),
    ("vLLM, the same GPU and model", "1,362"),
)
NOT_RUN_HERE = (
    "nano-vllm needs CUDA, so it is not run here: its figures are those of its README, with another model, another "
    "load and a GPU. They say what a GPU can do, and nothing about your engine."
)
BENCH_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from chapters.__main__ import seconds

    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    check = actions.add_parser("check", help="grade a step, or all", description="Grade a step of your engine.py.")
    check.add_argument("step", type=int, nargs="?", help="1 to 8 (default: all, up to the first that fails)")
    which = check.add_mutually_exclusive_group()
    which.add_argument("--solution", action="store_true", help="grade our solution instead")
    add_file(which)
    limit = f"wall time for one check (default: {LIMIT_S:g})"
    check.add_argument("--limit", type=seconds, default=LIMIT_S, metavar="SECONDS", help=limit)
    start = actions.add_parser(
        "start", help="begin with a later step", description="Write an engine.py with our solution of earlier steps."
    )
    start.add_argument("step", type=int, help="the step you begin with, 1 to 8")
    start.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    bench = actions.add_parser("bench", help="measure it", description="Measure a finished engine beside others.")
    add_file(bench)
    for command in (check, bench):
        command.add_argument("--model", help="checkpoint directory (default: the demo model, or a tiny random one)")


def add_file(parser: "argparse._ActionsContainer") -> None:
    parser.add_argument("--file", type=Path, metavar="FILE", help="another file than chapters/nano_engine/engine.py")


def run(args: argparse.Namespace, console: Console) -> int:
    if args.action is None:
        return run_show(console)
    actions = {"check": run_check, "start": run_start, "bench": run_bench}
    return actions[args.action](args, console)


def run_show(console: Console) -> int:
    passed = passed_steps(Progress())
    table = Table("step", "what you write", "", "passed")
    for number, (name, what) in enumerate(STEPS.items(), start=1):
        table.add_row(str(number), name, what, "yes" if name in passed else "")
    console.print(table)
    todo = next((number for number, name in enumerate(STEPS, start=1) if name not in passed), None)
    if todo is None:
        console.print("[green]Your engine is finished.[/] Measure it: [bold]python -m chapters nano bench[/]")
    else:
        console.print(f"Next: step {todo} in {ENGINE.relative_to(ENGINE.parents[2])}, then ", end="", markup=False)
        console.print(f"[bold]python -m chapters nano check {todo}[/]")
    return 0


def run_check(args: argparse.Namespace, console: Console) -> int:
    from chapters.examine import examine_tasks
    from chapters.nano_engine.checks import TASKS
    from chapters.report import show

    file = ENGINE.with_name("solution.py") if args.solution else args.file or ENGINE
    if not file.is_file():
        raise ValueError(f"{readable(file)} is not a file")
    tasks = TASKS if args.step is None else [task for task in TASKS if task.name == name_of(args.step)]
    numbers, all_passed = {name: number for number, name in enumerate(STEPS, start=1)}, True
    progress = Progress()
    how = {"limit_s": args.limit, "num_jobs": 1, "target": "chapters.nano_engine.steps:check_step"}
    with ExitStack() as stack:
        found = stack.enter_context(closing(examine_tasks(tasks, file, **how, model=model_of(args, console))))
        stack.enter_context(console.status(f"checking {escape(readable(file))}"))
        for result in found:
            name = result.task.name
            console.print(f"Step {numbers[name]}, ", end="")
            show(result, console)
            all_passed = result.passed
            if not args.solution and args.file is None:
                progress.note(NANO, solved={name: result.passed})
            if not result.passed:
                break
    return 0 if all_passed else 1


def run_start(args: argparse.Namespace, console: Console) -> int:
    source = begun_at(args.step)
    if args.out.exists():
        raise ValueError(f"{readable(args.out)} is there already; it may have somebody's work in it")
    args.out.write_text(source, "utf-8")
    file = readable(args.out)
    what = f"steps before {args.step} are ours. Write {heading(args.step)[0].lower()}{heading(args.step)[1:]}"
    quoted = subprocess.list2cmdline([file]) if sys.platform == "win32" else shlex.quote(file)
    command = f"python -m chapters nano check {args.step} --file {quoted}"
    console.print(f"{file}: {what}, then:  {command}", markup=False, soft_wrap=True)
    return 0


def run_bench(args: argparse.Namespace, console: Console) -> int:
    file = args.file or ENGINE
    if not file.is_file():
        raise ValueError(f"{readable(file)} is not a file")
    process = Run("chapters.nano_engine.bench:measure", file=str(file.resolve()), model=model_of(args, console))
    try:
        with console.status("measuring"):
            measured = process.hear(BENCH_S)
    except Lost as lost:
        console.print(f"{lost}\n{process.printed()}".strip(), markup=False, soft_wrap=True)
        return 1
    finally:
        process.end()
    if measured["problem"]:
        console.print(measured["problem"], markup=False, soft_wrap=True)
        return 1
    table = Table("engine", "tokens/s", title=measured["what"])
    for row in measured["rows"]:
        table.add_row(*row)
    table.add_section()
    for engine, speed in PUBLISHED:
        table.add_row(engine, f"{speed} (published)")
    console.print(table)
    console.print(NOT_RUN_HERE, style="dim")
    return 0


def model_of(args: argparse.Namespace, console: Console) -> str | None:
    """A checkpoint; None stands for a tiny one, and then it is said why."""
    from chapters.__main__ import find_model

    model, why_not = find_model(args.model)
    if model is None:
        what = f"A tiny model with random weights stands for the demo model: {why_not}"
        console.print(what, markup=False, style="dim", soft_wrap=True)
    return model
