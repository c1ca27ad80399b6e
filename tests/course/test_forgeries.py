"""Submissions that want marks without an answer: they get none, and a person is told to look at them."""

import csv
import sys
from pathlib import Path

import pytest

from chapters import wall
from chapters.__main__ import main
from chapters.course import find_chapter
from chapters.examine import examine
from chapters.teaching.suspicious import flags_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="examine_here.py does without processes")
CHAPTER = find_chapter(4)
EXERCISE = (CHAPTER.folder / "exercise.py").read_bytes()

# For each: what it does when it is imported, and what all three functions of chapter 4 do.
FORGERIES = {
    "replaces_grade": (
        "import sys\nmain = sys.modules['__main__']\n"
        "from chapters.grading import Result\n"
        "main.grade = lambda task, *others: Result(task, len(task.checks))",
        "return None",
    ),
    "walks_frames": (
        "import sys",
        "frame = sys._getframe()\n"
        "    while frame.f_back is not None and 'say' not in frame.f_locals: frame = frame.f_back\n"
        "    frame.f_locals['say'](result={'num_passed': 8})",
    ),
    "equals_everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __bool__(self): return True\n    __hash__ = None",
        "return Any()",
    ),
    "an_equal_number": (
        "class Odd(int):\n    def __eq__(self, other): return True\n    __hash__ = None",
        "return Odd(1)",
    ),
    "ends_well": ("import os", "os._exit(0)"),
    "at_the_end": ("import atexit, os\natexit.register(os._exit, 0)", "raise SystemExit(0)"),
    "writes_answers": (
        "import json, os, struct\ntext = json.dumps(['answer', True, [], []]).encode()\n"
        "forged = struct.pack('<2I', len(text), 0) + text",
        "for fd in range(3, 64):\n        try: os.write(fd, forged * 50)\n        except OSError: pass",
    ),
    "a_thread_writes": (
        "import os, threading, time\n"
        "def write():\n    for fd in range(3, 64):\n        try: os.write(fd, b'x' * 100)\n"
        "        except OSError: pass\n",
        "threading.Thread(target=write).start(); time.sleep(0.1)",
    ),
    "patches_expect": (
        "import chapters.expect as e, chapters.grading as g, nanovllm.core.integrity as i\n"
        "e.expect = g.expect = e.expect_sane = i.check_manager = lambda *given: None",
        "return True",
    ),
    "patches_what_it_gets": ("", "manager.check_integrity = lambda: None\n    return True"),
    "a_callable_attribute": ("", "seq.append = print\n    return True"),
    "objects_of_the_collector": (
        "import gc",
        "for each in gc.get_objects():\n        if type(each).__name__ == 'Task': each.__dict__['checks'] = ()\n"
        "    return 1",
    ),
    "traces": ("import sys\nsys.settrace(lambda *given: None)", "return None"),
    "has_side_effects": (
        "import os\nclass Evil:\n    def __reduce__(self): return os.system, ('touch harmed',)",
        "return [Evil()]",
    ),
    "is_huge": ("", "return 'x' * (1 << 29)"),
    "is_deep": ("", "found = []\n    for _ in range(10**5): found = (found,)\n    return found"),
    "never_ends": ("", "while True: pass"),
    "forks": ("import os", "os.fork()"),
    "kills_the_grader": ("import os, signal", "os.kill(os.getppid(), signal.SIGKILL)\n    signal.pause()"),
    "sets_variables": ("import os\nos.environ.update(PYTHONSTARTUP='x', PYTHONOPTIMIZE='2')", "assert False"),
}


def forged(name: str) -> str:
    first, body = FORGERIES[name]
    functions = "".join(
        f"\ndef {each}(manager, seq, num_tokens=1):\n    {body}\n" for each in "allocate append_slots free".split()
    )
    return f"{first}\n{functions}"


@pytest.mark.parametrize("name", FORGERIES)
def test_no_marks(name, tmp_path):
    file = tmp_path / "exercise.py"
    file.write_text(forged(name), "utf-8")
    for result in examine(CHAPTER, file, None, 3.0):
        assert result.problem and not result.passed, (name, result)
        if result.task.name != "free":  # which may do nothing, and then is told what is missing
            assert result.num_passed <= 1, (name, result)
    assert not Path("harmed").exists()


def test_flags():
    """What an honest file has no use for is named; our solution and the skeleton have nothing of it."""
    for name, flag in {
        "replaces_grade": "imports chapters.grading",
        "walks_frames": "frames: f_back",
        "equals_everything": "defines __eq__",
        "ends_well": "imports os",
        "at_the_end": "imports atexit",
        "patches_expect": "imports chapters.expect",
        "objects_of_the_collector": "imports gc",
        "traces": "sys: settrace",
        "has_side_effects": "defines __reduce__",
    }.items():
        assert flag in flags_of(forged(name).encode(), EXERCISE), name
    assert flags_of((CHAPTER.folder / "solution.py").read_bytes(), EXERCISE) == []
    assert flags_of(EXERCISE, EXERCISE) == flags_of(b"def (", EXERCISE) == []


LOOKS_FOR_OURS = """
import glob, importlib
for name in ("solution", "checks"):
    try: globals().update(vars(importlib.import_module("chapters.ch12_fewer_bits." + name)))
    except ImportError: pass
for path in ({solution!r}, *glob.glob("/proc/*/cwd/chapters/ch12*/solution*.py")):
    try: exec(open(path).read())
    except OSError: pass
"""


@pytest.mark.ci
@pytest.mark.skipif(not wall.landlock_version(), reason="the system has no Landlock")
def test_a_solution_on_the_graders_disk(tmp_path, monkeypatch):
    """It is not in the course that a submission imports, and may not be read where it lies. Equal files are named."""
    monkeypatch.setattr("chapters.__main__.find_model", lambda name: (None, "a test"))
    chapter, folder, table = find_chapter(12), tmp_path / "class", tmp_path / "class.csv"
    solution = chapter.folder / "solution.py"
    honest = solution.read_text("utf-8").replace("import math", "import math  # mine")
    folder.mkdir()
    for name, source in {
        "opens": LOOKS_FOR_OURS.format(solution=str(solution)),
        "ada": honest,
        "bob": honest + "# own\n",
    }.items():
        (folder / f"{name}_ch12.py").write_text(source, "utf-8")
    assert main(["grade", str(folder), "--csv", str(table), "--limit", "20", "--jobs", "1"]) == 0
    with table.open(encoding="utf-8", newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert rows["opens"]["checks_passed"] == "0" and "imports importlib" in rows["opens"]["suspicious"]
    assert rows["ada"]["checks_passed"] == "19"
    assert "the same code as 12: bob_ch12.py" in rows["ada"]["suspicious"]
    assert "our solution.py" in rows["bob"]["suspicious"]
