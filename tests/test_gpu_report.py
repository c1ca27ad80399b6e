"""examples/gpu_report.py: on the pretend GPU from end to end; what goes wrong in a part stays in it."""

import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from examples import gpu_report
from examples.gpu_report import (
    Part,
    Run,
    Section,
    difference,
    read_pytest,
    read_trace,
    run_in_this_process,
    run_parts,
    table,
)
from nanovllm.worker.cpu import threads
from nanovllm.worker.cpu.threads import num_cpus

ROOT = Path(__file__).parent.parent
WRITES = "import json, sys; json.dump(dict(rows=[dict(n=1234)], notes=['a note'], cut=None), open(sys.argv[1], 'w')); "


@pytest.mark.ci
def test_on_a_pretend_gpu(processes, tmp_path):
    out = tmp_path / "report"
    script = str(ROOT / "examples" / "gpu_report.py")
    status, printed, err = processes.run(script, "--pretend", "--out", str(out), cwd=tmp_path)
    assert status == 0, err
    text, report = out.with_suffix(".md").read_text("utf-8"), json.loads(out.with_suffix(".json").read_text("utf-8"))
    assert text in printed and "mean nothing" in text
    assert {part["name"]: part["state"] for part in report["parts"]} == {part.name: "done" for part in gpu_report.PARTS}
    rows = {part["name"]: part["rows"] for part in report["parts"]}
    assert [row for part in rows.values() for row in part if "error" in row] == []
    assert {row["tokens"] for row in rows["agreement"]} == {"ok"}
    assert max(float(row["float16"]) for row in rows["agreement"]) < 0.1
    assert all(row["output tokens"] > 0 for row in rows["throughput"])
    assert all(row["num_cached_tokens, cold"] == 0 < row["num_cached_tokens, cached"] for row in rows["first_token"])
    assert {row["batch"] for row in rows["steps"]} == {1, 2, 4} and all("syncs" in row for row in rows["steps"])
    assert rows["tests"][0]["exit status"] == "0"
    decodes = [row for row in rows["kinds"] if row["step"] == "decode" and row["backend"] == "Triton, graphs"]
    expected = [(1, 1, 1)] + [(2, 1, 1)] * 3  # logprobs, the last kind, are read once more
    assert [(row["h2d"], row["d2h"], row["replays"]) for row in decodes[:4]] == expected
    assert rows["cpu"][0]["threads"] == 1 and {row["same bits"] for row in rows["cpu"]} == {"yes"}


def test_the_cpu_alone(processes, tmp_path):
    script = str(ROOT / "examples" / "gpu_report.py")
    status, printed, err = processes.run(script, "--cpu", "--short", "--out", str(tmp_path / "report"), cwd=tmp_path)
    assert status == 0, err
    assert "# nanovllm on a CPU" in printed
    [part] = json.loads((tmp_path / "report.json").read_text("utf-8"))["parts"]
    assert part["name"] == "cpu" and part["state"] == "done"
    assert [row["threads"] for row in part["rows"]] == [num for num in (1, 2, 4, 8, 16) if num <= num_cpus()]
    assert len({row["digest"] for row in part["rows"]}) == 1
    assert all(row[name] > 0 for row in part["rows"] for name in row if name.endswith("tokens/s"))


def test_more_threads_than_time(tmp_path, monkeypatch):
    """What has been measured is kept, fewest threads first; a digest that differs shows."""
    sizes = replace(gpu_report.SHORT, cpu_models={"a": gpu_report.TINY, "b": gpu_report.TINY})
    digests = iter(["x", "x", "y", "z"])

    def child(command: list[str], *, env: dict[str, str], **options) -> subprocess.CompletedProcess:
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        found = {"threads seen": env["OMP_NUM_THREADS"], "digest": next(digests, None)}
        if found["digest"] is None:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 0, json.dumps(found))

    monkeypatch.setattr(threads, "num_cpus", lambda: 5)
    monkeypatch.setattr(gpu_report.subprocess, "run", child)
    monkeypatch.setattr(gpu_report, "make_checkpoint", lambda folder, shape: folder)
    section = Section(tmp_path / "section.json", until=time.time() + 60)
    with pytest.raises(gpu_report.OutOfTime, match="within: b, 2 threads"):
        gpu_report.cpu_threads(Run(sizes, tmp_path), section)
    rows = json.loads((tmp_path / "section.json").read_text("utf-8"))["rows"]
    assert [(row["model"], row["threads"], row["threads seen"], row["same bits"]) for row in rows] == [
        ("a", 1, "1", "no"),
        ("a", 2, "2", "yes"),
        ("a", 4, "4", "yes"),
        ("b", 4, "4", "yes"),
    ]


