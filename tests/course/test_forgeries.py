"""Submissions that want marks without an answer. Those that are known get none; one that aims at the runner does, and a
person is told to look at it (INSTRUCTOR.md, "What can be forged")."""

import json
import os
import signal
import sys

import pytest

from chapters.course import find_chapter
from chapters.examine import examine
from chapters.report import record
from chapters.teaching.suspicious import flags_beside, flags_of
from tests.course.course_text import ROOT
from tests.course.test_examine import GRADE
from tests.marks import by_night

CHAPTER = find_chapter(4)


def sends(message: str) -> tuple[str, str]:
    """This message, with the function that the runner sends with."""
    body = "for frame in map(sys._getframe, range(1, 99)):\n        if 'send' in frame.f_locals: frame.f_locals['send']"
    return "import sys", f"{body}({message})"


# For each: what it does when it is imported, and what all three functions of chapter 4 do.
FORGERIES = {
    "replaces_grade": (
        "import sys\nexamine = sys.modules['chapters.examine']\n"
        "from chapters.grading import Result\n"
        "examine.grade = lambda task, *others: Result(task, len(task.checks))",
        "return None",
    ),
    "walks_frames": (
        "import sys",
        "frame = sys._getframe()\n"
        "    while frame.f_back is not None and 'send' not in frame.f_locals: frame = frame.f_back\n"
        "    frame.f_locals['send'](result={'num_passed': 8})",
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
    "says_that_it_has_passed": (
        "import sys",
        "for frame in map(sys._getframe, range(1, 9)):\n"
        "        if 'send' in frame.f_locals: frame.f_locals['send'](result={'num_passed': 8})",
    ),
    "ends_well": ("import os", "os._exit(0)"),
    "at_the_end": ("import atexit, os\natexit.register(os._exit, 0)", "raise SystemExit(0)"),
    "writes_answers": (
        "import json, os\nforged = f\"{'0' * 32} {json.dumps({'result': {'num_passed': 8}})}\\n\".encode()",
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
    "sends_what_is_no_result": sends("result=[]"),
    "sends_what_is_no_phase": sends("phase=['checking', 10**6]"),
    "sends_more_than_there_is": sends("result={'num_passed': 10**6, 'problem': 'x', 'open': []}"),
    "sets_variables": ("import os\nos.environ.update(PYTHONSTARTUP='x', PYTHONOPTIMIZE='2')", "assert False"),
}


def forged(name: str) -> str:
    first, body = FORGERIES[name]
    functions = "".join(
        f"\ndef {each}(manager, seq, num_tokens=1):\n    {body}\n" for each in "allocate append_slots free".split()
    )
    return f"{first}\n{functions}"


def record_of(source: str, tmp_path, processes, *options: str, chapter: int = 4) -> dict:
    """What check --json says; nothing if the submission has killed it."""
    file = tmp_path / "exercise.py"
    file.write_text(source, "utf-8")
    command = ["check", str(chapter), "--file", str(file), "--json", "--limit", "3", *options]
    code, out, err = processes.run("-c", GRADE, *command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if code == -signal.SIGKILL and "getppid" in source:
        return {"tasks": []}
    assert out, (code, err)
    return json.loads(out)


@pytest.mark.skipif(sys.platform == "win32", reason="os.fork and signals")
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, ("--task", "allocate")) for name in FORGERIES), *(by_night(n, ()) for n in FORGERIES)],
)
def test_no_marks(name, options, tmp_path, processes, monkeypatch):
    """By day the grader is this process, which the submission's own never is; by night it is the command."""
    if options and name != "kills_the_grader":
        monkeypatch.chdir(tmp_path)
        file = tmp_path / "exercise.py"
        file.write_text(forged(name), "utf-8")
        [result] = examine(CHAPTER, file, None, 0.5 if name == "never_ends" else 3.0, only="allocate")
        tasks = record(CHAPTER, file, [result])["tasks"]
    else:
        tasks = record_of(forged(name), tmp_path, processes, *options)["tasks"]
    for task in tasks:
        assert task["message"] and not task["passed"], (name, task)
        if task["task"] != "free":  # which may do nothing, and then is told what is missing
            assert task["checks_passed"] <= 1, (name, task)
    assert not (tmp_path / "harmed").exists()


# Whatever is asked, each number is what was expected; the class says that it is Python's.
SAYS_IT_IS_PYTHONS = """
methods = {"__module__": "builtins", "__eq__": lambda a, b: True, "__sub__": lambda a, b: 0.0}
Any = type("Any", (float,), methods | {"__ne__": lambda a, b: False, "__hash__": None, "__rsub__": lambda a, b: 0.0})

class Numbers(list):
    __module__ = "builtins"

def min_p_probs(logits, temperature, min_p):
    return Numbers([Any(0.0)] * len(logits))
"""


def test_a_class_that_says_it_is_pythons(tmp_path, processes):
    [task] = record_of(SAYS_IT_IS_PYTHONS, tmp_path, processes, "--task", "min_p_probs", chapter=8)["tasks"]
    assert "builtins.Any" not in task["message"] and "of the type Any, which decides by itself" in task["message"]
    assert task["checks_passed"] == 0 and "names __eq__" in flags_of(SAYS_IT_IS_PYTHONS.encode(), 8)


