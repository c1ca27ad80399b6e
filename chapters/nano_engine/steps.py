"""The eight steps: their names, a file that begins in the middle, and how one is checked. It takes no torch to ask."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from chapters.course import Chapter, Progress

FOLDER = Path(__file__).parent
NANO = Chapter(0, FOLDER)  # no chapter, but as one in what the course remembers of a student
ENGINE = FOLDER / "engine.py"
SOLUTION = FOLDER / "solution.py"  # a student's edition has none
STEPS = {  # what checks ask for, by its name in engine.py -> the rest of the step's heading
    "Sequence": "a sequence and its blocks",
    "BlockManager": "the block manager",
    "Scheduler": "the scheduler",
    "make_batch": "the batch",
    "Llama": "the model",
    "load_weights": "its weights",
    "sample": "the sampler",
    "LLM": "the engine",
}
RULE = re.compile(r"^(?=# -- Step \d: )", re.MULTILINE)


def heading(number: int) -> str:
    """As README.md and engine.py have it."""
    return f"Step {number}: {[*STEPS.values()][number - 1]}"


def name_of(number: int) -> str:
    """Raises ValueError if there is no such step."""
    if not 1 <= number <= len(STEPS):
        raise ValueError(f"there are steps 1 to {len(STEPS)}, found {number}")
    return [*STEPS][number - 1]


def passed_steps(progress: Progress) -> list[str]:
    return [name for name in progress.get(NANO).get("solved", []) if name in STEPS]


def begun_at(number: int) -> str:
    """The source of an engine whose steps before this one are ours. Raises ValueError."""
    name_of(number)
    if not SOLUTION.exists():
        raise ValueError("this edition of the course has no solutions: write the steps before it yourself")
    ours, theirs = (RULE.split(path.read_text("utf-8")) for path in (SOLUTION, ENGINE))
    return "".join([theirs[0], *ours[1:number], *theirs[number:]])


def check_step(tell: Callable[..., None], name: str, file: str, model: str | None) -> dict[str, Any]:
    """In the process of a Run, as examine.check_task(): check this step of an engine."""
    from chapters.examine import check_file
    from chapters.nano_engine.checks import TASKS, NanoBench

    [task] = [task for task in TASKS if task.name == name]
    return check_file(tell, task, file, NANO.submission, partial(NanoBench, model))
