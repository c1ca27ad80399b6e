"""A line of a batch job: what it may ask for, its answer, and the window of lines in flight."""

import itertools
import json
import math
import time
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.checks.values import HIGHEST_SEED, LOWEST_SEED
from nanovllm.compat.neutral import ANY, NEUTRAL
from nanovllm.jobs import answer_lines as openai_batch
from nanovllm.jobs.answer_lines import Answer, CustomIds, answer_lines
from nanovllm.serving.openai import fields, openai_request
from nanovllm.serving.openai.answer import CHAT, COMPLETIONS
from nanovllm.serving.openai.json_lines import to_json
from nanovllm.serving.openai.pooling import EMBEDDINGS
from tests.checkpoints import SMALL
from tests.faults import PanicException, plant
from tests.jobs.lines import FOX, USER, line
from tests.marks import by_night
from tests.servers import serving


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
    [sample], num_prompt = expected.outputs, len(expected.prompt_token_ids)
    assert body.pop("choices") == [
        dict(index=0, text=sample.text, logprobs=None, finish_reason=sample.finish_reason, stop_reason=None)
    ]
    usage = dict(prompt_tokens=num_prompt, completion_tokens=5, total_tokens=num_prompt + 5)
    assert body.pop("usage") == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert body == {"id": "cmpl-a", "object": "text_completion", "model": "tiny"}


def test_a_text_of_the_whole_context_is_scored(llm):
    """Windows of the model's length, as programs that measure perplexity send them."""
    most = llm.engine.scheduler.max_model_len
    ids = [5 + i * 11 % 300 for i in range(most)]
    scored = answer(llm, line(prompt=ids, echo=True, logprobs=1, max_tokens=0)).body
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == most == scored["usage"]["total_tokens"]
    assert f"so at most {most} fit" in answer(llm, line(prompt=[*ids, 5], echo=True, logprobs=1, max_tokens=0)).error
    assert f"so at most {most - 1} fit" in answer(llm, line(prompt=ids, echo=True, logprobs=1, max_tokens=1)).error


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"enum": [5]}}, "required": ["x"]}}
POINT = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
ASKS_FOR_NOTHING = {name: ["x" if v is ANY else v for v in values] for name, values in NEUTRAL["body"].items()}
PARTS = [{"type": "text", "text": "two"}, {"type": "text", "text": "gulls"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "several prompts": (COMPLETIONS, dict(prompt=["the quick", [5, 6, 7]], n=2)),
    "a text is scored": (COMPLETIONS, dict(prompt=FOX, echo=True, logprobs=0, max_tokens=0, prompt_logprobs=0)),
    "logprobs": (COMPLETIONS, dict(prompt=FOX, logprobs=3, temperature=2)),
    "values that mean no": (
        COMPLETIONS,
        {name: next(iter(values), None) for name, values in ASKS_FOR_NOTHING.items()}
        | dict(prompt=FOX, stop=None, logprobs=None, response_format={"type": "text"}),
    ),
    "a choice": (COMPLETIONS, dict(prompt=FOX, structured_outputs={"choice": ["red", "blue"]})),
    "a schema": (
        COMPLETIONS,
        dict(
            prompt=FOX,
            max_tokens=60,
            n=3,
            response_format={"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}},
        ),
    ),
    "parts of a message": (CHAT, dict(messages=[{"role": "user", "content": PARTS}], model="tiny", user="me")),
    "to the end of the context": (CHAT, dict(messages=USER, max_tokens=None, ignore_eos=True)),
    "a developer's message": (CHAT, dict(messages=[{"role": "developer", "content": ["Be", PARTS[0]]}, *USER])),
    "logprobs of a chat": (CHAT, dict(messages=USER, logprobs=True, top_logprobs=2)),
    "a call": (
        CHAT,
        dict(
            messages=USER,
            max_tokens=60,
            tools=[{"type": "function", "function": FUNCTION}],
            tool_choice="required",
            parallel_tool_calls=False,
        ),
    ),
}


def bare(answer: Any) -> Any:
    """Without nulls, and without what is another each time."""
    own = ("id", "created", "prompt_tokens_details")
    if isinstance(answer, dict):
        return {name: bare(value) for name, value in answer.items() if value is not None and name not in own}
    return [bare(item) for item in answer] if isinstance(answer, list) else answer


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint()) as running:
        yield running


@pytest.mark.parametrize("name", BODIES)
def test_a_record_has_what_the_server_answers(llm, server, name):
    """Whose tests say what that is (tests/serving/http)."""
    url, body = BODIES[name]
    for tokenizer in (llm.get_tokenizer(), server.engine.tokenizer):  # the model's own is too long for its context
        tokenizer.chat_template = (
            "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | map(attribute='content') | join }}"
        )
    body = dict(max_tokens=5, temperature=0, seed=7) | body
    status, raw = server.send(url, json.dumps(body).encode())
    assert status == 200, raw
    assert bare(answer(llm, line(url=url, **body)).body) == bare(json.loads(raw))


TOLD = {"type": "object", "properties": {"team": {"enum": ["red", "blue"]}, "n": {"type": "integer", "maximum": 99}}}
TOLD |= {"required": ["team", "n"], "additionalProperties": False}
WEATHER = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}', "signature": "s"}}
NAMED = {  # what the warning names -> a body that has it
    "response_format: 'shema' (did you mean 'schema'?)": dict(response_format={"type": "json_object", "shema": TOLD}),
    "response_format: 'schema'": dict(response_format={"type": "text", "schema": TOLD}),
    "response_format.json_schema: 'stric' (did you mean 'strict'?)": dict(
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": POINT, "stric": True}}
    ),
    "stream_options: 'x'": dict(stream=True, stream_options={"include_usage": True, "x": 1}),
    "tool_choice: 'mode'": dict(
        tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "f"}, "mode": "x"}
    ),
    "tool_choice.function: 'strict'": dict(
        tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "f", "strict": True}}
    ),
    "messages[0].content[1]: 'cache_control'": dict(
        messages=[{"role": "user", "content": ["a", {"type": "text", "text": "b", "cache_control": {}}]}]
    ),
    "messages[1]: 'annotations'": dict(
        messages=[*USER, {"role": "assistant", "content": "a", "annotations": [{"type": "x"}], "audio": None}, *USER]
    ),
    "messages[1].tool_calls[0]: 'cache_control', messages[1].tool_calls[0].function: 'signature'": dict(
        messages=[
            *USER,
            {"role": "assistant", "tool_calls": [CALL | {"cache_control": {"a": 1}, "index": 0, "extra": None}]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ]
    ),
    "tools[0]: 'cache_control', tools[0].function: 'paramters'": dict(
        tools=[{"type": "function", "function": {"name": "now", "paramters": {"x": 1}}, "cache_control": {"a": 1}}]
    ),
}