# It looks through the frames for whatever can be called with a result, which is what the runner hands over, and says
# that the last check has begun.
AIMED = """
import sys

def allocate(manager, seq):
    frame = sys._getframe()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if callable(value) and getattr(value, "__name__", "") == "send":
                value(phase=["checking", 7])
                value(result={"num_passed": 8, "problem": ""})
        frame = frame.f_back
"""


def test_one_that_is_aimed_at_the_runner_is_flagged(tmp_path, processes):
    """If this fails because it gets no mark any more, the guide for teachers may say so."""
    [task, *_] = record_of(AIMED, tmp_path, processes)["tasks"]
    assert task["passed"]
    assert {"imports sys", "frames: f_back", "frames: f_locals", "sys: _getframe"} <= {*flags_of(AIMED.encode(), 4)}


# -- flags -------------------------------------------------------------------------------------------------------------

EXERCISE = (CHAPTER.folder / "exercise.py").read_bytes()


def test_flags():
    """What an honest file has no use for is named; our solutions and the skeletons have nothing of it."""
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
        assert flag in flags_of(forged(name).encode(), 4), name
    assert flags_of((CHAPTER.folder / "solution.py").read_bytes(), 4) == []
    assert flags_of(EXERCISE, 4) == flags_of(b"def (", 4) == []


def test_flags_are_short_and_import_nothing_that_the_file_names():
    """A module may do anything when it is imported; a cell with many names is longer than a csv reader takes."""
    names = ", ".join(f"name_{number}" for number in range(15_000))
    source = f"from nanovllm import {names}\nfrom nanovllm.checks.sandbox_process import child"
    sys.modules.pop("nanovllm.checks.sandbox_process", None)
    one, other = flags_of(source.encode(), 4)
    assert one.startswith("imports nanovllm.checks.sandbox_process: child") and len(other) < 300
    assert "nanovllm.checks.sandbox_process" not in sys.modules


SCHEDULER = "from nanovllm.core.scheduler import Scheduler as S\n"
BORROWED = {
    f"{SCHEDULER}schedule = S.schedule": "uses S.schedule, which is the engine's own",
    f"{SCHEDULER}def schedule(self): return S.schedule(self)": "uses S.schedule, which is the engine's own",
    f"{SCHEDULER}schedule = getattr(S, 'schedule')": "uses S.schedule, which is the engine's own",
    "def schedule(self): return type(self).schedule(self)": "uses type(...).schedule, which is the engine's own",
    f"{SCHEDULER}schedule = S.__dict__['schedule']": "insides: __dict__",
    f"{SCHEDULER}schedule = vars(S)['schedule']": "uses vars",
    "import nanovllm.core.scheduler as s\nschedule = s.Scheduler.schedule": "imports nanovllm.core.scheduler",
    "import urllib.request": "imports urllib, for a network",
    "from http import client": "imports http, for a network",
    "import requests": "imports requests, for a network",
    "import socket": "imports socket, for a network",
    "import posix": "imports posix",
    "from _io import FileIO": "imports _io",
    "import torch\ntorch.os.system('id')": "reaches os",
    "from torch import os": "imports os from torch",
    "import random\nrandom._os.system('id')": "reaches _os",
    "from random import _os": "imports _os from random",
    "import enum\nenum.bltns.open('x')": "reaches bltns",
    "from json import codecs": "imports codecs from json",
    f"{SCHEDULER}setattr(S, 'schedule', None)": "uses setattr",
    f"{SCHEDULER}T = S\nschedule = T.schedule": "hands on S, a class of the engine",
    f"{SCHEDULER}class T(S): pass\nschedule = T.schedule": "hands on S, a class of the engine",
    f"{SCHEDULER}def schedule(self, owner=S): return owner.schedule(self)": "hands on S, a class of the engine",
    "class A: __eq__ = lambda a, b: True": "defines __eq__",
    "def free(manager, seq): return getattr(manager, 'check_integrity')": "names check_integrity",
}


@pytest.mark.parametrize("source", BORROWED)
def test_the_engines_own_method_and_the_network(source):
    """Where the skeleton itself imports the class, too: that it is there is not odd, that it is asked is."""
    assert BORROWED[source] in flags_beside(source.encode(), SCHEDULER.encode())
    honest = f"{SCHEDULER}from nanovllm.core.sequence import SequenceStatus as T\nx = T.PREFILL\ny = type(x).__name__"
    assert flags_beside(honest.encode(), SCHEDULER.encode()) == ["imports nanovllm.core.sequence: SequenceStatus"]
    asks = "def f(a: S, *b: dict[str, S]) -> S | None:\n    x: S = a\n    return isinstance(x, (S, int)) and S(b)\n"
    asks += "Maybe = S | None\nis_s, x, made = issubclass(t, S), cast(S, x), list(map(S, y))\nx.io = a.os\n"
    asks += "match x:\n    case S(): pass"
    assert flags_beside(f"{SCHEDULER}import math, zlib\n{asks}".encode(), SCHEDULER.encode()) == []
