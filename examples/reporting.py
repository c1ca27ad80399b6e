"""A report in parts, each of which a process of its own finds; gpu_report.py has the questions.

A part yields rows, of which neighbours with the same columns become a table, and texts. Each goes to the report as soon
as it is found: whatever ends the process, nothing is lost.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from measuring import RESULT, console, markdown

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
OUTCOMES = {"failure": "failed", "error": "errors", "skipped": "skipped"}  # JUnit's words, and pytest's


@dataclass(frozen=True)
class Part:
    function: Callable[[Any], Iterator[Row | str]]
    title: str
    about: str  # what the tables hold
    budget_s: int

    @property
    def name(self) -> str:
        return self.function.__name__


def run_part(part: Part, command: list[str], limit_s: float) -> dict[str, Any]:
    """A part as the report holds it. The command has so many seconds."""
    started = time.monotonic()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(command, stdout=to_out, stderr=to_err, cwd=ROOT, start_new_session=True)
            try:
                status = process.wait(max(limit_s, 1))
                state = "done" if status == 0 else f"failed (exit status {status})"
            except subprocess.TimeoutExpired:
                state = f"cut: stopped after {limit_s:.0f} s"
            finally:
                if process.poll() is None:  # late, or Ctrl-C, which a session of its own does not get
                    end_all(process)
        lines = [line for line in out.read_text("utf-8", "replace").splitlines() if line.startswith(RESULT)]
        stderr = err.read_text("utf-8", "replace").splitlines()[-100:]
    found = []
    for line in lines:
        with suppress(json.JSONDecodeError):  # the last line of a process that was ended
            found.append(json.loads(line.removeprefix(RESULT)))
    about = {"name": part.name, "title": part.title, "about": part.about, "state": state}
    return about | {"found": found, "seconds": time.monotonic() - started, "stderr": stderr}


def end_all(process: subprocess.Popen) -> None:
    """The process and all that it has started."""
    if sys.platform == "win32":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_parts(
    parts: list[Part], command_of: Callable[[Part, float], list[str]], report: dict[str, Any], out: str | Path
) -> None:
    """Run the parts one after another; write both files after each. command_of(part, the seconds that it has)."""
    begin, allowed_s = time.monotonic(), 0.0
    for part in parts:
        allowed_s += part.budget_s
        limit_s = allowed_s - (time.monotonic() - begin)
        with console().status(f"{part.title}: at most {limit_s:.0f} s"):
            done = run_part(part, command_of(part, limit_s), limit_s)
        console().print(f"{part.title}: {done['state']}, {done['seconds']:.0f} s")
        report["parts"].append(done)
        write(Path(f"{out}.json"), json.dumps(report, indent=1))
        write(Path(f"{out}.md"), text_of(report))


def write(path: Path, text: str) -> None:
    """The whole file or none of it, whenever the process ends."""
    temporary = path.with_name(path.name + ".new")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def text_of(report: dict[str, Any]) -> str:
    pieces = ["# nanovllm on a CPU" if report["cpu"] else "# nanovllm on a GPU"]
    pieces.append(f"`{report['command']}`, {report['date']}.")
    if report["pretend"] and not report["cpu"]:
        pieces.append("**On a pretend GPU, written in Python: its times and bandwidths mean nothing.**")
    if report["short"]:
        pieces.append("Sizes are tiny (`--short`), whatever the texts below say of a workload.")
    for part in report["parts"]:
        pieces += [f"## {part['title']}", part["about"]]
        for columns, of in itertools.groupby(part["found"], key=columns_of):
            rows: list[Any] = list(of)
            pieces += [markdown(columns, [[*map(shown, row.values())] for row in rows])] if columns else rows
        if part["state"].startswith("failed") or any(line.startswith("Traceback") for line in part["stderr"]):
            pieces += ["The last lines that it wrote to stderr:", code("\n".join(part["stderr"][-20:]))]
        pieces.append(f"This part: {part['state']}, {part['seconds']:.0f} s.")
    return "\n\n".join(pieces) + "\n"


def columns_of(found: Row | str) -> tuple[str, ...]:
    return tuple(found) if isinstance(found, dict) else ()


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def read_junit(path: Path) -> Iterator[Row | str]:
    """What pytest --junitxml has written: tests by file, what they have recorded, and failures."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    outcomes: dict[str, Counter] = {}
    recorded: dict[tuple[str, str], Row] = {}
    failures = []
    for case in cases:
        child = next((child for child in case if child.tag in OUTCOMES), None)
        outcome = "passed" if child is None else OUTCOMES[child.tag]
        outcomes.setdefault(case.get("classname", ""), Counter())[outcome] += 1
        found = {each.get("name", ""): each.get("value") for each in case.iter("property")}
        if "backend" in found:
            recorded.setdefault((found["architecture"] or "", found["backend"] or ""), {}).update(found)
        if child is not None and child.tag != "skipped":
            message = (child.get("message") or "").splitlines()
            failures.append(f"`{case.get('classname')}::{case.get('name')}`: {' '.join(message[:1])[:200]}")
    for file, counts in outcomes.items():
        yield {"tests": file} | {name: counts[name] for name in ("passed", *OUTCOMES.values())}
    names = dict.fromkeys(name for row in recorded.values() for name in row)
    yield from (dict.fromkeys(names, "") | row for row in recorded.values())
    yield from failures[:40]


def code(text: str) -> str:
    return f"```text\n{text}\n```"


def describe(error: BaseException) -> str:
    """One line: the error, and where in the repository it came from. The whole traceback goes to stderr."""
    traceback.print_exception(error)
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(ROOT):
            where = f" ({Path(frame.filename).relative_to(ROOT).as_posix()}:{frame.lineno})"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}{where}"
