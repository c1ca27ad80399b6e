"""examples/gpu_report.py: on the pretend GPU from end to end; what goes wrong in a part stays in it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM
from nanovllm.worker.cpu.threads import num_cpus
from tests.checkpoints import make_checkpoint

ROOT = Path(__file__).parent.parent
NAMES = ["versions", "tests", "memory", "throughput", "requests", "steps", "kinds", "cpu"]
ROW, TEXT = 'print("RESULT " + \'{"n": 1234}\', flush=True); ', 'print("RESULT " + \'"a note"\', flush=True); '


@pytest.fixture
def script():
    """script(name) -> an example as a module."""
    return importlib.import_module


@pytest.mark.nightly
def test_on_a_pretend_gpu(processes, tmp_path):
    out = tmp_path / "report"
    script = str(ROOT / "examples" / "gpu_report.py")
    status, printed, err = processes.run(script, "--pretend", "--out", str(out), cwd=tmp_path)
    assert status == 0, err
    text, report = out.with_suffix(".md").read_text("utf-8"), json.loads(out.with_suffix(".json").read_text("utf-8"))
    assert text in printed and "mean nothing" in text
    assert {part["name"]: part["state"] for part in report["parts"]} == dict.fromkeys(NAMES, "done")
    rows = {part["name"]: [row for row in part["found"] if isinstance(row, dict)] for part in report["parts"]}
    assert [row for part in rows.values() for row in part if "error" in row] == []
    compared = {row["backend"]: row for row in rows["tests"] if "backend" in row}
    assert {row["tokens in float32"] for row in compared.values()} == {"as transformers'"}
    assert compared["Triton, graphs"]["attention"] == "triton_kernels"
    assert compared["Triton, graphs"]["decodes"] == "replayed"
    assert max(float(row["float16"].split()[0]) for row in compared.values()) < 0.1
    assert all(row["failed"] == row["errors"] == 0 for row in rows["tests"] if "tests" in row)
    assert all(row["output tokens"] > 0 for row in rows["throughput"])
    assert all(row["num_cached_tokens, cold"] == 0 < row["num_cached_tokens, cached"] for row in rows["requests"])
    assert {row["batch"] for row in rows["steps"]} == {1, 2, 4} and all("syncs" in row for row in rows["steps"])
    assert [row["tests"].split(".")[-1] for row in rows["tests"] if "tests" in row] == ["test_backends", "test_kernels"]
    assert "exit status" not in text
    decodes = [row for row in rows["kinds"] if row["step"] == "decode" and row["backend"] == "Triton, graphs"]
    expected = [(1, 1, 1)] + [(2, 1, 1)] * 3  # logprobs, the last kind, are read once more
    assert [(row["h2d"], row["d2h"], row["replays"]) for row in decodes[:4]] == expected
    assert rows["cpu"][0]["threads"] == 1 and {row["same bits"] for row in rows["cpu"]} == {"yes"}


@pytest.mark.nightly
def test_the_cpu_alone(script, tmp_path, monkeypatch, capsys):
    """The part, and each number of threads, are processes that run the script; what starts them runs in this one."""
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--cpu", "--short", "--out", str(tmp_path / "report")])
    script("gpu_report").main()
    assert "# nanovllm on a CPU" in capsys.readouterr().out
    [part] = json.loads((tmp_path / "report.json").read_text("utf-8"))["parts"]
    assert part["name"] == "cpu" and part["state"] == "done"
    rows = [row for row in part["found"] if isinstance(row, dict)]
    assert [row["threads"] for row in rows] == [num for num in (1, 2, 4, 8, 16) if num <= num_cpus()]
    assert len({row["digest"] for row in rows}) == 1
    assert all(row[name] > 0 for row in rows for name in row if name.endswith("tokens/s"))


def test_tests_that_are_late_on_windows(script, tmp_path, monkeypatch):
    """Which knows no SIGINT of another process."""
    report = script("gpu_report")

    class Late:
        returncode = None

        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> "Late":
            return self

        def __exit__(self, *_: object) -> None: ...

        def wait(self, timeout: float) -> None:
            raise subprocess.TimeoutExpired("pytest", timeout)

        def send_signal(self, number: int) -> None:
            raise ValueError(f"Unsupported signal: {number}")

        def terminate(self) -> None:
            self.returncode = 1

    there = SimpleNamespace(platform="win32", executable=sys.executable)
    monkeypatch.setattr(report, "sys", there)
    monkeypatch.setattr(report, "subprocess", SimpleNamespace(Popen=Late, TimeoutExpired=subprocess.TimeoutExpired))
    cut, *others = report.test_file(report.Run(report.SHORT, tmp_path, 0.0), "test_kernels")
    assert "test_kernels was stopped" in cut and others[0] == "pytest of test_kernels, exit status 1:"


def test_another_digest_shows(script, tmp_path, monkeypatch):
    report = script("gpu_report")
    digests = iter(["x", "y", "x"])

    def child(command: list[str], env: dict[str, str]) -> dict:
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        return {"threads seen": env["OMP_NUM_THREADS"], "digest": next(digests)}

    monkeypatch.setattr(report, "num_cpus", lambda: 5)
    monkeypatch.setattr(report, "in_child", child)
    monkeypatch.setattr(report, "environment", lambda: "a machine")
    rows = [row for row in report.cpu(report.Run(report.SHORT, tmp_path, 0.0)) if isinstance(row, dict)]
    assert [(row["threads"], row["threads seen"], row["same bits"]) for row in rows] == [
        (1, "1", "yes"),
        (2, "2", "no"),
        (4, "4", "yes"),
    ]


@pytest.mark.nightly
def test_a_part_that_fails_or_never_ends_stops_no_other(script, tmp_path):
    reporting = script("reporting")
    codes = {
        "hangs": ROW + TEXT + "import time; time.sleep(60)",
        "raises": ROW + TEXT + "raise ValueError('no such kernel')",
        "dies": "import os; os._exit(7)",
        "works": ROW + TEXT,
    }

    def part(name: str) -> object:
        def function(run: object) -> None: ...

        function.__name__ = name
        return reporting.Part(function, name.title(), "Numbers.", 4 if name == "hangs" else 30)

    before: list[str] = []

    def command_of(part, limit_s: float) -> list[str]:
        if before:  # both files hold all parts that have ended
            on_disk = json.loads((tmp_path / "report.json").read_text("utf-8"))
            assert [p["name"] for p in on_disk["parts"]] == before
            text = (tmp_path / "report.md").read_text("utf-8")
            assert [name for name in codes if f"## {name.title()}" in text] == before
        before.append(part.name)
        return [sys.executable, "-c", codes[part.name]]

    report: dict = {"command": "", "date": "", "short": True, "pretend": False, "cpu": False, "parts": []}
    reporting.run_parts([part(name) for name in codes], command_of, report, str(tmp_path / "report"))
    assert {part["name"]: part["state"] for part in report["parts"]} == {
        "hangs": "cut: stopped after 4 s",
        "raises": "failed (exit status 1)",
        "dies": "failed (exit status 7)",
        "works": "done",
    }
    found = [{"n": 1234}, "a note"]
    assert all(part["found"] == ([] if part["name"] == "dies" else found) for part in report["parts"])
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "ValueError: no such kernel" in text and text.count("| 1,234 |") == text.count("a note\n") == 3
    assert json.loads((tmp_path / "report.json").read_text("utf-8")) == report


def test_a_part_ends_with_its_report(script, monkeypatch):
    """Ctrl-C does not reach the part by itself."""
    reporting = script("reporting")
    started, wait = list[subprocess.Popen](), subprocess.Popen.wait

    def interrupted(process: subprocess.Popen, *args: float) -> int:
        if process in started:
            return wait(process, *args)
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    part = reporting.Part(test_a_part_ends_with_its_report, "Sleeps", "", 60)
    with pytest.raises(KeyboardInterrupt):
        reporting.run_part(part, [sys.executable, "-c", "import time; time.sleep(60)"], 60)
    [process] = started
    assert process.returncode is not None


def test_a_backend_that_fails_says_where_and_the_next_is_measured(script, tmp_path, monkeypatch, capsys):
    report = script("gpu_report")
    monkeypatch.setattr(report, "installed_backends", lambda: ["Triton", "PyTorch"])

    def rows_of(backend: str):
        yield {"n": 1}
        if backend == "Triton":
            raise RuntimeError("out of registers\nmore of it")
        yield {"n": 2}

    *others, first, failed = report.Run(report.SHORT, tmp_path, 0.0).on_each(rows_of)
    assert first == {"backend": "Triton", "n": 1} and others == [{"backend": "PyTorch", "n": n} for n in (1, 2)]
    assert failed["error"].startswith("RuntimeError: out of registers (tests/test_gpu_report.py:")
    assert "more of it" in capsys.readouterr().err


def test_without_a_gpu(script, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py"])
    with pytest.raises(SystemExit) as ends:
        script("gpu_report").main()
    assert ends.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no GPU" in line and "--pretend" in line


def test_a_trace_as_numbers_of_one_step(script):
    def event(category: str, name: str, begin: float, duration: float) -> dict:
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration}

    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "decode steps", 100, 4000),
        event("gpu_user_annotation", "decode steps", 150, 3900),
        event("cuda_runtime", "cudaDeviceSynchronize", 5000, 10),  # the profiler's own
        event("cuda_runtime", "cudaStreamSynchronize", 1000, 10),
        event("cuda_runtime", "cudaStreamSynchronize", 3000, 10),
        event("cuda_runtime", "cudaLaunchKernel", 110, 5),
        event("cuda_driver", "cuLaunchKernelEx", 120, 5),
        event("cuda_runtime", "cudaGraphLaunch", 130, 5),
        event("cuda_runtime", "cudaGraphLaunch", 2130, 5),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 200, 100),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 900, 100),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2300, 100),
        event("kernel", "a", 300, 400),
        event("kernel", "b", 500, 400),  # beside a
        event("kernel", "c", 2400, 200),
    ]
    row = script("profile_step").read_trace(events, 2, wall_ms=2.0)
    assert row == {
        "kernels": 1.5,
        "ms in kernels": 0.5,
        "ms GPU idle": 2.0 - 0.55,  # of each 1.1 ms the GPU is busy in two steps
        "copies to GPU": 0.5,
        "from GPU": 0.5,
        "waits": 1,
        "launches": 1,
        "graphs": 1,
    }


@pytest.mark.filterwarnings("ignore")
def test_the_profiled_steps_are_the_next_ones(script, tmp_path, monkeypatch):
    """A step with prompts is computed once. How long the GPU was idle is not said where no wall time is known."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps = []
    llm = SimpleNamespace(engine=SimpleNamespace(step=lambda: steps.append(len(steps))))
    report = script("gpu_report")
    for num_steps in (1, 2):
        steps.clear()
        row = report.cost_of_steps(llm, report.Run(report.SHORT, tmp_path, 0.0), num_steps)
        assert len(steps) == num_steps and "ms GPU idle" not in row and row["kernels"] == 0


