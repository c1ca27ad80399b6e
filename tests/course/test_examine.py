"""Files checked in processes of their own: what a submission does costs its own task only, and all of them end."""

import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from chapters.__main__ import main
from chapters.course import ROOT, find_chapter
from chapters.examine import _Examination, examine
from chapters.runner import Lost, Phase, Run
from tests.marks import by_night
from tests.processes import LIMIT_S, wait_for

CHAPTER = find_chapter(4)  # its checks are quick, and most need no model
SOLUTION = (CHAPTER.folder / "solution.py").read_text("utf-8")
HANGS = "it was not done after 1 s"

# As the last task's function: the others are right.
BODIES = {
    "exit": ("import sys; sys.exit(0)", "SystemExit: 0\na solution returns"),
    "os_exit": ("import os; os._exit(0)", "exit code 0 before it was done"),
    "abort": ("import os; os.abort()", "signal 6"),
    "crash": ("import ctypes; ctypes.string_at(0)", "signal 11"),
    "stops": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", HANGS),
    "catches": ("while True:\n        try: manager.a = 1 / 0\n        except BaseException: pass", HANGS),
    "prints": ("while True: print('y' * 1000)", HANGS),
    "reads": ("input()", "EOFError"),
    "odd_str": ("raise type('E', (Exception,), {'__str__': lambda error: 1 / 0})", "E: <ZeroDivisionError when"),
    "surrogate": ("raise ValueError('\\ud800\\x1b[2J')", r"ValueError: \ud800\x1b[2J"),
    "long": ("raise ValueError('x' * 10**7)", "... (10,000,000 characters)"),
    "closes_all": ("import os; os.closerange(0, 256)", "exit code 1"),
    "writes_to_all": (
        "import os\n    for fd in range(3, 20):\n        try: os.write(fd, b'x\\n')\n        except OSError: 0",
        "something was written into the grader's own pipe",
    ),
    "forks": ("import os\n    os.fork()", "reference counts must be 0"),
}
FILES = {
    "os_exit_at_import": ("import os; os._exit(0)", "cannot be loaded: the program was ended with exit code 0"),
    "hangs_at_import": ("while True: pass", f"hangs_at_import.py cannot be loaded: {HANGS}"),
    "no_python": ("def broken(:", "SyntaxError: invalid syntax\nno_python.py, line 1: def broken(:"),
    "zero": ("x = 1 / 0", "ZeroDivisionError: division by zero\nzero.py, line 1: x = 1 / 0"),
    "nothing": ("x = 1", "nothing.py has no function free"),
    "no_function": (f"{SOLUTION}\nfree = 5", "free in no_function.py is no function: it is of type int"),
    "no_text": ("# é".encode("latin-1"), "it is not utf-8 text (byte 0xe9 in line 1); save the file as UTF-8"),
    "null": ("x = '\0'", "null bytes"),
    "lives_on": (f"{SOLUTION}\nimport threading, time\nthreading.Thread(target=time.sleep, args=(10**6,)).start()", ""),
    "right": (SOLUTION, ""),
}


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("chapters.__main__.find_model", lambda name: (None, "a test"))


def write(folder: Path) -> None:
    for name, (body, _) in BODIES.items():
        (folder / f"{name}.py").write_text(f"{SOLUTION}\n\ndef free(manager, seq):\n    {body}\n", "utf-8")
    for name, (source, _) in FILES.items():
        (folder / f"{name}.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    (folder / "a_folder.py").mkdir()
    (folder / ".hidden.py").write_text("")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="os.fork and signals")
def test_a_folder_of_bad_files(tmp_path, no_model, capfd):
    """One record each, in the order of names. Without a model the right ones do not count as passed, either."""
    write(tmp_path)
    assert main(["check", "4", "--file", str(tmp_path), "--json", "--limit", "1"]) == 1
    records = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    expected = {**BODIES, **FILES, "a_folder": ("", "a_folder.py cannot be read: Is a directory")}
    assert [Path(record["file"]).stem for record in records] == sorted(expected)
    for record in records:
        tasks, said = record["tasks"], expected[Path(record["file"]).stem][1]
        assert record["chapter"] == 4 and not record["passed"] and not any(task["passed"] for task in tasks)
        assert [task["task"] for task in tasks] == ["allocate", "append_slots", "free"]
        if HANGS not in str(tasks):  # where others keep the machine busy, any check may take that long
            assert (said or "left open without a model: 2") in tasks[-1]["message"], record
            assert said or tasks[-1]["checks_passed"] == tasks[-1]["checks"] - 2
        else:
            assert record["seconds"] >= 1, record


def test_a_lost_process_costs_one_task(tmp_path):
    file = tmp_path / "ada.py"
    body = "print('here')\n    import os\n    os._exit(0)"
    file.write_text(f"{SOLUTION}\n\ndef append_slots(manager, seq, num_tokens=1):\n    {body}\n")
    first, lost, last = examine(CHAPTER, file, None)
    assert first.open and not first.problem and last.open and not last.problem
    assert lost.num_passed == 0 and "exit code 0" in lost.problem and lost.printed == "here\n"
    assert lost.section == "One token more" and lost.seconds > 0


