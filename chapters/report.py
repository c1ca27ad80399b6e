"""Report: what python -m chapters check prints."""

from types import ModuleType

from rich.console import Console
from rich.markup import escape

from chapters.grading import Bench, Result, Task, grade


def grade_all(tasks: list[Task], module: ModuleType, bench: Bench, console: Console) -> list[Result]:
    results = []
    for task in tasks:
        with console.status(f"checking {task.name}"):
            result = grade(task, getattr(module, task.name), bench)
        results.append(result)
        mark = "[green]passed[/]" if result.passed else "[yellow]not started[/]" if result.not_started else "[red]no[/]"
        console.print(f"[bold]{task.name}[/]: {mark}, {result.num_passed} of {len(task.checks)} checks")
        for number, title in enumerate(task.titles[: result.num_passed + 1]):
            console.print(f"  {'[red]x' if number == result.num_passed else '[green]+'}[/] {escape(title)}")
        if not result.passed:
            console.print(escape(f"    {result.problem}").replace("\n", "\n    "), soft_wrap=True)
            console.print(f"    [dim]Read again: {task.section}[/]")
    return results
