"""What people do: every command that a text tells somebody to run, and what must come of it.

The tables are students.toml, teachers.toml and users.toml. A journey is a list of steps in a clone of the repository of
its own, with progress, boards and answers of its own.

    journey   name; nightly = true if it takes long; needs: packages and programs without which it is skipped
    step      says      what a text tells, word for word (N: the number of any chapter), or several such things
              run       the command for the shell, where it is not `says`. {demo}, {tiny}: checkpoints
              given     what lies in the folder beforehand: a function of given.py
              cwd       the folder; stdin: what is typed; without_model = true: a machine that has no demo model
              exit      code (0); prints: patterns of what is printed; lacks: patterns that are not
              files     path -> patterns of what is in it; gone: paths that are not there
              waits_for it runs on once it has printed this, and is ended by Ctrl-C at the journey's end
              tested    the test that runs it, where there is one with more to say; why_not: why nobody does

Whatever is in a text and not in a table fails, and so does what is in a table and in no text.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.course.course_text import FENCE, ROOT
from tests.journeys import given
from tests.processes import LIMIT_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES = sorted(Path(__file__).parent.glob("*.toml"))
JOURNEYS = [journey for table in TABLES for journey in tomllib.loads(table.read_text("utf-8"))["journey"]]
STEPS = [step for journey in JOURNEYS for step in journey["step"]]
FOLDERS = ("nanovllm", "chapters", "examples", "tests")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
INLINE = re.compile(r"`((?:python|nanovllm|pip|curl|otter|nbgrader|pytest|docker|npm|git) [^`]+)`")
NO_MODEL = "import sys\nsys.modules['gguf'] = None\n"  # a package without which the demo model cannot be made


def listed(step: dict[str, Any], name: str) -> list[str]:
    found = step.get(name, [])
    return [found] if isinstance(found, str) else found


def plain(command: str) -> str:
    """On one line, without a comment; a chapter's number is any chapter's."""
    command = re.sub(r"\s+", " ", re.sub(r"\\\n", " ", command)).strip()
    command = re.sub(r" # .*", "", command)
    return re.sub(r"(chapters (?:lab|quiz|check)) \d+$", r"\1 N", command)


def told(text: str) -> set[str]:
    """The commands of a page: in its blocks for the shell, and between the words."""
    blocks = [block["text"] for block in FENCE.finditer(text) if block["info"] == "bash"]
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    return {plain(each) for each in [*lines, *INLINE.findall(FENCE.sub("", text))] if plain(each)}


# -- the table and the texts -------------------------------------------------------------------------------------------

SAID = {plain(each) for step in STEPS for each in listed(step, "says")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_text_tells_is_in_the_table(page):
    assert told(page.read_text("utf-8")) <= SAID


def test_what_is_in_the_table_is_told_by_a_text():
    texts = "\n".join(page.read_text("utf-8") for page in PAGES)
    commands, words = set[str]().union(*map(told, [texts])), " ".join(texts.split())
    assert [said for said in SAID if said not in commands and said not in words] == []


def test_the_tests_that_stand_for_a_step_are_there():
    for step in STEPS:
        ways = [name for name in ("run", "tested", "why_not") if name in step] or listed(step, "says")[:1]
        assert len(ways) == 1, step
        path, _, name = step.get("tested", "").partition("::")
        assert not path or f"def {name}" in (ROOT / path).read_text("utf-8"), step


# -- the journeys ------------------------------------------------------------------------------------------------------


class Traveller:
    """Runs the steps of one journey in a clone."""

    def __init__(self, folder: Path, values: dict[str, str]) -> None:
        self.clone, self.values, self.behind = folder / "clone", values, list[tuple[subprocess.Popen, dict]]()
        self.out = folder / "out"
        copy_repository(self.clone)
        for name in ("bin", "no_model", "data", "no_cache"):
            (folder / name).mkdir()
        (folder / "no_model" / "sitecustomize.py").write_text(NO_MODEL, "utf-8")
        for name, module in {"python": "", "nanovllm": "-m nanovllm", "pip": "-m pip"}.items():
            script = folder / "bin" / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n', "utf-8")
            script.chmod(0o755)
        path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NANOVLLM", "PYTEST"))}
        self.env = kept | {"PATH": os.pathsep.join(path), "PYTHONPATH": str(self.clone), "COLUMNS": "120"}
        self.env |= {"XDG_DATA_HOME": str(folder / "data"), "PYTHONUNBUFFERED": "1", "HOME": str(folder)}
        self.env["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        no_model = {"PYTHONPATH": f"{folder / 'no_model'}{os.pathsep}{self.clone}"}
        self.without_model = self.env | no_model | {"XDG_CACHE_HOME": str(folder / "no_cache")}

    def take(self, step: dict[str, Any]) -> None:
        folder = self.clone / step.get("cwd", "")
        if "given" in step:
            getattr(given, step["given"])(folder)
        command = re.sub(r"\{(\w+)\}", lambda name: self.values[name[1]], step.get("run") or listed(step, "says")[-1])
        env = self.without_model if step.get("without_model") else self.env
        with self.out.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", command], cwd=folder, env=env, stdin=subprocess.PIPE, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.behind.append((process, step))
        assert process.stdin is not None
        process.stdin.write(step.get("stdin", "").encode())
        process.stdin.close()
        if "waits_for" in step:
            self._wait_for(process, step["waits_for"])
            self.out = self.out.with_name(f"out{len(self.behind)}")
            return
        process.wait(LIMIT_S)
        self.behind.pop()
        check(step, process.returncode, self.out.read_text("utf-8", "replace"), folder)

    def _wait_for(self, process: subprocess.Popen, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, said := self.out.read_text("utf-8", "replace")):
            assert process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)

    def arrive(self) -> None:
        """What runs on is ended as a person ends it."""
        for process, step in self.behind:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            assert process.wait(LIMIT_S) in (step.get("exit", 0), 130), step
            check({"files": step.get("files", {})}, 0, "", self.clone)

    def give_up(self) -> None:
        for process, _ in self.behind:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def check(step: dict[str, Any], code: int, printed: str, folder: Path) -> None:
    assert code == step.get("exit", 0), printed
    for pattern in step.get("prints", ()):
        assert re.search(pattern, printed, re.MULTILINE), f"nothing like {pattern!r} was printed:\n{printed}"
    for pattern in step.get("lacks", ()):
        assert not re.search(pattern, printed, re.MULTILINE), f"{pattern!r} was printed:\n{printed}"
    for path, patterns in step.get("files", {}).items():
        text = (folder / path).read_text("utf-8", "replace")
        for pattern in patterns:
            assert re.search(pattern, text, re.MULTILINE), f"nothing like {pattern!r} is in {path}:\n{text[:20_000]}"
    for path in step.get("gone", ()):
        assert not (folder / path).exists(), path


def copy_repository(target: Path) -> None:
    """What git knows of, and what is new in it."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    if listing.returncode:  # no clone, but a copy of one
        shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns("__pycache__", "build", ".*_cache"))