def test_each_part_of_a_step_counts_once(script, tmp_path, monkeypatch):
    """By a clock that is one second later whenever somebody looks at it."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    llm = LLM(str(make_checkpoint(tmp_path, "llama")), max_model_len=64)
    llm.engine.add_request(None, [5, 6, 7], script("measuring").greedy(8))
    monkeypatch.setattr(script("measuring"), "time", SimpleNamespace(perf_counter=iter(range(1000)).__next__))
    found = script("profile_step").host_times(llm, 3)
    assert {name: ms / 1e3 for name, ms in found.items()} == {
        "step": 11,
        "schedule": 1,
        "run": 2,  # without pack
        "pack": 1,
        "update": 1,
        "outputs": 1,
    }


def test_each_kind_computes_its_prompts(script, tmp_path, monkeypatch):
    """Those of the kind before are the same, and were found in the cache."""
    report = script("gpu_report")
    llm = LLM(str(make_checkpoint(tmp_path, "llama", vocab_size=10_000)), block_size=4, max_model_len=64)

    def computed(llm: LLM, run: object, num_steps: int) -> dict[str, int]:
        num_tokens = 0
        for _ in range(num_steps):
            llm.engine.step()
            num_tokens += llm.engine.last_scheduled.num_tokens
        return {"computed": num_tokens}

    monkeypatch.setattr(report, "cost_of_steps", computed)
    monkeypatch.setattr(report.Run, "backends", lambda run: ["Triton"])
    monkeypatch.setattr(report.Run, "engine", lambda run, backend: llm)
    rows = list(report.kinds(report.Run(report.SHORT, tmp_path, 0.0)))
    assert [row["computed"] for row in rows] == [16, 4] * len(report.KINDS)


PASSES_AND_FAILS = """
import pytest
def test_passes(record_property):
    for name, value in {"architecture": "llama", "backend": "Triton", "tokens": "ok"}.items():
        record_property(name, value)
