"""Judge: one policy, one trace, in played time; and the table of all who have tried."""

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from chapters.capstone.answers import Refused
from chapters.capstone.desk import Desk
from chapters.capstone.score import Score, check_conservation, score, timings
from chapters.capstone.simulation import Served, simulate
from chapters.capstone.trace import Row
from chapters.capstone.views import Setup
from chapters.course import locked
from chapters.runner import FOREIGN, Lost, Run
from chapters.submission import NotLoaded, describe, file_of, load_submission, readable
from nanovllm.files.hub import user_folder

LIMIT_S = 120.0
STARTING_S = 120.0  # for Python and what it imports of ours
BASELINE = "the engine by itself"
ENTRY = {"name": str, "trace": str, "goodput": float, "num_good": int, "num_requests": int, "problem": str, "when": str}


class Verdict(NamedTuple):
    """score: None if it was refused; then problem says why."""

    name: str
    score: Score | None
    problem: str = ""
    printed: str = ""


def judge(
    file: Path | None, trace: list[Row], setup: Setup, limit_s: float = LIMIT_S, hybrid: bool = False, name: str = ""
) -> Verdict:
    """Let the policy of this file serve the trace, or (None) the engine by itself. Nothing that the file does
    raises."""
    if file is None:
        return Verdict(name or BASELINE, scored(simulate(trace, setup, hybrid=hybrid), setup))
    arguments = {"file": str(file), "trace": trace, "setup": setup, "hybrid": hybrid}
    run = Run("chapters.capstone.judge:serve_trace", **arguments)
    try:
        run.hear(STARTING_S)
        found, problem = run.hear(limit_s)
        reached, problem = score_of(found, len(trace)) if found is not None else None, str(problem)
    except Lost as lost:
        reached, problem = None, str(lost)
    except (TypeError, ValueError):  # it is in no form of ours
        reached, problem = None, FOREIGN
    finally:
        run.end()
    return Verdict(name or file.stem, reached, problem, run.printed())


def score_of(found: list[Any], num_requests: int) -> Score:
    """What serve_trace() has returned. Raises TypeError or ValueError if that can be no score of so many requests."""
    score = Score(*found)
    counts = (score.num_good, score.num_refused, score.num_late, score.num_slow)
    is_sound = score.num_requests == num_requests == sum(counts) and all(type(count) is int for count in counts)
    if not is_sound or min(counts) < 0 or not all(0 <= each < math.inf for each in score):
        raise ValueError
    return score


def serve_trace(
    tell: Callable[..., None], file: str, trace: list[list[Any]], setup: list[Any], hybrid: bool
) -> tuple[Score | None, str]:
    """In the process of a Run: the policy and the server that asks it."""
    tell("serving")
    shown = Setup(*setup)
    try:
        desk = Desk(load_policy(file), setup)
        return scored(simulate([Row(*row) for row in trace], shown, desk, hybrid), shown), ""
    except (Refused, NotLoaded) as refused:
        return None, str(refused)
    except BaseException as error:  # SystemExit, too
        return None, f"your policy led to {describe(error, file)}"


def load_policy(file: str) -> Any:
    """The class Policy of this file. Raises NotLoaded."""
    try:
        source = Path(file).read_bytes()
    except OSError as error:
        raise NotLoaded(f"{file_of(file)} cannot be read: {error.strerror}") from None
    found = vars(load_submission(source, file, "policy")).get("Policy")
    if not isinstance(found, type):
        raise NotLoaded(f"{file_of(file)} has no class Policy")
    return found


def scored(served: Served, setup: Setup) -> Score:
    check_conservation(served)
    return score(timings(served), setup, served.end_s, served.hit_rate)


def percent_of(goodput: float, baseline: float, ours: float) -> int:
    """Of the way from the baseline to our policy; below 0 for what is worse than the engine by itself, above 100 for
    what is better than ours."""
    return round(100 * (goodput - baseline) / (ours - baseline))


def table_of(verdicts: Iterable[Verdict], baseline: Verdict | None = None, ours: Verdict | None = None) -> Table:
    """With a column that places each between these two, if both have a score and ours is the better one."""
    least, best = (end.score.goodput if end is not None and end.score is not None else None for end in (baseline, ours))
    has_scale = least is not None and best is not None and best > least
    table = Table("", *"goodput good refused late slow hits".split(), *["scale"] * has_scale)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, s, _, _ in verdicts:
        cells = ("0.00", *"-----")
        if s is not None:
            good, counts = f"{s.num_good} of {s.num_requests}", (s.num_refused, s.num_late, s.num_slow)
            cells = (f"{s.goodput:.2f}", good, *map(str, counts), f"{s.hit_rate:.0%}")
        scale = []
        if least is not None and best is not None and has_scale:
            scale = [f"{percent_of(s.goodput if s is not None else 0.0, least, best)} %"]
        table.add_row(readable(name, 40), *cells, *scale)
    return table


# -- the board ----------------------------------------------------------------------------------------------------


def default_board() -> Path:
    return user_folder("XDG_DATA_HOME", ".local/share") / "capstone.jsonl"


def post(board: Path, verdict: Verdict, trace: str, served: str) -> None:
    """A line more. trace: what was served, and in which memory. served: its digest; only equal ones are compared."""
    s = verdict.score
    goodput, counts = (s.goodput, (s.num_good, s.num_requests)) if s is not None else (0.0, (0, 0))
    entry = dict(
        zip(ENTRY, (verdict.name, trace, goodput, *counts, verdict.problem, time.strftime("%F %R")), strict=True)
    )
    entry["served"] = served
    board.parent.mkdir(parents=True, exist_ok=True)
    with locked(board.with_suffix(".lock")), board.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read_board(board: Path, trace: str, served: str) -> list[dict[str, Any]]:
    """The newest entry of each name that served this, the best first. Lines that are no entries are left out.

    Older entries have no digest, and are found by what the trace was called.
    """
    newest: dict[str, dict[str, Any]] = {}
    for line in board.read_text("utf-8").splitlines() if board.exists() else ():
        try:
            entry = json.loads(line)
            is_whole = all(isinstance(entry[key], kind) for key, kind in ENTRY.items())
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if is_whole and (entry["served"] == served if "served" in entry else entry["trace"] == trace):
            newest[entry["name"]] = entry
    return sorted(newest.values(), key=lambda entry: -entry["goodput"])


def board_table(entries: list[dict[str, Any]], title: str) -> Table:
    table = Table("", "name", "goodput", "good", "when", title=title, title_justify="left")
    for place, entry in enumerate(entries, 1):
        good = f"{entry['num_good']} of {entry['num_requests']}" if not entry["problem"] else "refused"
        table.add_row(
            f"{place}", readable(entry["name"], 40), f"{entry['goodput']:.2f}", good, readable(entry["when"], 20)
        )
    return table