def lacking(needs: list[str]) -> list[str]:
    return [name for name in needs if not shutil.which(name) and importlib.util.find_spec(name) is None]


def to_run(journey: dict[str, Any]) -> list[dict[str, Any]]:
    """Its steps that no test stands for."""
    return [step for step in journey["step"] if "tested" not in step and "why_not" not in step]


def parameters():
    for journey in filter(to_run, JOURNEYS):  # the others need no copy of the repository
        marks = [pytest.mark.nightly] if journey.get("nightly") else []
        yield pytest.param(journey, id=journey["name"].replace(" ", "_"), marks=marks)


@pytest.mark.skipif(sys.platform == "win32", reason="the texts' commands are for bash")
@pytest.mark.parametrize("journey", list(parameters()))
def test_journey(journey, tmp_path, request):
    if missing := lacking(journey.get("needs", [])):
        pytest.skip(f"not here: {', '.join(missing)}")
    steps = to_run(journey)
    values = {"extras": ",".join(sorted(set(re.findall(r"\[([\w,-]+)\]", " ".join(SAID)))))}
    commands = " ".join(step.get("run", "") for step in steps)
    if "{demo}" in commands or journey.get("nightly"):
        values["demo"] = str(request.getfixturevalue("demo_checkpoint"))
    if "{tiny}" in commands:
        values["tiny"] = str(request.getfixturevalue("checkpoint")())
    traveller = Traveller(tmp_path, values)
    try:
        for step in steps:
            if not (missing := lacking(step.get("needs", []))):
                traveller.take(step)
            else:
                print(f"skipped: {step}: not here: {missing}")
        traveller.arrive()
    finally:
        traveller.give_up()