@pytest.mark.ci
def test_a_part_that_fails_or_never_ends_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "GRACE_S", 1)
    codes = {
        "hangs": WRITES + "import time; time.sleep(60)",
        "raises": WRITES + "raise ValueError('no such kernel')",
        "dies": "import os; os._exit(7)",
        "is cut": WRITES.replace("cut=None", "cut='out of time before: Triton'"),
        "works": WRITES,
    }
    parts = [Part(name, name.title(), "Numbers.", gpu_report.versions, 4 if name == "hangs" else 30) for name in codes]
    before = []

    def command_of(part: Part, path: Path, seconds: float) -> list[str]:
        if before:  # both files hold all parts that have ended
            on_disk = json.loads((tmp_path / "report.json").read_text("utf-8"))
            assert [p["name"] for p in on_disk["parts"]] == before
            text = (tmp_path / "report.md").read_text("utf-8")
            assert [name for name in codes if f"## {name.title()}" in text] == before
        before.append(part.name)
        return [sys.executable, "-c", codes[part.name], str(path)]

    report: dict = {"command": "", "date": "", "short": True, "pretend": False, "cpu": False, "parts": []}
    run_parts(parts, command_of, report, str(tmp_path / "report"), Console(quiet=True))
    assert {part["name"]: part["state"] for part in report["parts"]} == {
        "hangs": "cut",
        "raises": "failed (exit status 1)",
        "dies": "failed (exit status 7)",
        "is cut": "cut",
        "works": "done",
    }
    assert all(part["rows"] == ([] if part["name"] == "dies" else [{"n": 1234}]) for part in report["parts"])
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "stopped after 5 s" in text and "ValueError: no such kernel" in text and "before: Triton" in text
    assert text.count("| 1,234 |") == text.count("a note\n") == 4
    assert json.loads((tmp_path / "report.json").read_text("utf-8")) == report


def test_a_row_that_fails_says_where_and_the_next_is_measured(tmp_path, monkeypatch, capsys):
    def choice_of_kernels(backend: str, dtype: str) -> str:
        if backend == "Triton":
            raise RuntimeError("out of registers\nmore of it")
        return f"{backend} in {dtype}"

    monkeypatch.setattr(gpu_report, "choice_of_kernels", choice_of_kernels)
    monkeypatch.setattr(gpu_report, "bandwidth", lambda run: 2e12)
    section = Section(tmp_path / "section.json", until=time.time() + 60)
    gpu_report.versions(Run(gpu_report.SHORT, tmp_path), section)
    rows = json.loads((tmp_path / "section.json").read_text("utf-8"))["rows"]
    assert {"what": "torch", "found": torch.__version__} in rows
    failing, following = rows[-2:]
    assert failing["asked for"] == "Triton" and re.fullmatch(
        r"RuntimeError: out of registers \(tests/test_gpu_report.py:\d+\)", failing["bfloat16"]
    )
    assert following["float16"] == "PyTorch in float16"
    assert "more of it" in capsys.readouterr().err


def test_a_part_without_time_left_keeps_its_rows(tmp_path):
    def endless(run: Run, section: Section) -> None:
        for number in itertools.count():
            section.until = time.time() + (1 if number < 2 else -1)
            section.begin(f"row {number}")
            section.add({"number": number})

    section = Section(tmp_path / "section.json", until=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        run_in_this_process(Part("endless", "", "", endless, 1), section, short=True, pretend=False)
    found = json.loads((tmp_path / "section.json").read_text("utf-8"))
    assert found == {"rows": [{"number": 0}, {"number": 1}], "notes": [], "cut": "out of time before: row 2"}


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py"])
    with pytest.raises(SystemExit) as ends:
        gpu_report.main()
    assert ends.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no GPU" in line and "--pretend" in line


def test_a_trace_as_numbers_of_one_step():
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
    row = read_trace(events, 2, wall_ms=2.0)
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


def test_what_pytest_printed():
    begun = """collected 5 items / 1 error
tests/a.py::test_x[1-float32] PASSED                    [ 20%]
tests/a.py::test_x[a space in it] PASSED                [ 40%]
tests/a.py::test_y FAILED                               [ 60%]
tests/a.py::test_z SKIPPED (needs a GPU)                [ 80%]
"""
    counts = {"passed": 2, "failed": 1, "skipped": 1}
    assert read_pytest(begun) == (counts, ["tests/a.py::test_y FAILED"])
    summary = ["FAILED tests/a.py::test_y - assert 1 == 2", "ERROR tests/b.py - ModuleNotFoundError: hypothesis"]
    assert read_pytest("\n".join([begun, "E   ERROR elsewhere", *summary])) == (counts, summary)


def test_log_probabilities_are_compared_up_to_the_first_token_that_differs():
    theirs = torch.zeros(3, 4)
    ours = torch.tensor([[0.0, 0.1, 0, 0], [0, 0, -0.3, 0], [9.0, 0, 0, 0]])
    assert difference(([5, 6, 7], ours), ([5, 8, 7], theirs)) == pytest.approx(0.3)
    assert difference(([5, 6, 7], ours), ([5, 6, 7], theirs)) == 9


def test_a_table():
    rows = [{"backend": "Triton", "tokens/s": 1434.13, "n": 12345}, {"backend": "a|b\nc", "tokens/s": 0.01234, "n": 1}]
    assert table(rows) == [
        "| backend | tokens/s | n      |",
        "|---------|----------|--------|",
        "| Triton  | 1,434    | 12,345 |",
        "| a\\|b c  | 0.0123   | 1      |",
    ]
