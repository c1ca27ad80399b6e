"""Report: what python -m chapters check prints, for people and (--json) for whoever collects marks."""

from contextlib import ExitStack, closing
from pathlib import Path
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.markup import escape

from chapters.course import Chapter
from chapters.examine import examine
from chapters.grading import Result
from chapters.submission import readable


def report(
    chapter: Chapter,
    file: Path,
    model: str | None,
    limit_s: float,
    console: Console | None,
    task: str = "",
    num_jobs: int = 0,
) -> list[Result]:
    """Check a file and, where there is a console, show each task when it is done. task: only this one."""
    results: list[Result] = []
    with ExitStack() as stack:
        examined = stack.enter_context(closing(examine(chapter, file, model, limit_s, task, num_jobs)))
        if console:
            stack.enter_context(console.status(f"checking {escape(readable(file))}"))
        for result in examined:
            results.append(result)
            if console:
                show(result, console)
    return results


def show(result: Result, console: Console) -> None:
    num_checks, num_open = len(result.task.checks), len(result.open)
    mark = "[green]passed[/]" if result.passed else "[yellow]not started[/]" if result.not_started else "[red]no[/]"
    if num_open and not result.problem:
        mark = "[yellow]passed as far as it goes without a model[/]"
    console.print(f"[bold]{result.task.name}[/]: {mark}, {result.num_passed - num_open} of {num_checks} checks")
    for number, title in enumerate(result.task.titles[: result.num_passed + 1]):
        sign = "[yellow]?" if number in result.open else "[red]x" if number == result.num_passed else "[green]+"
        console.print(f"  {sign}[/] {escape(title)}")
    theirs: dict[str, Any] = {"markup": False, "emoji": False, "soft_wrap": True}  # of texts that are not ours
    if result.problem:
        console.print(indent(result.problem, "    "), **theirs)
    if result.section:
        console.print(f"    [dim]Read again: {escape(result.section)}[/]")
    if result.printed:
        console.print("    Printed:", indent(result.printed.rstrip("\n"), "      "), sep="\n", style="dim", **theirs)


def record(chapter: Chapter, file: Path, results: list[Result]) -> dict[str, Any]:
    """One submission: did it pass, and of each task how many checks there are, how many passed, and what was wrong."""
    tasks = [
        {
            "task": result.task.name,
            "passed": result.passed,
            "checks": len(result.task.checks),
            "checks_passed": result.num_passed - len(result.open),
            "message": result.problem or (f"left open without a model: {len(result.open)}" if result.open else ""),
            "seconds": round(result.seconds, 3),
        }
        for result in results
    ]
    passed, seconds = all(result.passed for result in results), sum(result.seconds for result in results)
    outcome = {"passed": passed, "seconds": round(seconds, 3), "tasks": tasks}
    return {"file": str(file), "chapter": chapter.number} | outcome