def test_a_loop_that_never_ends_is_told_of_slow_machines(tmp_path):
    """At its check, with its heading; and a single task can be asked for."""
    file = tmp_path / "ada.py"
    file.write_text(f"{SOLUTION}\n\ndef free(manager, seq):\n    while seq.block_table: pass\n")
    [result] = examine(CHAPTER, file, None, 0.5, only="free")
    assert result.num_passed == 0 and result.section == "Giving blocks back"
    assert "it was not done after 0.5 s: " in result.problem and "is there a loop that never ends?" in result.problem
    assert "slow or busy needs more time: --limit 5" in result.problem
    with pytest.raises(ValueError, match="chapter 4 has no task Free; it has allocate, append_slots, free"):
        list(examine(CHAPTER, file, None, only="Free"))


@pytest.mark.parametrize(
    ("number", "task", "module", "counted"),
    [(4, "free", "os", 'environ["OMP_NUM_THREADS"]'), by_night(10, "fold", "torch", "get_num_threads()")],
)
def test_one_thread(number, task, module, counted, tmp_path, monkeypatch):
    """A right solution is not called an endless loop because PyTorch's threads wait for one another."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    file = tmp_path / "ada.py"
    source = f"import {module}\n\ndef {task}(*given):\n    raise ValueError(f'{{{module}.{counted}}} threads')\n"
    file.write_text(source, "utf-8")
    [result] = examine(find_chapter(number), file, None, only=task)
    assert "ValueError: 1 threads" in result.problem


def test_no_engine_is_loaded_for_a_file_that_fails_before(tmp_path):
    """A model that cannot be loaded is told of where a check asks for it."""
    file = tmp_path / "ada.py"
    file.write_text(f"{SOLUTION}\n\ndef allocate(manager, seq):\n    raise NotImplementedError\n")
    [result] = examine(CHAPTER, file, str(tmp_path / "nowhere"), only="allocate")
    assert result.not_started
    with pytest.raises(ValueError, match="the engine cannot be loaded: "):
        list(examine(CHAPTER, file, str(tmp_path / "nowhere"), only="free"))


def test_a_run_that_begins_while_all_end(monkeypatch, tmp_path):
    """It is ended, too, and nobody waits for it."""

    class Begun:
        def __init__(self, *given, **arguments):
            examination.end()

        def end(self):
            ended.append(self)

    ended: list[Begun] = []
    monkeypatch.setattr("chapters.examine.Run", Begun)
    examination = _Examination(tmp_path / "ada.py", 1.0, "no:target", {})
    assert examination.of(CHAPTER.module("checks").TASKS[0]).num_passed == 0 and len(ended) == 1


def test_what_is_printed_is_cut(tmp_path):
    file = tmp_path / "ada.py"
    file.write_text("for i in range(100_000):\n    print(i)\nprint('\\x1b[2J', end='')\n")
    first, *_ = examine(CHAPTER, file, None)
    assert first.printed.startswith("... (588,894 bytes in all)\n") and first.printed.endswith("\n99999\n\\x1b[2J")
    assert len(first.printed) < 12_000


def test_a_secret_comes_before_what_is_said():
    """The process of a Run says phases, then what the function has returned; nothing else is believed."""
    run = Run("tests.course.test_examine:two_phases", word="so")
    try:
        assert [run.hear(LIMIT_S) for _ in range(3)] == [Phase("one", 0), Phase("two", 2), {"word": "so"}]
        with pytest.raises(Lost, match="exit code 0"):
            run.hear(LIMIT_S)
    finally:
        run.end()
    run = Run("tests.course.test_examine:writes_of_its_own")
    try:
        with pytest.raises(Lost, match="something was written into the grader's own pipe"):
            run.hear(LIMIT_S)
    finally:
        run.end()


def two_phases(tell, word):
    tell("one")
    tell("two", 2)
    return {"word": word}


def writes_of_its_own(tell):
    for fd in range(3, 64):
        try:
            os.write(fd, b'00 {"result": "forged"}\n')
        except OSError:
            continue


def ended(process_id: int) -> bool:
    """Or a zombie, of which its new parent has not heard yet."""
    try:
        return not Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return True


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@on_linux
def test_started_processes_end_with_the_submission(tmp_path):
    """Those of its group. (What has left it stays: marks are for a container.)"""
    file, note = tmp_path / "ada.py", tmp_path / "id"
    start = "p = subprocess.Popen(['sleep', '100000'])"
    file.write_text(f"import subprocess\n{start}\nopen({str(note)!r}, 'a').write(f'{{p.pid}} ')\n")
    assert all("no function" in result.problem for result in examine(CHAPTER, file, None))
    process_ids = [int(each) for each in note.read_text().split()]
    assert len(process_ids) == 3
    wait_for(lambda: all(map(ended, process_ids)))


@pytest.fixture(scope="module")
def edition(tmp_path_factory) -> Path:
    """The course and the engine in a folder where exercise.py may be written."""
    folder = tmp_path_factory.mktemp("edition")
    for name in ("chapters", "nanovllm"):
        shutil.copytree(ROOT.parent / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


OWN = {  # in one's own exercise.py, and what is said then
    "def allocate(:": "exercise.py cannot be loaded: SyntaxError: invalid syntax\nexercise.py, line 1: def allocate(:",
    "import numpyy": "exercise.py cannot be loaded: ModuleNotFoundError: No module named 'numpyy'",
    "raise SystemExit(0)": "exercise.py cannot be loaded: SystemExit: 0",
    "import time; time.sleep(1000)": "exercise.py cannot be loaded: it was not done after 3 s",
}


@pytest.mark.parametrize("source", OWN)
def test_an_own_exercise_that_cannot_be_loaded(source, edition, processes):
    """It is imported on its own clock, and where an error in it is one of its own."""
    (edition / "chapters" / CHAPTER.folder.name / "exercise.py").write_text(source, "utf-8")
    command = ["check", "4", "--task", "free", "--no-model", "--limit", "3", "--json"]
    environment = os.environ | {"XDG_DATA_HOME": str(edition), "PYTHONPATH": ""}
    code, out, err = processes.run("-m", "chapters", *command, cwd=edition, env=environment)
    assert code == 1, err
    [task] = json.loads(out)["tasks"]
    assert task["message"].startswith(OWN[source])


SENDS = """
import sys