CONTENTS = "{{ messages | map(attribute='content') | join }}"
NAMES = "{% for tool in tools or [] %}{{ tool.function.name }} {{ tool.function.parameters }}{% endfor %}"


@pytest.mark.parametrize("name", NAMED)
def test_unknown_fields_inside_of_known_objects_are_named(name, llm, server):
    """By the server in a header, in a record as at the top."""
    for tokenizer in (llm.get_tokenizer(), server.engine.tokenizer):
        tokenizer.chat_template = NAMES + CONTENTS
    body = dict(messages=USER, max_tokens=8, temperature=0) | NAMED[name]
    what = f"left out, because nobody here knows it: {name}"
    status, raw, headers = server.exchange(CHAT, json.dumps(body).encode())
    assert status == 200 and headers["warning"] == f'299 nanovllm "{what}"', raw
    if "stream" not in body:
        assert answer(llm, line(url=CHAT, **body)).record("r")["response"]["warning"] == what


def test_what_a_template_shows_is_not_left_out(llm):
    llm.get_tokenizer().chat_template = "{{ tools | tojson }}{{ messages[0].mood }}" + CONTENTS
    tool = {"type": "function", "function": {"name": "now", "return": {"type": "string"}}, "cache_control": {"a": 1}}
    body = dict(messages=[USER[0] | {"mood": "glad", "seen": []}], tools=[tool], max_tokens=1)
    assert "warning" not in answer(llm, line(url=CHAT, **body)).record("r")["response"]
    body["messages"][0]["seen"] = True
    warned = answer(llm, line(url=CHAT, **body)).record("r")["response"]["warning"]
    assert warned.endswith("knows it: messages[0]: 'seen'")


