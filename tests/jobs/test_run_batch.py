"""Batch jobs: what a file goes through; no end of a process loses or repeats a line."""

import io
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import time
from dataclasses import fields, replace

import pytest

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.jobs import answer_lines as openai_batch
from nanovllm.jobs import run_batch
from nanovllm.jobs.answer_lines import Answer, CustomIds
from nanovllm.jobs.output_file import MODEL_OPTIONS, POOL_OPTIONS, OutputFile, fingerprint
from nanovllm.serving.openai import json_lines as lines
from nanovllm.serving.openai.json_lines import read_lines
from nanovllm.tools import cli
from nanovllm.tools.screen import Screen
from tests.jobs.lines import FOX, line
from tests.marks import by_night
from tests.processes import LIMIT_S

# -- files ------------------------------------------------------------------------------------------------------------


def test_read_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    path = tmp_path / "in"
    path.write_bytes(b"one\n\n  \r\n" + b"x" * 35 + b"\n" + b"y" * 9 + b"\n" + b"z" * 10 + b"\nlast")
    expected = [(1, b"one\n"), (4, b"x" * 10), (5, b"y" * 9 + b"\n"), (6, b"z" * 10), (7, b"last")]
    assert list(read_lines(path)) == expected
    assert list(read_lines(path, path.read_bytes().index(b"y"), 4)) == expected[2:]


def test_custom_ids():
    ids = CustomIds()
    names = ["a", "b", "", "\ud800", "é", "e\u0301", "a" * 100_000, "a\0b"]
    for number, name in enumerate(names, start=1):
        ids.claim(name, number)
    for number, name in enumerate(names, start=1):
        with pytest.raises(ValueError, match=f"is that of line {number} already"):
            ids.claim(name, 100)


MODEL = "b" * 16
ANSWERS = {
    1: Answer(1, "é\u2028", {"text": "ü\n"}),
    5: Answer(5, None, None, "line 5: bad"),
    3: Answer(3, "\ud800", {"text": "\x00"}),
}


@pytest.fixture
def open_output(tmp_path):
    """open_output() -> the output of a job with six lines, of which the second is blank; written is what it holds."""
    source, path = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"one\n\nthree\nfour\nfive\nsix\n")

    def get(written: bytes | None = None) -> OutputFile:
        if written is not None:
            path.write_bytes(written)
        return OutputFile(path, source, MODEL)

    return get


def records_of(output: OutputFile, numbers) -> dict[str, Answer]:
    raws = [b"", b"one\n", b"", b"three\n", b"four\n", b"five\n", b"six\n"]
    return {output.record_id(number, raws[number]): ANSWERS[number] for number in numbers}


def test_output_file(open_output):
    output = open_output()
    assert output.num_lines == 5
    output.append(records_of(output, [1, 5]))
    output.append({})
    output.append(records_of(output, [3]))
    output.close()
    records = [json.loads(raw) for raw in output.path.read_text("ascii").splitlines()]
    expected = records_of(output, ANSWERS)
    assert records == [answer.record(record_id) for record_id, answer in expected.items()]
    again = open_output()
    assert again.answered == expected.keys() and again.num_failed == 1
    with pytest.raises(ValueError, match="is being written by another run-batch"):
        open_output()
    again.close()
    open_output().close()


