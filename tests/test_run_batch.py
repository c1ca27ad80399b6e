"""Batch jobs: what a line may ask for, what a file goes through; no end of a process loses or repeats a line."""

import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import time

import pytest
from processes import LIMIT_S

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.tools import cli, openai_batch, run_batch
from nanovllm.tools.openai_batch import Answer, answer_lines
from nanovllm.tools.run_batch import CustomIds, Job, OutputFile, read_lines

CHAT, COMPLETIONS = openai_batch.CHAT, openai_batch.COMPLETIONS
FOX = "the quick brown fox jumps over the lazy dog"
USER = [{"role": "user", "content": "two gulls circled"}]


def line(custom_id: str = "a", url: str = COMPLETIONS, **body) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def answer_all(llm: LLM, raws: list[bytes], **options) -> dict[int, Answer]:
    answers = [a for step in answer_lines(llm, enumerate(raws, start=1), ("tiny",), **options) for a in step]
    assert len(answers) == len({a.line_number for a in answers}), "a line was answered twice"
    return {a.line_number: a for a in answers}


def answer(llm: LLM, raw: bytes) -> Answer:
    return answer_all(llm, [raw])[1]


# -- a line -----------------------------------------------------------------------------------------------------------


def test_completion(llm):
    started = int(time.time())
    body = answer(llm, line(prompt=FOX, max_tokens=5, temperature=0)).body
    assert started <= body.pop("created") <= time.time()
    [expected] = llm.generate([FOX], SamplingParams(max_tokens=5, temperature=0))
    num_prompt = len(expected.prompt_token_ids)
    assert body == {
        "id": "cmpl-a",
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": expected.outputs[0].text,
                "logprobs": None,
                "finish_reason": expected.outputs[0].finish_reason,
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(expected.outputs[0].token_ids),
            "total_tokens": num_prompt + len(expected.outputs[0].token_ids),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_chat(llm):
    parts = [{"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "gulls"}]}]
    answers = answer_all(
        llm,
        [
            line("a", CHAT, messages=parts, max_completion_tokens=6, temperature=0, model="tiny", user="me"),
            line("b", CHAT, messages=USER, temperature=0, add_generation_prompt=False, ignore_eos=True),
        ],
    )
    [expected] = llm.chat([{"role": "user", "content": "two\ngulls"}], SamplingParams(max_tokens=6, temperature=0))
    body = answers[1].body
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == expected.outputs[0].finish_reason
    assert answers[2].body["usage"]["total_tokens"] == 256, "without max_tokens a chat goes on to max_model_len"


def test_parameters_are_honoured(llm):
    given = dict(
        n=2,
        temperature=1.3,
        top_p=0.9,
        top_k=30,
        min_p=0.01,
        seed=7,
        max_tokens=12,
        min_tokens=3,
        stop=["e"],
        stop_token_ids=[40],
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
    )
    assert {*given, "ignore_eos"} == openai_batch.PASSED_ON
    body = answer(llm, line(prompt=[5, 6, 7, 8], cache_salt="s", **given)).body
    [expected] = llm.generate([{"prompt_token_ids": [5, 6, 7, 8], "cache_salt": "s"}], SamplingParams(**given))
    found = [(c["text"], c["finish_reason"], c["stop_reason"]) for c in body["choices"]]
    assert found == [(o.text, o.finish_reason, o.stop_reason) for o in expected.outputs]
    again = answer(llm, line(prompt=[5, 6, 7, 8], cache_salt="t", **given)).body
    assert body["usage"]["prompt_tokens_details"] == again["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_values_that_mean_no(llm):
    extra = openai_batch.MEANS_NO | {"stop": None, "seed": None, "logprobs": None}
    assert answer(llm, line(prompt=FOX, max_tokens=2, **extra)).error is None


def test_several_prompts(llm):
    body = answer(llm, line(prompt=["the quick", [5, 6, 7]], n=2, max_tokens=3, temperature=0)).body
    expected = llm.generate(["the quick", [5, 6, 7]], SamplingParams(max_tokens=3, temperature=0, n=2))
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == [o.text for e in expected for o in e.outputs]
    assert body["usage"]["prompt_tokens"] == sum(len(e.prompt_token_ids) for e in expected)


def test_cached_tokens(llm):
    llm.generate([FOX], SamplingParams(max_tokens=1))
    body = answer(llm, line(prompt=FOX, max_tokens=1)).body
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 8


def test_logprobs(llm):
    answers = answer_all(
        llm,
        [
            line("a", prompt=FOX, max_tokens=4, temperature=0, logprobs=3),
            line("b", CHAT, messages=USER, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2),
            line("c", CHAT, messages=USER, max_tokens=4, temperature=0, logprobs=True),
            line("d", CHAT, messages=USER, max_tokens=4, temperature=0, logprobs=False),
        ],
    )
    [expected] = llm.generate([FOX], SamplingParams(max_tokens=4, temperature=0, logprobs=3))
    sample, found = expected.outputs[0], answers[1].body["choices"][0]["logprobs"]
    chosen = [entries[token] for token, entries in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert found["tokens"] == [entry.decoded_token for entry in chosen]
    assert found["token_logprobs"] == pytest.approx([entry.logprob for entry in chosen], abs=1e-4)
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(4)]
    assert all(max(top.values()) == found["token_logprobs"][i] for i, top in enumerate(found["top_logprobs"]))
    content = answers[2].body["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    for entry in content:
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] > entry["top_logprobs"][1]["logprob"]
        assert entry["bytes"] == list(entry["token"].encode())
    assert [e["top_logprobs"] for e in answers[3].body["choices"][0]["logprobs"]["content"]] == [[]] * 4
    assert answers[4].body["choices"][0]["logprobs"] is None


def test_seed_of_a_line(llm):
    """A sampled answer depends on its line alone: not on what ran before, nor on the lines beside it."""
    raws = [line(str(i), prompt=FOX, max_tokens=8, temperature=1) for i in range(6)]
    together = answer_all(llm, raws)
    texts = [together[i].body["choices"][0]["text"] for i in range(1, 7)]
    assert len(set(texts)) > 3
    [[alone]] = [step for step in answer_lines(llm, [(77, raws[3])]) if step]
    assert alone.body["choices"][0]["text"] == texts[3]


BAD_LINES = [
    (b"{nope", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[1, 2]", "must be a JSON object, found list"),
    (b"{}", "custom_id must be a string, found None"),
    (line().replace(b'"a"', b"7"), "custom_id must be a string, found 7"),
    (line().replace(b"POST", b"GET"), "method must be POST, found 'GET'"),
    (line().replace(b'"method"', b'"verb"'), "method must be POST, found None"),
    (line(url="/v1/embeddings"), "url must be /v1/chat/completions or /v1/completions, found '/v1/embeddings'"),
    (line().replace(b'"url"', b'"where"'), "url must be"),
    (line()[:-1] + b', "priority": 1}', "found also priority"),
    (line().replace(b'"body": {}', b'"body": 3'), "body must be an object, found int"),
    (line(), "body has no prompt"),
    (line(prompt=FOX, tools=[{"type": "function"}], echo=True), "cannot honour echo, tools; for /v1/completions"),
    (line(prompt=FOX, messages=USER), "cannot honour messages"),
    (line(prompt=FOX, stream=True), "cannot honour stream"),
    (line(prompt=FOX, model="gpt-4o"), "body.model is 'gpt-4o', and this job runs tiny"),
    (line(prompt=FOX, temperature=-1), "temperature must be a number from 0.0, found -1"),
    (line(prompt=FOX, temperature=float("nan")), "temperature must be a number"),
    (line(prompt=FOX, max_tokens=0), "max_tokens must be a whole number from 1"),
    (line(prompt=FOX, n=True), "n must be a whole number"),
    (line(prompt=FOX, n=2000), "number of samples (prompts times n) must be a whole number between 1 and 1024"),
    (line(prompt=FOX, logprobs=21), "the number of logprobs must be a whole number between 0 and 20"),
    (line(prompt=FOX, logprobs="2"), "the number of logprobs must be"),
    (line(prompt=FOX, stop_token_ids=[999]), "a stop token id must be a whole number between 0 and 319"),
    (line(prompt=FOX, cache_salt=""), "cache_salt must be a string that is not empty"),
    (line(prompt=""), "the prompt is empty"),
    (line(prompt=[]), "the prompt is empty"),
    (line(prompt=["x", ""]), "the prompt is empty"),
    (line(prompt=[["a"]]), "prompt token ids must be a list of whole numbers"),
    (line(prompt={"a": 1}), "prompt must be a string, found dict"),
    (line(prompt=[320]), "token id 320 at position 0 is outside the vocabulary"),
    (line(prompt="\ud800"), "not valid Unicode"),
    (line(prompt="x " * 300), "max_model_len is 256"),
    (line(url=CHAT), "a conversation is a list of messages"),
    (line(url=CHAT, messages=[]), "a conversation is a list of messages"),
    (line(url=CHAT, messages=[{"role": "wizard", "content": "x"}]), "unknown role wizard"),
    (line(url=CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "parts of type text only"),
    (line(url=CHAT, messages=USER, logprobs=3), "logprobs of a chat must be true or false"),
    (line(url=CHAT, messages=USER, top_logprobs=3), "top_logprobs needs logprobs"),
    (line(url=CHAT, messages=USER, add_generation_prompt="no"), "add_generation_prompt must be true or false"),
]


def test_bad_lines(llm):
    """Each gets an error that names its line and what is wrong; the good lines around them are answered."""
    good = line("good", prompt=FOX, max_tokens=2)
    raws = [raw for bad, _ in BAD_LINES for raw in (good, bad)]
    answers = answer_all(llm, raws)
    assert len(answers) == len(raws)
    for index, (raw, text) in enumerate(BAD_LINES):
        assert answers[2 * index + 1].error is None
        found = answers[2 * index + 2]
        assert found.body is None and text in (found.error or ""), raw[:80]
        assert found.error.startswith(f"line {2 * index + 2}: ")
        assert found.custom_id == ("a" if b'"custom_id": "a"' in raw else None)


def test_record():
    body = {"id": "cmpl-3"}
    assert Answer(3, "x", body).record("job_3") == {
        "id": "job_3",
        "custom_id": "x",
        "response": {"status_code": 200, "request_id": "job_3", "body": body},
        "error": None,
    }
    assert Answer(4, None, None, "line 4: why").record("job_4") == {
        "id": "job_4",
        "custom_id": None,
        "response": None,
        "error": {"code": "invalid_line", "message": "line 4: why", "line": 4},
    }


# -- the flow ---------------------------------------------------------------------------------------------------------


def test_window(checkpoint, monkeypatch):
    """Lines are read a window ahead, not more; each window is admitted in prefix order."""
    monkeypatch.setattr(openai_batch, "WINDOW_LINES", 12)
    llm = LLM(str(checkpoint()), block_size=4, num_gpu_blocks_override=12, max_model_len=40, max_num_seqs=2)
    pulled = answered = 0
    prefixes = [[60 + i] * 16 for i in range(3)]

    def lines():
        nonlocal pulled
        for pulled in range(1, 61):
            prompt = [*prefixes[pulled % 3], 100 + pulled]
            yield pulled, line(str(pulled), prompt=prompt, max_tokens=2, temperature=0, ignore_eos=True)

    for step in answer_lines(llm, lines()):
        answered += len(step)
        assert pulled - answered <= 12 + 2 + 2, "a window, what was left of the one before, and the step's answers"
    assert answered == 60
    # In the order of the lines, two at a time, a pool of 12 blocks would keep none of three prefixes of 4 blocks.
    assert llm.stats()["prefix_cache"]["hits"] >= 4 * (60 - 5 * 3 - 10)


def test_window_bytes(llm, monkeypatch):
    monkeypatch.setattr(openai_batch, "WINDOW_BYTES", 1000)
    raws = [line(str(i), prompt="x", max_tokens=1) + b" " * 600 for i in range(5)]
    source = iter(enumerate(raws, start=1))
    next(answer_lines(llm, source))
    assert next(source)[0] == 3


def test_signals(llm):
    """One: what has started is finished and the rest left alone. Two: everything is dropped, nothing is torn."""
    for num_signals, check in ((1, lambda n: 0 < n < 40), (2, lambda n: n == 0)):
        llm.engine.scheduler.max_num_seqs = 4
        raws = [line(str(i), prompt=FOX, max_tokens=9, ignore_eos=True, n=2) for i in range(40)]
        received = 0
        steps = answer_lines(llm, enumerate(raws), num_signals=lambda: received)  # noqa: B023
        next(steps)
        received = num_signals
        answers = [a for step in steps for a in step]
        assert check(len(answers)) and all(len(a.body["choices"]) == 2 for a in answers)
        assert not llm.engine.has_unfinished_requests()


def test_leaving_the_loop_drops_the_rest(llm):
    steps = answer_lines(llm, enumerate([line(str(i), prompt=FOX, max_tokens=9) for i in range(5)]))
    next(steps)
    steps.close()
    assert not llm.engine.has_unfinished_requests()


# -- files ------------------------------------------------------------------------------------------------------------


def test_read_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(run_batch, "MAX_LINE_BYTES", 10)
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


JOB = Job(5, 6, "a" * 16, "b" * 16)
ANSWERS = [
    Answer(1, "é\u2028", {"text": "ü\n"}),
    Answer(5, None, None, "line 5: bad"),
    Answer(3, "\ud800", {"text": "\x00"}),
]


def test_output_file(tmp_path):
    path = tmp_path / "out"
    output = OutputFile(path, JOB)
    output.append(ANSWERS[:2])
    output.append([])
    output.append(ANSWERS[2:])
    output.close()
    records = [json.loads(raw) for raw in path.read_text("ascii").splitlines()]
    assert records == [answer.record(f"{JOB.id_prefix}{answer.line_number}") for answer in ANSWERS]
    again = OutputFile(path, JOB)
    assert list(again.status) == [0, 1, 0, 1, 0, 2, 0] and again.num_answered == 3
    with pytest.raises(ValueError, match="is being written by another run-batch"):
        OutputFile(path, JOB)
    again.close()
    OutputFile(path, JOB).close()


@pytest.mark.parametrize("tail", [b"", b"\0" * 40, b"\0" * 5 + b"\n"])
def test_torn_output(tmp_path, monkeypatch, tail):
    """Cut anywhere, zeros behind it or not: the whole records stay, the rest goes."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of them would wait for the disk
    path = tmp_path / "out"
    output = OutputFile(path, JOB)
    output.append(ANSWERS)
    output.close()
    data = path.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(data) if byte == ord("\n"))]
    for cut in range(len(data)):
        path.write_bytes(data[:cut] + tail)
        output = OutputFile(path, JOB)
        whole = max(end for end in ends if end <= cut)
        assert path.read_bytes() == data[:whole] and output.num_answered == ends.index(whole)
        output.append(ANSWERS[ends.index(whole) :])
        output.close()
        assert path.read_bytes() == data


RECORD = (json.dumps(ANSWERS[0].record(f"{JOB.id_prefix}1")) + "\n").encode()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"notes\n", "line 1 of .* was not written by run-batch"),
        (b"notes", "line 1 of .* was not written by run-batch"),
        (b"PK\x03\x04\0\0\0\0", "line 1 of .* was not written by run-batch"),
        (b"\0\0\0\x20ftypmp42", "line 1 of .* was not written by run-batch"),
        (b"{}\n", "line 1 of .* was not written"),
        (b'{"id": "batch_123", "error": null}\n', "line 1 of .* was not written"),
        (RECORD + b"notes", "line 2 of .* was not written"),
        (RECORD + b"\n", "line 2 of .* was not written"),
        (RECORD.replace(b"a" * 16, b"c" * 16), "holds answers to another input"),
        (RECORD.replace(b"b" * 16, b"c" * 16), "holds answers to another model, or another --dtype or --seed"),
        (RECORD + RECORD, "line 2 of .* answers line 1 once more"),
        (RECORD.replace(b'_1"', b'_99"'), "line 1 of .* answers line 99"),
    ],
)
def test_foreign_output(tmp_path, content, text):
    """What we did not write is left as it is."""
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=text):
        OutputFile(path, JOB)
    assert path.read_bytes() == content


def test_job_identity(tmp_path, checkpoint):
    directory = tmp_path / "model"
    directory.mkdir()
    for file in checkpoint().iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    path, config = tmp_path / "in", EngineConfig(model="x")
    path.write_bytes(b"one\ntwo\n")
    job = Job.of(path, directory, config)
    assert (job.num_lines, job.last_line) == (2, 2)
    assert Job.of(path, checkpoint(), EngineConfig(model="y", max_num_seqs=3)) == job, "only where it lies has changed"
    for content in (b"one\n\ntwo\n", b"one\ntwo\nthree\n", b"one\ntwp\n"):
        path.write_bytes(content)
        assert Job.of(path, directory, config).input_hash != job.input_hash
    path.write_bytes(b"one\ntwo\n")
    assert Job.of(path, directory, EngineConfig(model="x", dtype="float32")).model_hash != job.model_hash
    assert Job.of(path, directory, EngineConfig(model="x", seed=3)).model_hash != job.model_hash
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert Job.of(path, directory, config).model_hash != job.model_hash


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


def test_served_model_name(job):
    job.write([line("a", prompt=FOX, max_tokens=1, model="gpt-4o")])
    assert job.run("--served-model-name", "mine", "gpt-4o") == 0
    assert b'"model": "gpt-4o"' in job.target.read_bytes()


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


@pytest.mark.slow
def test_killed_ten_times(job):
    """SIGKILL at random moments; the end is that of an uninterrupted run."""
    job.write(many_lines(2000))
    assert job.run() == 1
    expected = job.answers()
    total = job.size()
    assert len(expected) == 2000
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
        assert process.exitcode == -signal.SIGKILL, f"run {kill} was over before it was killed"
        if kill % 3 == 0:  # and as a power cut would have it
            os.truncate(job.target, job.size() - min(7, job.size()))
    assert job.run() == 1
    assert job.answers() == expected


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


@pytest.mark.parametrize(("signum", "count"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_interrupted(job, processes, signum, count):
    job.write([line(str(i), prompt=FOX, max_tokens=200, temperature=0, ignore_eos=True) for i in range(600)])
    process = job.start(processes)
    while job.size() == 0 and process.poll() is None:
        time.sleep(0.01)
    for said in (f"{signum.name}: finishing what has started", "stopping")[:count]:
        process.send_signal(signum)
        heard = ""
        while said not in heard and (row := process.stderr.readline()):
            heard += row
        assert said in heard
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signum and (count == 2 or "stopping" not in err)
    num_whole = len(job.answers())
    assert 0 < num_whole < 600 and rows(out)["not"] == str(600 - num_whole)
    if count == 1:
        assert num_whole >= 32, "those that ran were finished"