FORMS = [
    {"type": "json_object", "schema": TOLD},
    {"type": "json_object", "schema": json.dumps(TOLD)},
    {"type": "json_schema", "schema": TOLD},
    {"type": "json_object", "json_schema": {"schema": TOLD}},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_schema_beside_the_type_is_obeyed(form, llm, server):
    """As users of llama.cpp and llama-cpp-python write it: completions and chats, alone and beside tools."""
    for tokenizer in (llm.get_tokenizer(), server.engine.tokenizer):
        tokenizer.chat_template = NAMES + CONTENTS
    given = dict(response_format=form, max_tokens=150, temperature=1, seed=0)
    record = answer(llm, line(prompt=FOX, **given)).record("r")["response"]
    texts = [record["body"]["choices"][0]["text"]]
    assert "warning" not in record
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        body = dict(messages=USER, **given, **more)
        status, raw, headers = server.exchange(CHAT, json.dumps(body).encode())
        assert status == 200 and "warning" not in headers, raw
        texts.append(json.loads(raw)["choices"][0]["message"]["content"])
    for text in texts:
        jsonschema.validate(json.loads(text), TOLD)


def test_a_json_object_without_a_schema(llm):
    for form in (
        {"type": "json_object"},
        {"type": "json_object", "schema": {}},
        {"type": "json_object", "schema": None},
    ):
        body = answer(llm, line(prompt=FOX, response_format=form, max_tokens=100, logit_bias={"96": 50})).body
        assert isinstance(json.loads(body["choices"][0]["text"]), dict)
    for schema, text in (({"type": "objekt"}, "Invalid type: objekt"), (5, "a JSON schema is an object")):
        form = {"type": "json_object", "schema": schema}
        assert text in answer(llm, line(prompt=FOX, response_format=form)).error


def test_parameters_are_honoured(llm):
    given = dict(n=2, temperature=1.3, top_p=0.9, top_k=30, min_p=0.01, seed=7, max_tokens=12, min_tokens=3)
    given |= dict(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, logit_bias={5: 2.0})
    given |= dict(allowed_token_ids=list(range(4, 300)), stop_token_ids=[40], stop=["e"], bad_words=["the"])
    given |= dict(include_stop_str_in_output=True, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert {*given, "ignore_eos", "logprob_token_ids"} == openai_request.PASSED_ON
    body = answer(llm, line(prompt=[5, 6, 7, 8], cache_salt="s", **given)).body
    [expected] = llm.generate([{"prompt_token_ids": [5, 6, 7, 8], "cache_salt": "s"}], SamplingParams(**given))
    found = [(c["text"], c["finish_reason"], c["stop_reason"]) for c in body["choices"]]
    assert found == [(o.text, o.finish_reason, o.stop_reason) for o in expected.outputs]
    again = answer(llm, line(prompt=[5, 6, 7, 8], cache_salt="t", **given)).body
    assert body["usage"]["prompt_tokens_details"] == again["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_unknown_fields_are_left_out_and_named(llm, caplog, monkeypatch):
    """In the record of each line that has some, once in the log; the answer is that of the line without them."""
    monkeypatch.setattr(fields, "_told", set())
    body = dict(prompt=FOX, max_tokens=3, temperature=0)
    answers = answer_all(
        llm, [line("a", **body, temprature=2, x="y"), line("b", **body), line("c", **body, x=None, x_=1)]
    )
    warned, plain, third = (answers[number].record("r") for number in (1, 2, 3))
    what = "left out, because nobody here knows it: 'temprature' (did you mean 'temperature'?), 'x'"
    assert warned["response"].pop("warning") == what and "'x_'" in third["response"]["warning"]
    assert "warning" not in plain["response"] and warned["response"].keys() == plain["response"].keys()
    assert warned["response"]["body"]["choices"] == plain["response"]["body"]["choices"]
    chat = line(url=CHAT, messages=USER, max_tokens=1, tools=[{"type": "web_search"}])
    assert "tools[0] of type 'web_search'" in answer(llm, chat).record("r")["response"]["warning"]
    lines = [message for message in caplog.messages if "was left out of a request" in message]
    assert [message.split("'")[1] for message in lines] == ["temprature", "x", "x_"]
    many = answer(llm, line(**body, **{f"unknown {i}": 1 for i in range(200)})).record("r")["response"]["warning"]
    assert many.endswith("'unknown 9' and 190 more") and len(fields._told) == fields.MAX_TOLD


def test_a_grammar_that_is_given_up_is_an_error(llm):
    found = answer(llm, line(prompt=FOX, max_tokens=300, structured_outputs={"regex": "([ab]{1,1000}){1000}"}))
    assert found.body is None and "llguidance has given up" in found.error


def test_priorities(llm, checkpoint):
    lines = [line(str(i), prompt=[i + 10, 5], max_tokens=2, priority=p) for i, p in enumerate((1, 0, -1))]
    refused = {number for number, answer in answer_all(llm, lines).items() if "priority=" in (answer.error or "")}
    assert refused == {1, 3}
    policy = LLM(str(checkpoint()), max_num_seqs=1, scheduling_policy="priority")
    order: list[int] = []
    policy.engine.on_step = lambda output, progressed: order.extend(chunk.seq.tokens[0] - 10 for chunk in output.chunks)
    answers = answer_all(policy, lines)
    assert not any(answer.error for answer in answers.values()) and list(dict.fromkeys(order)) == [2, 1, 0]


def test_seed_of_a_line(llm):
    """A sampled answer depends on its line alone: not on what ran before, nor on the lines beside it."""
    raws = [line(str(i), prompt=FOX, max_tokens=8, temperature=1) for i in range(6)]
    together = answer_all(llm, raws)
    texts = [together[i].body["choices"][0]["text"] for i in range(1, 7)]
    assert len(set(texts)) > 3
    [[alone]] = [step for step in answer_lines(llm, [(77, raws[3])]) if step]
    assert alone.body["choices"][0]["text"] == texts[3]


def test_prompts_of_a_line_have_seeds_of_their_own(llm):
    raw = line("3", prompt=[FOX] * 4, max_tokens=8, temperature=1)
    first, again = (answer_all(llm, [raw])[1].body["choices"] for _ in range(2))
    assert len({choice["text"] for choice in first}) > 1 and first == again
    single = answer_all(llm, [line("3", prompt=FOX, max_tokens=8, temperature=1)])[1].body["choices"]
    assert single[0]["text"] == first[0]["text"]


def test_seed_of_a_line_for_any_seed_of_the_engine(llm, monkeypatch):
    """Their sum is a seed, too."""
    raws = [line(str(i), prompt=[FOX] * 2, max_tokens=8, temperature=1) for i in range(6)]
    seen = set()
    for seed in (LOWEST_SEED, 0, 1, 2**40, HIGHEST_SEED):
        monkeypatch.setattr(llm.engine, "config", replace(llm.engine.config, seed=seed))
        answers = answer_all(llm, raws)
        assert not any(answer.error for answer in answers.values())
        seen.add(str(texts(answers)))
    assert len(seen) == 5


BAD_LINES = [
    (b"{nope", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[1, 2]", "a line must be a JSON object, found list"),
    (b"{}", "custom_id must be a string, found None"),
    (line().replace(b'"a"', b"7"), "custom_id must be a string, found 7"),
    (line().replace(b"POST", b"GET"), "method must be POST, found 'GET'"),
    (line().replace(b'"method"', b'"verb"'), "method must be POST, found None"),
    (line(url="/v1/images"), "url must be /v1/chat/completions or /v1/completions or /v1/embeddings"),
    (line(url="/v1/embeddings", input="x"), "needs an LLM that was built with runner='pooling' (--runner pooling)"),
    (line().replace(b'"url"', b'"where"'), "url must be"),
    (line()[:-1] + b', "priority": 1}', "found also priority"),
    (line().replace(b'"body": {}', b'"body": 3'), "body must be an object, found int"),
    (line(), "body has no prompt"),
    (line(prompt=FOX, tools=[{"type": "function"}]), "body has no argument 'tools' (found [{'type': 'function'}])."),
    (line(prompt=FOX, messages=USER), "body has no argument 'messages'"),
    (line(prompt=FOX, stream=True), "body takes 'stream' only as False (found True)."),
    (line(prompt=FOX, model="gpt-4o"), "body.model is 'gpt-4o', and this is tiny"),
    (line(prompt=FOX, temperature=float("nan")), "temperature must be a number"),
    (line(prompt=FOX, n=2000), "number of samples (prompts times n) must be a whole number between 1 and 1024"),
    (line(prompt=FOX, logprobs=21), "the number of logprobs must be a whole number between 0 and 20"),
    (line(prompt=FOX, logprobs="2"), "the number of logprobs must be"),
    (line(prompt=FOX, logprobs=-1), "must be a whole number between 0 and 20, found -1"),
    (line(url=CHAT, messages=USER, continue_final_message={}), "continue_final_message must be true or false"),
    (line(url=CHAT, messages=USER, continue_final_message="false"), "continue_final_message must be true or false"),
    (line(prompt=FOX, stop_token_ids=[999]), "a token id of stop_token_ids must be a whole number between 0 and 319"),
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
    (line(url=CHAT, messages=[{"role": "user", "content": [{"type": "video_url"}]}]), "parts of type text"),
    (line(url=CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "has its image under"),
    (
        line(url=CHAT, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "this model sees no images",
    ),
    (line(prompt=FOX, echo="yes"), "echo must be true or false, found 'yes'"),
    (line(url=CHAT, messages=USER, tools=[{"type": "function"}]), "tools[0] must be {"),
    (line(url=CHAT, messages=USER, tool_choice="required"), "there are no tools"),
    (
        line(prompt=FOX, response_format={"type": "xml"}),
        "response_format must be of type text, json_object, json_schema or",
    ),
    (
        line(prompt=FOX, response_format="json_schema"),
        "response_format must be of type text, json_object, json_schema or",
    ),
    (line(url=CHAT, messages=[{"role": "assistant", "tool_calls": 5}]), "tool_calls must be a list"),
    (line(prompt=FOX, structured_outputs={"cls": 1}), "StructuredOutputsParams has no argument 'cls'"),
    (line(prompt=FOX, response_format={"type": "json_schema"}), "needs a json_schema with a schema"),
    (line(prompt=FOX, structured_outputs={"regex": "("}), "regex cannot be used"),
    (line(prompt=FOX, structured_outputs={"regex": "a", "choice": ["a"]}), "found regex and choice"),
    (line(prompt=FOX, structured_outputs=[]), "structured_outputs must be an object"),
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
    response = {"status_code": 200, "request_id": "job_3", "body": body}
    assert Answer(3, "x", body).record("job_3") == dict(id="job_3", custom_id="x", response=response, error=None)
    error = {"code": "invalid_line", "message": "line 4: why", "line": 4}
    failed = Answer(4, None, None, "line 4: why").record("job_4")
    assert failed == dict(id="job_4", custom_id=None, response=None, error=error)


# -- the flow ---------------------------------------------------------------------------------------------------------


def test_window(checkpoint, monkeypatch):
    """Lines are read a window ahead, not more; each window is admitted in prefix order."""
    monkeypatch.setattr(openai_batch, "WINDOW_SAMPLES", 12)
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


# -- what may happen to a line ----------------------------------------------------------------------------------------


NUM_LINES, CULPRITS = 30, (7, 20)


def some_lines() -> list[bytes]:
    """The culprits' prompts end with token 300."""
    ends = {number: [300] for number in CULPRITS}
    prompts = [[50, 51, 52, 53, 60 + number, *ends.get(number, [])] for number in range(1, NUM_LINES + 1)]
    return [line(str(i), prompt=p, max_tokens=4, temperature=0, ignore_eos=True) for i, p in enumerate(prompts, 1)]


def texts(answers: dict[int, Answer]) -> dict[int, str]:
    return {number: a.body["choices"][0]["text"] for number, a in answers.items() if a.body}


def test_a_panic_while_a_line_is_read(llm, monkeypatch):
    make_request = llm.engine.make_request

    def failing(prompt, *args, **options):
        if "panic" in str(prompt):
            raise PanicException("index out of bounds")
        if "interrupt" in str(prompt):
            raise KeyboardInterrupt
        return make_request(prompt, *args, **options)

    monkeypatch.setattr(llm.engine, "make_request", failing)
    answers = answer_all(llm, [line("a", prompt="panic"), line("b", prompt=FOX, max_tokens=1)])
    assert "PanicException: index out of bounds" in (answers[1].error or "") and answers[2].error is None
    with pytest.raises(KeyboardInterrupt):
        answer_all(llm, [line("a", prompt=FOX, max_tokens=1), line("b", prompt="interrupt")])
    assert not llm.engine.has_unfinished_requests()


PARTS_OF_A_STEP = ["model_runner.run", "scheduler.schedule", "enqueue", "update"]
FAULTS = [ValueError("no\n"), MemoryError(), PanicException("no")]


@pytest.mark.parametrize(
    ("where", "raised"),
    [
        *((PARTS_OF_A_STEP[0], raised) for raised in FAULTS),
        *((where, FAULTS[0]) for where in PARTS_OF_A_STEP[1:]),
        *(by_night(where, raised) for where in PARTS_OF_A_STEP[1:] for raised in FAULTS[1:]),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_one_culprit_in_a_step_costs_one_record(llm, monkeypatch, where, raised):
    """Whatever part of a step it is: the other lines of the step are answered as ever."""
    expected = texts(answer_all(llm, some_lines()))
    *path, name = where.split(".")
    owner = llm.engine
    for part in path:
        owner = getattr(owner, part)
    method, engine = getattr(owner, name), llm.engine

    def failing(*arguments):
        if where == "scheduler.schedule":
            concerned = [*engine.scheduler.waiting, *engine.scheduler.running]
        elif where == "enqueue":
            concerned = [sample.seq for request in arguments[0] for sample in request.samples]
        else:
            concerned = [chunk.seq for chunk in arguments[0].chunks]
        if any(300 in seq.tokens for seq in concerned):
            raise raised
        return method(*arguments)

    monkeypatch.setattr(owner, name, failing)
    answers = answer_all(llm, some_lines())
    assert len(answers) == NUM_LINES and {n for n, a in answers.items() if a.error} == set(CULPRITS)
    assert texts(answers) == {n: text for n, text in expected.items() if n not in CULPRITS}
    assert all(answers[n].error.startswith(f"line {n}: ") for n in CULPRITS)


def test_a_line_whose_answer_cannot_be_made(llm, monkeypatch):
    def failing(custom_id, *rest):
        if custom_id == "7":
            raise KeyError("gone")
        return {"id": custom_id}

    monkeypatch.setattr(openai_batch, "response_body", failing)
    answers = answer_all(llm, some_lines())
    assert [n for n, a in answers.items() if a.error] == [7] and answers[7].error == "line 7: KeyError: 'gone'"


def test_a_step_that_fails_once_costs_nothing(llm, monkeypatch):
    expected = texts(answer_all(llm, some_lines()))
    fault = plant(monkeypatch, llm.engine.model_runner, "run", [2])
    assert texts(answer_all(llm, some_lines())) == expected
    fault.num_calls = 1
    assert answer(llm, some_lines()[0]).error is None, "alone or not"


def test_a_line_that_cannot_be_tried_again(llm, monkeypatch):
    """The file of an image may be gone by then."""
    expected = texts(answer_all(llm, some_lines()))
    make_request, tried = llm.engine.make_request, set()

    def failing(prompt, *args, **options):
        if "300" in str(prompt) and str(prompt) in tried:
            raise FileNotFoundError("gone")
        tried.add(str(prompt))
        return make_request(prompt, *args, **options)

    monkeypatch.setattr(llm.engine, "make_request", failing)
    plant(monkeypatch, llm.engine.model_runner, "run", [1])
    answers = answer_all(llm, some_lines())
    errors = {n: a.error for n, a in answers.items() if a.error}
    assert errors == {n: f"line {n}: FileNotFoundError: gone" for n in CULPRITS}
    assert texts(answers) == {n: text for n, text in expected.items() if n not in CULPRITS}


def test_an_engine_that_has_ended_is_no_fault_of_a_line(llm, monkeypatch):
    plant(monkeypatch, llm.engine.model_runner, "run", lambda n: True, RuntimeError("it has ended"))
    with pytest.raises(RuntimeError, match="the engine fails, whatever it is asked: RuntimeError: it has ended"):
        answer_all(llm, some_lines())
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("num_signals", [1, 2])
def test_signals_while_lines_are_tried_again(llm, monkeypatch, num_signals):
    run, received, failed = llm.engine.model_runner.run, 0, False

    def failing(output):
        nonlocal failed, received
        if not failed:
            failed, received = True, num_signals
            raise RuntimeError("a fluke")
        return run(output)

    monkeypatch.setattr(llm.engine.model_runner, "run", failing)
    assert [a for step in answer_lines(llm, enumerate(some_lines()), num_signals=lambda: received) for a in step] == []


def test_what_an_error_quotes_is_cut(llm):
    found = answer(llm, line(prompt=FOX, stop=[["x" * 100_000]]))
    assert "stop must be a list of strings" in found.error and len(found.error) < 3000


def test_window_counts_samples_and_tokens(llm, monkeypatch):
    monkeypatch.setattr(openai_batch, "WINDOW_SAMPLES", 20)
    monkeypatch.setattr(openai_batch, "WINDOW_TOKENS", 100)
    for body, num_lines in (
        (dict(prompt=[5], n=7), 3),
        (dict(prompt=[[5], [6]], n=5), 2),
        (dict(prompt=[5]), 20),
        (dict(prompt=[5] * 30), 4),
        (dict(prompt=[5] * 30, n=2), 2),
        (dict(prompt=[5] * 200, n=2), 1),
        (dict(), 20),
    ):
        source = iter(enumerate([line(str(i), max_tokens=1, **body) for i in range(30)], start=1))
        next(answer_lines(llm, source))
        assert next(source)[0] == num_lines + 1


def test_logprobs_of_a_line(llm):
    """Each is an object in memory until the line is answered."""
    body = dict(prompt=[5], n=1024, logprobs=20, temperature=0)
    error = answer(llm, line(**body, max_tokens=200)).error
    assert "the number of logprobs in the answer" in error and "between 0 and 2000000, found 4300800" in error


def test_infinite_numbers_in_an_answer(llm, monkeypatch):
    """JSON has none: log(0) is told as OpenAI tells it."""
    run = llm.engine.model_runner.run

    def infinite(output):
        result = run(output)
        for entry in itertools.chain(*result.logprobs):
            object.__setattr__(entry, "logprob", -math.inf)
            object.__setattr__(entry, "top_logprobs", [math.nan for _ in entry.top_logprobs])
        return result

    monkeypatch.setattr(llm.engine.model_runner, "run", infinite)
    for url, body in ((COMPLETIONS, dict(prompt=FOX, logprobs=1)), (CHAT, dict(messages=USER, logprobs=True))):
        record = to_json(answer(llm, line(url=url, max_tokens=2, **body)).record("x"))
        json.loads(record, parse_constant=pytest.fail)
        assert "-9999.0" in record


def test_numbers_of_numpy(llm):
    """Line numbers out of a data frame are as good as any."""
    raws, ids = [line(str(i), prompt=FOX, max_tokens=1) for i in range(2)], CustomIds()
    found = [a for step in answer_lines(llm, zip(np.arange(2), raws, strict=True), claim_id=ids.claim) for a in step]
    assert [json.loads(to_json(a.record("x")))["error"] for a in found] == [None, None]


def test_a_sample_that_fails_is_an_error_record(llm):
    llm.engine.model_runner.model.embed_tokens.data[7] = torch.nan
    lines = [line("bad", prompt=[5, 7], n=2), line("good", prompt=[5, 6])]
    bad, good = answer_all(llm, lines).values()
    assert bad.body is None and bad.error.startswith("line 1: SampleFailed: there is no token to choose")
    assert good.error is None


@pytest.mark.compiler
def test_embeddings_and_scores(checkpoint, monkeypatch):
    """Of an LLM with runner="pooling"; a step that fails is tried again, and only the line to blame is answered so."""
    llm = LLM(str(checkpoint("qwen3")), runner="pooling", **SMALL)
    raws = [line("a", EMBEDDINGS, input=[FOX, "two"]), line("b", "/rerank", query=FOX, documents=["two", FOX])]
    raws += [line("c", input="x"), line("d", EMBEDDINGS, input="x", nonsense=1), line("e", EMBEDDINGS, input=[])]
    answers = answer_all(llm, raws)
    expected = [output.outputs.embedding for output in llm.embed([FOX, "two"])]
    assert [each["embedding"] for each in answers[1].body["data"]] == expected
    assert answers[1].body["id"] == "embd-a" and answers[1].body["usage"]["prompt_tokens"] > 0
    assert [result["index"] for result in answers[2].body["results"]] == [1, 0]
    assert "samples no tokens" in answers[3].error and "nonsense" in answers[4].warning
    assert "input must be a text" in answers[5].error
    plant(monkeypatch, llm.engine.model_runner, "run", {1})
    assert [each["embedding"] for each in answer_all(llm, raws[:1])[1].body["data"]] == expected