@pytest.mark.parametrize("tail", [b"", b"\0" * 40, b"\0" * 5 + b"\n"])
def test_torn_output(open_output, monkeypatch, tail):
    """Cut anywhere, followed by zeros or not: the whole records stay, the rest goes."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of them would wait for the disk
    output = open_output()
    output.append(records_of(output, ANSWERS))
    output.close()
    data = output.path.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(data) if byte == ord("\n"))]
    for cut in range(len(data)):
        output = open_output(data[:cut] + tail)
        whole = max(end for end in ends if end <= cut)
        assert output.path.read_bytes() == data[:whole] and len(output.answered) == ends.index(whole)
        output.append(records_of(output, list(ANSWERS)[ends.index(whole) :]))
        output.close()
        assert output.path.read_bytes() == data


def test_foreign_output(open_output):
    """What we did not write is left as it is."""
    output = open_output()
    output.append(records_of(output, [1]))
    output.close()
    record = output.path.read_bytes()
    for content, text in (
        (b"notes\n", "line 1 of .* was not written by run-batch"),
        (b"notes", "line 1 of .* was not written by run-batch"),
        (b"PK\x03\x04\0\0\0\0", "line 1 of .* was not written by run-batch"),
        (b"\0\0\0\x20ftypmp42", "line 1 of .* was not written by run-batch"),
        (b"{}\n", "line 1 of .* was not written"),
        (b'{"id": "batch_123", "error": null}\n', "line 1 of .* was not written"),
        (record + b"notes", "line 2 of .* was not written"),
        (record + b"\n", "line 2 of .* was not written"),
        (record.replace(b'_1"', b'_99"'), "holds answers to another input"),
        (record.replace(b"b" * 16, b"c" * 16), "another model, or with other options .*--served-model-name or --lora"),
        (record + record, "line 2 of .* answers line 1 once more"),
    ):
        with pytest.raises(ValueError, match=text):
            open_output(content)
        assert output.path.read_bytes() == content


def test_model_identity(checkpoint, broken):
    config = EngineConfig(model="x")
    model = fingerprint(broken, config)
    assert fingerprint(checkpoint(), EngineConfig(model="y", max_num_seqs=3)) == model, "only where it lies has changed"
    (broken / "model.safetensors").touch()
    model = fingerprint(broken, config, output_file=broken / "out.json")
    (broken / "out.json").touch()
    assert fingerprint(broken, config, output_file=broken / "out.json") == model != fingerprint(broken, config)


def test_model_identity_is_the_same_in_any_folder(broken, tmp_path, monkeypatch):
    """The names "auto" and "vllm" are no folders, also where there are folders of these names."""
    configs = [EngineConfig(model="x", generation_config=name) for name in ("auto", "vllm")]
    models = [fingerprint(broken, config) for config in configs]
    monkeypatch.chdir(tmp_path)
    for name in ("auto", "vllm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
    assert [fingerprint(broken, config) for config in configs] == models


def test_a_tokenizer_at_home_is_part_of_the_model(checkpoint, broken, monkeypatch):
    monkeypatch.setenv("HOME", str(broken.parent))
    config = EngineConfig(model="x", tokenizer=f"~/{broken.name}")
    model = fingerprint(checkpoint(), config)
    (broken / "tokenizer.json").touch()
    assert fingerprint(checkpoint(), config) != model


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path, checkpoint):
    """write() makes the input; run() runs the command in this process, start() in one of its own."""

    class Command:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        files = ("run-batch", "-i", str(source), "-o", str(target), "--model", str(checkpoint()))
        engine = ("--max-model-len", "256", "--num-gpu-blocks-override", "64", "--max-num-seqs", "32")

        def write(self, lines: list[bytes]) -> None:
            self.source.write_bytes(b"\n".join(lines) + b"\n")

        def run(self, *extra: str) -> int:
            return cli.main([*self.files, *self.engine, *extra])

        def start(self, processes, **options) -> subprocess.Popen:
            return processes.start("-m", "nanovllm.tools.cli", *self.files, *self.engine, **options)

        def size(self) -> int:
            return self.target.stat().st_size if self.target.exists() else 0

        def answers(self) -> dict[str, object]:
            """What each line got, without what may differ from run to run."""
            records = [json.loads(raw) for raw in self.target.read_text("ascii").splitlines()]
            found = {}
            for record in records:
                number = record["id"].rsplit("_", 1)[1]
                assert number not in found, f"line {number} has two records"
                body = record["response"]["body"] if record["response"] else {}
                found[number] = (record["custom_id"], body.get("choices"), record["error"])
            return found

    return Command()


def rows(printed: str) -> dict[str, str]:
    return {
        row.split("│")[1].strip().split(" ")[0]: row.split("│")[2].strip()
        for row in printed.splitlines()
        if row.count("│") == 3
    }


def test_command(job, capsys):
    job.write([line("a", prompt=FOX, max_tokens=2), b"", b"{nope", line("a", prompt=FOX), line("b", prompt=FOX)])
    assert job.run() == 1
    assert rows(capsys.readouterr().out) == {"succeeded": "2", "failed": "2", "of": "0", "not": "0"}
    answers = job.answers()
    assert list(answers) and answers["4"][2]["message"] == "line 4: custom_id 'a' is that of line 1 already"
    before = job.target.read_bytes()
    assert job.run() == 1, "the error records are still there"
    assert rows(capsys.readouterr().out)["of"] == "4" and job.target.read_bytes() == before
    assert job.run("--seed", "1") == 2
    assert "another model" in capsys.readouterr().err
    job.write([line("a", prompt=FOX)])
    assert job.run() == 2 and "another input" in capsys.readouterr().err


def test_lines_that_are_added_to_the_input(job):
    job.write([line("a", prompt=FOX, max_tokens=2)])
    assert job.run() == 0
    before = job.target.read_bytes()
    job.write([line("a", prompt=FOX, max_tokens=2), line("b", prompt=FOX, max_tokens=2)])
    assert job.run() == 0
    assert job.target.read_bytes().startswith(before) and list(job.answers()) == ["1", "2"]


def test_lines_that_are_added_after_a_line_without_an_end(job):
    lines = [line(name, prompt=FOX, max_tokens=2) for name in "abc"]
    job.source.write_bytes(b"\n".join(lines[:2]))
    assert job.run() == 0
    before = job.target.read_bytes()
    job.write(lines)
    assert job.run() == 0
    assert job.target.read_bytes().startswith(before) and list(job.answers()) == ["1", "2", "3"]


def test_first_of_two_ids_wins_after_a_crash(job):
    """Whichever of the two has been answered (the second is, at once, by an error): they do not change places."""
    job.write([line("a", prompt=FOX, max_tokens=2), line("a", prompt=FOX, max_tokens=2)])
    assert job.run() == 1
    records = job.target.read_bytes().splitlines(keepends=True)
    assert b'"error": null' not in records[0]
    for answered in records:
        job.target.write_bytes(answered)
        assert job.run() == 1
        assert job.answers()["1"][2] is None and "that of line 1" in job.answers()["2"][2]["message"]


def test_options_that_change_answers_are_part_of_the_model(broken, tmp_path):
    (tmp_path / "generation_config.json").write_text("{}")
    options = [
        {},
        {"seed": 1},
        {"dtype": "float32"},
        {"hf_overrides": {"rope_theta": 5.0}},
        {"load_format": "dummy"},
        {"tokenizer": str(broken)},
        {"generation_config": "vllm"},
        {"generation_config": str(tmp_path)},
        {"max_model_len": 20},
        {"kv_cache_dtype": "int8"},
        {"mm_processor_kwargs": {"size": {"longest_edge": 64}}},
        {"limit_mm_per_prompt": {"image": 1}},
        {"tower_quantization": "int8"},
        {"scheduling_policy": "priority"},
        {"num_gpu_blocks_override": 9},
    ]
    options.append(options.pop(7))  # whose file changes below
    configs = [EngineConfig(model=str(broken), **given) for given in options]
    seen = {fingerprint(broken, config) for config in configs}
    (tmp_path / "generation_config.json").write_text('{"temperature": 2.0}')
    assert len(seen | {fingerprint(broken, configs[-1])}) == len(options) + 1


CHANGE_NO_RECORD = """
    model revision max_num_seqs max_num_batched_tokens long_prefill_token_threshold enable_prefix_caching
    prefix_caching_hash_algo prefix_cache_dir prefix_cache_bytes cpu_cache_bytes enforce_eager optimizations
    enable_lora max_loras max_lora_rank speculative_config kv_events_config kv_cache_metrics kv_cache_metrics_sample
    profiler_config
