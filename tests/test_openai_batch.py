"""A line of a batch job: what it may ask for, its answer, and the window of lines in flight."""

import json
import time

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.tools import openai_batch
from nanovllm.tools.openai_batch import Answer, answer_lines

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
