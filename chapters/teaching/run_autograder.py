#!/usr/bin/env python3
"""Grade a submission for Gradescope: its results.json says what `python -m chapters check` says.

This is the file run_autograder of an archive that `python -m chapters student --for gradescope` writes. AUTOGRADER_ROOT
names the folder that has source/, submission/ and results/ (default: /autograder).
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def main() -> None:
    root = Path(os.environ.get("AUTOGRADER_ROOT", "/autograder"))
    python = root / "venv" / "bin" / "python"
    number = (root / "source" / "chapter").read_text("utf-8").strip()
    handed_in = sorted((root / "submission").glob("*.py"))
    named = [path for path in handed_in if path.name == "exercise.py"] or handed_in
    if len(named) == 1:
        command = [str(python) if python.exists() else sys.executable, "-m", "chapters", "check", number]
        done = subprocess.run(
            [*command, "--file", str(named[0].resolve()), "--json"],
            cwd=root / "source" / "course",
            capture_output=True,
            text=True,
        )
        results = results_of(done.stdout, done.stderr)
    else:
        results = {"score": 0, "output": f"Hand in one file, exercise.py; here are {len(handed_in)} .py files."}
    (root / "results").mkdir(exist_ok=True)
    (root / "results" / "results.json").write_text(json.dumps(results, indent=1), "utf-8")


def results_of(out: str, said: str) -> dict:
    """In Gradescope's words. out: the record of check --json. said: what it wrote to stderr."""
    if not out.strip():
        return {"score": 0, "output": f"This could not be graded; tell your teacher.\n{said}"}
    tasks = json.loads(out)["tasks"]
    tests = [
        {
            "name": task["task"],
            "score": task["checks_passed"],
            "max_score": task["checks"],
            "status": "passed" if task["passed"] else "failed",
            "output": task["message"] or f"{task['checks']} checks passed",
            "visibility": "visible",
        }
        for task in tasks
    ]
    score, seconds = sum(test["score"] for test in tests), sum(task["seconds"] for task in tasks)
    return {"score": score, "execution_time": round(seconds), "output": said, "visibility": "visible", "tests": tests}


if __name__ == "__main__":
    main()