""".split()  # the files of the model and of adapters are part of the fingerprint themselves


def test_every_option_is_part_of_the_model_or_changes_no_record():
    assert sorted([*MODEL_OPTIONS, *POOL_OPTIONS, *CHANGE_NO_RECORD]) == sorted(f.name for f in fields(EngineConfig))


def test_the_pool_is_part_of_the_model_where_the_length_follows_from_it(broken):
    config = EngineConfig(model="x")
    bounded = replace(config, max_model_len=20)
    for options in ({"block_size": 4}, {"kv_cache_memory_bytes": 1000}, {"gpu_memory_utilization": 0.5}):
        assert fingerprint(broken, replace(config, **options)) != fingerprint(broken, config)
        assert fingerprint(broken, replace(bounded, **options)) == fingerprint(broken, bounded)


def test_served_model_name(job, capsys):
    job.write([line("a", prompt=FOX, max_tokens=1, model="gpt-4o")])
    assert job.run("--served-model-name", "mine", "gpt-4o") == 0
    assert b'"model": "gpt-4o"' in job.target.read_bytes()
    assert job.run() == 2 and "--served-model-name" in capsys.readouterr().err


def test_the_advice_of_an_error_record_is_not_taken_for_done(job, capsys):
    job.write([line("a", prompt=FOX, max_tokens=1, priority=1)])
    assert job.run() == 1
    assert "start with scheduling_policy='priority'" in job.answers()["1"][2]["message"]
    assert job.run("--scheduling-policy", "priority") == 2
    assert "choose another output file" in capsys.readouterr().err


def after_loading(monkeypatch, change) -> None:
    """Somebody does this while the model is loaded."""

    def load(**options):
        llm = LLM(**options)
        change()
        return llm

    monkeypatch.setattr(run_batch, "LLM", load)


def after_records(monkeypatch, change) -> None:
    """Somebody does this when some records have been written."""
    append = OutputFile.append

    def append_then_change(output, answers):
        before = len(output.answered)
        append(output, answers)
        if before < 8 <= len(output.answered):
            change()

    monkeypatch.setattr(OutputFile, "append", append_then_change)


CHANGES = ["replaced", "rewritten", "shortened", "deleted"]


@pytest.fixture
def long_job(job):
    job.write([line(str(i), prompt=FOX, max_tokens=1 + i % 7, temperature=0) for i in range(40)])
    return job


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        *((after_records, how) for how in CHANGES),
        *((after_loading, how) for how in ("replaced", "deleted")),
        *(by_night(after_loading, how) for how in ("rewritten", "shortened")),
    ],
)
def test_input_that_changes(long_job, monkeypatch, capsys, moment, how):
    """No record answers a line that came later, and the exit code says that something is wrong."""
    job, content = long_job, long_job.source.read_bytes()
    other = content.replace(b'"max_tokens": 3', b'"max_tokens": 9')

    def change():
        if how == "replaced":
            job.source.with_suffix(".new").write_bytes(other)
            job.source.with_suffix(".new").rename(job.source)
        elif how == "rewritten":
            job.source.write_bytes(other)
        elif how == "shortened":
            os.truncate(job.source, len(content) // 2)
        else:
            job.source.unlink()

    monkeypatch.setattr(openai_batch, "WINDOW_SAMPLES", 4)
    moment(monkeypatch, change)
    assert job.run("--max-num-seqs", "4") == 2
    error = capsys.readouterr().err
    assert "since the job began" in error or "No such file" in error
    monkeypatch.undo()
    found = job.answers() if job.target.exists() else {}
    job.source.write_bytes(content)
    assert job.run() == 0, "with the input as it was the job goes on"
    again = job.answers()
    assert len(again) == 40 and found.items() <= again.items()
    job.target.unlink()
    assert job.run() == 0 and job.answers() == again


def test_model_that_changes(long_job, monkeypatch, broken, capsys):
    after_loading(monkeypatch, (broken / "model.safetensors").touch)
    assert long_job.run("--model", str(broken)) == 2
    assert (
        f"the checkpoint {broken}, or an adapter, has changed since the job began" in capsys.readouterr().err
        and not long_job.size()
    )


@pytest.mark.parametrize(
    ("how", "moment"),
    [(how, after_records) for how in ("deleted", "truncated", "replaced", "written to")]
    + [("deleted", after_loading), ("written to", after_loading)],
)
def test_output_that_changes(long_job, monkeypatch, capsys, moment, how):
    """It is not said that lines have succeeded whose records are gone."""
    job = long_job

    def change():
        if how == "deleted":
            job.target.unlink()
        elif how == "truncated":
            os.truncate(job.target, job.size() // 2)
        elif how == "replaced":
            job.target.with_suffix(".new").write_bytes(job.target.read_bytes())
            job.target.with_suffix(".new").rename(job.target)
        else:
            with job.target.open("r+b") as file:
                file.seek(0, os.SEEK_END)
                file.write(b"x")

    moment(monkeypatch, change)
    assert job.run() == 2
    printed = capsys.readouterr()
    assert "while the job ran" in printed.err and "succeeded" not in printed.out
    monkeypatch.undo()
    if how in ("deleted", "truncated", "replaced"):
        assert job.run() == 0 and len(job.answers()) == 40, "what is lost is answered again"
    else:
        assert job.run() == 2 and "was not written by run-batch" in capsys.readouterr().err


def test_command_errors(job, capsys, tmp_path):
    for arguments, text in (
        (["-i", str(tmp_path / "none")], "is not a file"),
        (["-i", str(tmp_path)], "is not a file"),
        (["-o", str(tmp_path)], "cannot be the output"),
        (["-o", str(job.source)], "cannot be the output"),
        (["-o", str(tmp_path / "no" / "out")], "is not a folder"),
        (["--model", str(tmp_path / "none")], "does not exist"),
        (["--max-num-seqs", "0"], "max_num_seqs must be"),
    ):
        job.write([line("a", prompt=FOX)])
        assert job.run(*arguments) == 2
        assert text in capsys.readouterr().err
        assert not job.target.exists(), "nothing was begun"


def test_empty_input(job, capsys):
    job.write([b""])
    assert job.run() == 0
    assert rows(capsys.readouterr().out)["succeeded"] == "0"


def many_lines(num: int) -> list[bytes]:
    rng = random.Random(0)
    lines = []
    for number in range(num):
        if rng.random() < 0.05:
            lines.append(rng.choice([b"{nope", line("0", prompt=FOX), line(f"x{number}", prompt="x " * 300)]))
        else:
            prompt = [*[rng.randrange(40, 44)] * rng.choice([0, 8, 16]), *rng.choices(range(40, 300), k=4)]
            lines.append(line(str(number), prompt=prompt, temperature=0, max_tokens=rng.randint(1, 12)))
    return lines


@pytest.mark.nightly
def test_killed_ten_times(job):
    """SIGKILL at random moments; the end is that of an uninterrupted run."""
    job.write(many_lines(1200))
    assert job.run() == 1
    expected = job.answers()
    total = job.size()
    assert len(expected) == 1200
    job.target.unlink()
    rng = random.Random(1)
    context = multiprocessing.get_context("forkserver")  # its processes begin with everything imported
    tokenizers = ["transformers.modeling_utils", "transformers.models.auto.tokenization_auto"]
    context.set_forkserver_preload(["nanovllm.engine", "nanovllm.worker.model_runner", *tokenizers])
    for kill in range(10):
        process = context.Process(target=cli.main, args=([*job.files, *job.engine],), daemon=True)
        process.start()
        until = job.size() + rng.randrange(total // 11)
        while job.size() <= until and process.is_alive():
            time.sleep(0.002)
        process.kill()
        process.join()
        if process.exitcode == 1:  # on a busy machine a run may be over before it is killed
            assert kill > 0
            break
        assert process.exitcode == -signal.SIGKILL
        if kill % 3 == 0:  # and as a power cut would have it
            os.truncate(job.target, job.size() - min(7, job.size()))
    assert job.run() == 1
    assert job.answers() == expected


@pytest.mark.nightly
def test_disk_full(job, processes):
    """The file may not grow beyond a limit: what it holds is whole, and with more room the job goes on."""
    job.write([line(str(i), prompt=FOX, max_tokens=4, temperature=0) for i in range(300)])
    limit = 50_000, 50_000
    process = job.start(processes, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "out.jsonl" in err and "make room and run the same command again" in err, err
    num_whole = len(job.answers())
    assert 0 < num_whole < 300 and job.size() <= 50_000 and job.target.read_bytes().endswith(b"}\n")
    assert rows(out)["succeeded"] == str(num_whole) and rows(out)["not"] == str(300 - num_whole)
    assert job.run() == 0 and len(job.answers()) == 300


def test_a_signal_while_a_line_is_printed(capfd):
    """Python's buffers do not nest: what the handler says goes past them."""
    signals = [signal.SIGINT, signal.SIGTERM]

    class Terminal(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data) -> int:
            if signals:
                os.kill(os.getpid(), signals.pop(0))
            return len(data)

    console = Screen(io.TextIOWrapper(io.BufferedWriter(Terminal())))
    before = {signum: signal.getsignal(signum) for signum in signals}
    try:
        with run_batch._signals(console) as received:
            for _ in before:
                console.print("a line")
        assert received == list(before)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    said = capfd.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in said] == ["SIGINT: finishing what has started", "SIGTERM: stopping"]


@pytest.mark.nightly
@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)])
def test_interrupted(job, processes, signals):
    job.write([line(str(i), prompt=FOX, max_tokens=200, temperature=0, ignore_eos=True) for i in range(600)])
    process = job.start(processes)
    while job.size() == 0 and process.poll() is None:
        time.sleep(0.01)
    for signum in signals:
        process.send_signal(signum)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signals[0] and f"{signals[0].name}: finishing what has started" in err
    assert ("SIGTERM: stopping" in err) == (len(signals) == 2)
    num_whole = len(job.answers())
    assert 0 < num_whole < 600 and rows(out)["not"] == str(600 - num_whole)
    if len(signals) == 1:
        assert num_whole >= 32, "those that ran were finished"