def test_knows_more(record_property):
    for name, value in {"architecture": "llama", "backend": "Triton", "float16": "0.01"}.items():
        record_property(name, value)
def test_fails(): assert 1 == 2
@pytest.mark.skip
def test_is_skipped(): ...
"""


def test_what_pytest_has_found(script, tmp_path):
    """pytest itself writes it: what tests of one architecture and backend have recorded is one row."""
    (tmp_path / "test_a.py").write_text(PASSES_AND_FAILS, "utf-8")
    options = ["-o", "junit_family=legacy", "--junitxml=tests.xml", "-p", "no:cacheprovider", "-p", "no:xdist"]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # it starts in a fraction of the time
    subprocess.run([sys.executable, "-m", "pytest", "-q", *options], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    counts, recorded, failure = script("reporting").read_junit(tmp_path / "tests.xml")
    assert counts == {"tests": "test_a", "passed": 2, "failed": 1, "errors": 0, "skipped": 1}
    assert recorded == {"architecture": "llama", "backend": "Triton", "tokens": "ok", "float16": "0.01"}
    assert failure.startswith("`test_a::test_fails`: ") and "1 == 2" in failure


def test_a_table(script):
    shown = script("reporting").shown
    rows = [{"backend": "Triton", "tokens/s": 1434.13, "n": 12345}, {"backend": "a|b\nc", "tokens/s": 0.01234, "n": 1}]
    table = script("measuring").markdown(rows[0], [[shown(value) for value in row.values()] for row in rows])
    assert table.splitlines() == [
        "| backend | tokens/s | n      |",
        "|---------|----------|--------|",
        "| Triton  | 1,434    | 12,345 |",
        "| a\\|b c  | 0.0123   | 1      |",
    ]