def free(manager, seq):
    frame = sys._getframe()
    while "send" not in frame.f_locals: frame = frame.f_back
    frame.f_locals["send"](result={"refused": "gone"})
"""


def test_one_odd_file_does_not_end_the_check_of_a_folder(tmp_path, no_model, capsys):
    """Whatever it sends is text: a heading is no markup, and a verdict is about its own file."""
    marks = "from chapters.expect import Wrong\ndef free(manager, seq): raise Wrong('no', section='[/b]\\x1b')"
    for name, source in {"a.py": marks, "b.py": SENDS, "c.py": SOLUTION}.items():
        (tmp_path / name).write_text(source, "utf-8")
    problem = {"num_passed": 0, "problem": "\x1b]0;owned\x07" + "y" * 50_000}
    (tmp_path / "d.py").write_text(SENDS.replace('{"refused": "gone"}', repr(problem)), "utf-8")
    assert main(["check", "4", "--file", str(tmp_path), "--task", "free"]) == 2
    said = capsys.readouterr()
    assert "Read again: [/b]\\x1b\n" in said.out and "free: passed as far as it goes" in said.out
    assert f"{tmp_path / 'b.py'}: gone" in said.err
    assert "    \\x1b]0;owned\\x07yyy" in said.out and "\x1b" not in said.out and len(said.out) < 12_000


def test_a_line_without_an_end_is_not_kept():
    run = Run("tests.course.test_examine:writes_for_ever")
    try:
        with pytest.raises(Lost, match="something was written into the grader's own pipe"):
            run.hear(30)
    finally:
        run.end()


def writes_for_ever(tell):
    while True:
        for fd in range(3, 64):
            with suppress(OSError):
                os.write(fd, b"x" * (1 << 16))


GRADE = "import sys, chapters.__main__ as m; m.find_model = lambda name: (None, ''); sys.exit(m.main(sys.argv[1:]))"


@on_linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_grader_that_is_stopped_leaves_nothing(tmp_path, processes, number):
    file, note = tmp_path / "ada.py", tmp_path / "id"
    file.write_text(f"import os\nopen({str(note)!r}, 'a').write(f'{{os.getpid()}} ')\nwhile True: pass\n")
    grader = processes.start("-c", GRADE, "check", "4", "--file", str(file), "--jobs", "1")
    wait_for(lambda: note.exists() and note.read_text().endswith(" "))
    os.kill(grader.pid, number)
    grader.communicate(timeout=LIMIT_S)
    assert grader.returncode == (130 if number == signal.SIGINT else -number)
    wait_for(lambda: all(ended(int(each)) for each in note.read_text().split()))


def test_mistakes_of_the_grader(tmp_path, no_model, monkeypatch, capsys):
    assert main(["check", "4", "--file", "nowhere.py"]) == 2 and "nowhere.py is not a file" in capsys.readouterr().err
    assert main(["check", "4", "--file", str(tmp_path)]) == 2 and "without .py files" in capsys.readouterr().err
    assert main(["check", "4", "--no-model", "--model", "x"]) == 2
    assert "--no-model takes no --model: checks that need one stay open" in capsys.readouterr().err
    assert main(["check", "4", "--task", "fold"]) == 2 and "chapter 4 has no task fold" in capsys.readouterr().err
    for limit in ("0", "nan", "inf", "soon"):
        with pytest.raises(SystemExit, match="2"):
            main(["check", "4", "--limit", limit])
    monkeypatch.setattr("chapters.__main__.find_model", lambda name: (str(tmp_path), ""))
    assert main(["check", "4", "--solution"]) == 2
    assert "the engine cannot be loaded: " in capsys.readouterr().err
