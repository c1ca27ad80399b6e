"""A process of the `nanovllm` command: what it does at its end, and what it tells the shell."""

import gc
import os
import subprocess
import sys

import pytest

from nanovllm.checks.callers import importing
from tests.processes import LIMIT_S

BEGIN = """
import atexit, gc, os, sys, threading, time
from nanovllm.checks.callers import importing
from nanovllm.tools.own_process import run_as_process

def main():
    atexit.register(lambda: print("registered", end=" "))
    print("begun", end=" ", flush=True)
"""


def ended(end: str) -> tuple[int, str, str]:
    code = BEGIN + "".join(f"    {line}\n" for line in end.splitlines()) + "run_as_process(main)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("return 0", 0, ""),
        ("return 7", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('wrong')", 1, "wrong"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_its_exit_code(end, status, said):
    code, out, err = ended(end)
    assert (code, out) == (status, "begun registered ")
    assert said in err if said else not err


def test_it_waits_for_its_threads():
    thread = "threading.Thread(target=lambda: (time.sleep(0.2), print('thread', end=' '))).start()\nreturn 0"
    assert ended(thread)[:2] == (0, "begun thread registered ")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_its_own_exit_code():
    fork = "if pid := os.fork():\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), end=' ', flush=True)\n"
    assert ended(fork + "    return 3\nsys.exit(4)")[:2] == (3, "begun registered 4 registered ")


def test_nothing_is_taken_apart():
    code, out, _ = ended("global kept\nkept = type('Kept', (), {'__del__': lambda self: print('gone')})()\nreturn 0")
    assert (code, out) == (0, "begun registered ")


def test_the_collector_forgets_what_was_imported():
    inside = "with importing():\n    print(gc.isenabled(), end=' ')\nprint(gc.isenabled(), gc.get_freeze_count() > 0)"
    assert ended(inside + "\nreturn 0")[1] == "begun False True True\nregistered "


@pytest.mark.parametrize("enabled", [True, False])
def test_elsewhere_the_collector_is_as_it_was(enabled):
    before, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError), importing():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() is enabled and gc.get_freeze_count() == frozen
    finally:
        (gc.enable if before else gc.disable)()
