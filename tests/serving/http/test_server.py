"""`nanovllm serve`: OpenAI's own client on every endpoint, what clients do to a server, and what it must not mind."""

import asyncio
import itertools
import json
import math
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.sequence import NO_TOKEN, Sequence
from nanovllm.outputs import RequestMetrics
from nanovllm.serving.http.html_pictures import draw_block, holders
from nanovllm.serving.http.metrics import Metrics
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.serve import Server
from nanovllm.serving.openai.answer import CHAT, COMPLETIONS, Chunks
from nanovllm.serving.openai.shown import Shown
from tests.checkpoints import SMALL
from tests.faults import plant
from tests.servers import PATIENCE_S, raw_post, serving

FOX = "the quick brown fox jumps over the lazy dog"
USER = [{"role": "user", "content": "two gulls circled"}]
LONG = dict(temperature=0, max_tokens=200, extra_body={"ignore_eos": True})


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint(), ServeOptions(max_body_bytes=100_000, classroom=True)) as running:
        yield running


@pytest.fixture
def client(server):
    yield server.client()
    server.llm.thread.set_pace()
    server.assert_at_rest()


@pytest.fixture(scope="module")
def one_at_a_time(checkpoint):
    """A server where the samples of a request begin one after another."""
    with serving(checkpoint(), max_num_seqs=1) as running:
        yield running


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint()), **SMALL)


# -- what the client sees ---------------------------------------------------------------------------------------------


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "small"]
    assert client.models.retrieve("small").max_model_len == 256
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o' here; there is tiny, small"):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.NotFoundError, match="gpt-4o") as error:
        client.completions.create(model="gpt-4o", prompt=FOX)
    assert error.value.code == "model_not_found" and error.value.type == "invalid_request_error"


CASES = [  # parameters as OpenAI's client has them, and beside them what only vLLM's servers know
    (dict(temperature=0, max_tokens=12), {}),
    (dict(temperature=0.8, seed=5, max_tokens=12, n=2, top_p=0.9), {"min_p": 0.01, "top_k": 50}),
    (dict(temperature=0, max_tokens=20, frequency_penalty=0.5, presence_penalty=0.2), {"repetition_penalty": 1.1}),
    (dict(temperature=1.0, seed=3, max_tokens=30, stop=["e", "qu"]), {"include_stop_str_in_output": True}),
    (dict(temperature=1.0, seed=4, max_tokens=30, n=3, stop=["e", "qu"]), {}),
    (dict(temperature=0, max_tokens=8), {"stop_token_ids": [40], "ignore_eos": True, "min_tokens": 3}),
    (dict(temperature=0.7, seed=9, max_tokens=6, logit_bias={"30": 5.0}), {"bad_words": ["fox"]}),
]


def test_how_long_an_answer_may_be(server, client, monkeypatch):
    """A completion 16 tokens, as OpenAI says, and a chat as many as generation_config.json says."""
    monkeypatch.setitem(server.engine.model_config.generation, "max_tokens", 40)
    given = dict(model="tiny", temperature=0, extra_body={"ignore_eos": True})
    assert client.completions.create(prompt=FOX, **given).usage.completion_tokens == 16
    assert client.completions.create(prompt=FOX, max_tokens=20, **given).usage.completion_tokens == 20
    assert client.chat.completions.create(messages=USER, **given).usage.completion_tokens == 40
    with pytest.raises(openai.BadRequestError, match="this model's maximum context length is 256 tokens") as error:
        client.completions.create(prompt=[5] * 300, **given)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_an_ended_choice_gets_no_more_chunks(url):
    """One of two samples ends, and the other goes on for two steps."""
    chunks, metrics = Chunks("id", url, "tiny", Shown()), RequestMetrics(0.0)
    reasons = []
    for texts in (("a", "b"), ("ab", "bc"), ("ab", "bcd"), ("ab", "bcde")):
        ends = ["stop" if texts[0] == "ab" else None, "length" if texts[1] == "bcde" else None]
        samples = [CompletionOutput(i, texts[i], [5] * len(texts[i]), ends[i]) for i in range(2)]
        output = RequestOutput("0", None, [1], samples, all(ends), 0, metrics)
        choices = [chunk["choices"][0] for chunk in chunks.of(0, output)]
        reasons.append([(choice["index"], choice["finish_reason"]) for choice in choices])
    assert reasons == [[(0, None), (1, None)], [(0, "stop"), (1, None)], [(1, None)], [(1, "length")]]


@pytest.mark.parametrize("given, extra", CASES)
def test_completions_are_those_of_generate(client, llm, given, extra):
    """Whole, and as a stream; a string, token ids, several prompts."""
    expected = llm.generate([FOX, [5, 6, 7]], SamplingParams(**given, **extra))
    texts = [(s.text, s.finish_reason) for output in expected for s in output.outputs]
    for prompt, wanted in ((FOX, texts[: len(texts) // 2]), ([FOX], texts[: len(texts) // 2])):
        whole = client.completions.create(model="tiny", prompt=prompt, **given, extra_body=extra)
        assert [(choice.text, choice.finish_reason) for choice in whole.choices] == wanted
        assert whole.usage.completion_tokens == sum(len(s.token_ids) for s in expected[0].outputs)
    got: dict[int, list] = {}
    ids = [output.prompt_token_ids for output in expected]
    for chunk in client.completions.create(model="tiny", prompt=ids, stream=True, **given, extra_body=extra):
        [choice] = chunk.choices
        text, reason = got.get(choice.index, ["", None])
        assert reason is None, "a choice goes on after its end"
        got[choice.index] = [text + choice.text, choice.finish_reason]
    assert [tuple(got[index]) for index in range(len(texts))] == texts


def test_chats_are_those_of_chat(client, llm):
    given = dict(temperature=0.9, seed=11, n=2)
    [expected] = llm.chat(USER, SamplingParams(max_tokens=10, **given))
    whole = client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=10, **given)
    assert [c.message.content for c in whole.choices] == [s.text for s in expected.outputs]
    assert all(c.message.role == "assistant" for c in whole.choices)
    content, roles, usage = {0: "", 1: ""}, [], None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=10, stream=True, stream_options=options, **given
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            assert usage is None
            content[choice.index] += choice.delta.content
            roles += [choice.delta.role] if choice.delta.role else []
    assert [content[0], content[1]] == [s.text for s in expected.outputs] and roles == ["assistant"] * 2
    assert usage.prompt_tokens == len(expected.prompt_token_ids) and usage.prompt_tokens_details.cached_tokens > 0
    assert usage.completion_tokens == sum(len(s.token_ids) for s in expected.outputs)
    options["continuous_usage_stats"] = True  # vLLM's
    every = [
        *client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=3, stream=True, stream_options=options, n=2
        )
    ]
    assert {chunk.usage.prompt_tokens for chunk in every} == {usage.prompt_tokens}
    assert [chunk.usage.completion_tokens <= 3 for chunk in every] == [bool(chunk.choices) for chunk in every]


def test_logprobs_whole_and_streamed(client):
    salts = itertools.count()

    def ask(create, **given):
        """Computed anew each time: of a prompt that is cached the last bits may be others."""
        extra = {"ignore_eos": True, "cache_salt": f"{next(salts)}"}
        return create(model="tiny", temperature=0, max_tokens=9, extra_body=extra, **given)

    complete, chat = client.completions.create, client.chat.completions.create
    whole = ask(complete, prompt=FOX, logprobs=3).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in ask(complete, prompt=FOX, logprobs=3, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(whole, name) and len(whole.tokens) == 9
    given = dict(messages=USER, logprobs=True, top_logprobs=2)
    whole = ask(chat, **given).choices[0].logprobs.content
    parts = [chunk.choices[0].logprobs.content for chunk in ask(chat, **given, stream=True)]
    assert [x for part in parts for x in part] == whole and len(whole) == 9


@pytest.mark.parametrize(
    "shows", [{}, {"logprobs": 1}, {"return_token_ids": True}, {"logprobs": 1, "return_token_ids": True}], ids=str
)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_each_choices_stream_is_its_whole_answer(one_at_a_time, url, shows):
    """Also of a choice that waits while others are answered: the beginning that it repeats is not lost."""
    body = {"n": 3, "temperature": 0, "max_tokens": 3, "ignore_eos": True, "echo": True, **shows}
    if url == CHAT:
        messages = [*USER, {"role": "assistant", "content": "over the"}]
        body |= {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
        body |= {"logprobs": "logprobs" in shows}
    else:
        body["prompt"] = [FOX, "two gulls"]

    def ask(**more) -> str:
        one_at_a_time.send("/reset_prefix_cache", b"")  # of a cached prompt the last bits may be others
        status, raw = one_at_a_time.send(url, json.dumps(body | more).encode())
        assert status == 200
        return raw.decode()

    def text_of(choice: dict) -> str:
        return (choice.get("message") or choice.get("delta") or {"content": choice.get("text", "")})["content"]

    def parts_of(choice: dict) -> dict[str, list]:
        """Its lists: of tokens, of what goes with each, and of the prompt's tokens."""
        lists = {name: value for name, value in choice.items() if isinstance(value, list)}
        return lists | {name: value for name, value in (choice["logprobs"] or {}).items() if isinstance(value, list)}

    whole = json.loads(ask())["choices"]
    assert all(text_of(choice).startswith(("over the", FOX, "two gulls")) for choice in whole)
    texts, parts = [""] * len(whole), [{} for _ in whole]
    for line in ask(stream=True).split("\n\n"):
        for choice in json.loads(line.removeprefix("data: "))["choices"] if line.startswith("data: {") else ():
            texts[choice["index"]] += text_of(choice)
            for name, values in parts_of(choice).items():
                parts[choice["index"]].setdefault(name, []).extend(values)
    assert texts == [text_of(choice) for choice in whole]
    assert parts == [parts_of(choice) for choice in whole]


def test_structured_answers(client):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    made = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=30, temperature=0, response_format=given, logit_bias={"2": -100}
    )
    text = made.choices[0].message.content
    assert text.lstrip().startswith("{") and (made.choices[0].finish_reason == "length" or "a" in json.loads(text))


# What llguidance would follow by recursion until the process ends.
CHAIN = {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1100)} | {"1100": {}}}
RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2100)) + 'r2100: "a"'
BAD = [  # beside those of tests/jobs/test_answer_lines.py, which are read by the same code
    ({}, "body has no prompt"),
    ({"prompt": FOX, "temperature": "hot"}, "temperature must be a number"),
    ({"prompt": FOX, "n": 10_000}, "number of samples"),
    ({"prompt": FOX, "messages": USER}, "body has no argument 'messages'"),
    ({"prompt": FOX, "stream": 1}, "stream must be true or false"),
    *(({"prompt": FOX, "model": odd}, f"model must be a text, found {odd}") for odd in ([], {}, 0, False, 5)),
    ({"prompt": FOX, "stream_options": {"include_usage": True}}, "stream_options needs stream: true"),
    ({"prompt": FOX, "stream": True, "stream_options": [1]}, "stream_options must be an object"),
    ({"prompt": FOX, "cache_salt": 5}, "cache_salt must be a string"),
    ({"prompt": "\ud800"}, "not valid Unicode"),
    ({"prompt": FOX, "chat_template": "{{ 7 * 7 }}"}, "a request may not bring one"),
    ({"prompt": FOX, "structured_outputs": {"json": "{"}}, "json"),
    (
        {"prompt": FOX, "response_format": {"type": "json_schema", "json_schema": {"schema": CHAIN}}},
        "more than 1000 levels",
    ),
    ({"prompt": FOX, "structured_outputs": {"grammar": RULES}}, "signs of rules and brackets"),
    ({"prompt": FOX, "structured_outputs": {"json": {"x-guidance": [1]}}}, "x-guidance must be an object"),
    ({"prompt": "x" * 4000}, "no token has more than 12 characters"),
    ({"prompt": FOX, "bad_words": ["fox"] * 65}, "bad_words may have 64 entries, found 65"),
    ({"prompt": FOX, "stop": "x" * 5000}, "stop may have 4096 characters in all"),
    ({"prompt": FOX, "stop_token_ids": [5] * 1025}, "stop_token_ids may have 1024 entries, found 1025"),
    ({"prompt": FOX, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias may have 1024 entries"),
    ({"prompt": FOX, "allowed_token_ids": [5] * 321}, "allowed_token_ids may have 320 entries"),
    ({"prompt": [FOX] * 1025}, "the number of prompts"),
]


@pytest.mark.parametrize("body, message", BAD, ids=[message for _, message in BAD])
def test_bad_requests(server, client, body, message):
    status, raw = server.send(COMPLETIONS, json.dumps(body).encode())
    error = json.loads(raw)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", None)
    assert message in error["message"]


def test_bad_chats(server, client):
    for messages, text in (("x", "list of messages"), ([{"role": "judge", "content": "x"}], "unknown role judge")):
        with pytest.raises(openai.BadRequestError, match=text):
            client.chat.completions.create(model="tiny", messages=messages)
    with pytest.raises(openai.BadRequestError, match="a request may not bring one"):
        client.chat.completions.create(model="tiny", messages=USER, extra_body={"chat_template": "{{ 7 * 7 }}"})
    with pytest.raises(openai.BadRequestError, match=r"'documents' only as .. .found .{'title': 'A', 'text': 'B'}"):
        documents = {"documents": [{"title": "A", "text": "B"}]}
        client.chat.completions.create(model="tiny", messages=USER, extra_body=documents)
    parts, calls = ([{"role": "user", name: [value] * 4096}] for name, value in (("content", "x"), ("tool_calls", {})))
    for many in ([{"role": ""}] * 4097, parts, calls):
        with pytest.raises(openai.BadRequestError, match="messages may have 4096 entries, found 4097"):
            client.chat.completions.create(model="tiny", messages=many)


HOSTILE = [
    (b"", {}, 400),
    (b"{", {}, 400),
    (b"[]", {}, 400),
    (b'"x"', {}, 400),
    (b"\xff\xfe\x00", {}, 400),
    (b"[" * 90_000, {}, 400),
    (b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}", {}, 400),
    (b'{"prompt": "x", "seed": 1' + b"0" * 9_000 + b"}", {}, 400),
    (b'{"prompt": "x", "temperature": NaN}', {}, 400),
    (b'{"prompt": "x", "temperature": 1e999}', {}, 400),
    (b'{"a": 1' * 10_000, {}, 400),
    (b"x" * 100_001, {}, 413),
    (b"{}", {"Content-Length": str(10**12)}, 413),
    (b"{}", {"Content-Length": str(10**30)}, 400),
    (b"{}", {"Content-Type": "text/plain"}, 415),
    (b"prompt=x", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    (b"{}", {"Host": "evil.example"}, 403),
    (b"{}", {"Host": "127.0.0.1.evil.example:80"}, 403),
]


@pytest.mark.parametrize("raw, headers, status", HOSTILE, ids=[f"{raw[:9]!r} {status}" for raw, _, status in HOSTILE])
def test_hostile_requests(server, client, raw, headers, status):
    assert server.send(COMPLETIONS, raw, headers)[0] == status
    assert server.send("/health")[0] == 200


def test_another_host_is_told_what_would_work(server, client):
    for host, found in (("0.0.0.0:8000", "not to '0.0.0.0:8000'"), ("[::1", "not to '[::1'"), ("", "without a Host")):
        status, raw = server.send("/v1/models", headers={"Host": host})
        message = json.loads(raw)["error"]["message"]
        assert status == 403 and found in message and "--host 0.0.0.0 and an --api-key" in message


def test_thousands_of_headers(server, client):
    with suppress(ConnectionError):  # it may hang up before all are sent
        assert server.send(COMPLETIONS, b"{}", {f"X-{i}": "y" * 50 for i in range(3_000)})[0] == 400
    assert server.send("/health")[0] == 200


def test_other_paths_and_methods(server):
    for path, method, status in (
        ("/v1/nothing", "GET", 404),
        (COMPLETIONS, "GET", 405),
        ("/page/chat.js", "POST", 405),
        ("/page/../serve.py", "GET", 404),
        ("/page/%2e%2e/serve.py", "GET", 404),
        ("/page//etc/passwd", "GET", 404),
    ):
        found, raw = server.send(path, method=method)
        assert found == status and json.loads(raw)["error"]["message"], path
    for path, method, allowed, shown in (
        (COMPLETIONS, "GET", "POST", COMPLETIONS),
        ("/v1/responses/resp_1", "POST", "DELETE, GET, HEAD", "/v1/responses/{response_id}"),
    ):
        found, raw, headers = server.exchange(path, method=method)
        assert found == 405 and headers["allow"] == allowed
        assert json.loads(raw)["error"]["message"] == f"{shown} takes {allowed}, not '{method}'"
    found, raw = server.send("/")
    assert found == 200 and b"<title>nanovllm" in raw


# -- what clients do --------------------------------------------------------------------------------------------------


def test_the_page_asks_the_demo_model_greedily(demo_stand_in, server):
    """Its field holds the temperature: chat.js sends what stands there."""
    field = re.compile(r'<input id="temperature"([^>]*)>')
    with serving(demo_stand_in) as demo:
        of_demo, of_other = (field.search(each.send("/")[1].decode())[1] for each in (demo, server))
    assert 'value="0"' in of_demo and "value" not in of_other


def test_who_leaves_frees_blocks_before_the_next_step(server, client):
    """In mid-stream, while it waits in the queue, and without a stream: the client closes its connection."""
    server.llm.thread.set_pace(2)
    stream = client.completions.create(model="tiny", prompt=FOX, stream=True, **LONG)
    next(iter(stream))
    server.until(lambda: server.llm.thread.steps_left == 0)
    num_steps = server.call(lambda: server.engine.stats.num_steps)
    connections = []
    for streams in (True, False):  # they wait: no step is made
        body = {"prompt": "two gulls", "stream": streams, "max_tokens": 99, "ignore_eos": True}
        connections.append(socket.create_connection(("127.0.0.1", server.port)))
        connections[-1].sendall(raw_post(COMPLETIONS, body))
    server.until(lambda: len(server.engine.scheduler.waiting) == 2)
    assert server.call(lambda: server.engine.scheduler.running[0].block_table)
    stream.close()
    for connection in connections:
        connection.close()
    server.assert_at_rest()
    assert server.call(lambda: server.engine.stats.num_steps) == num_steps


def test_a_reader_that_does_not_read_slows_nobody(server, client):
    body = {"prompt": FOX, "stream": True, "logprobs": 20, "max_tokens": 200, "ignore_eos": True}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(raw_post(COMPLETIONS, body))
        server.until(lambda: server.engine.requests)
        done = client.completions.create(model="tiny", prompt="two gulls", **LONG)
        assert done.usage.completion_tokens == 200
        server.assert_at_rest()  # its own request is over, too
        raw = b""
        while b"[DONE]" not in raw:
            raw += (part := connection.recv(65536))
            assert part, "the answer broke off"
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events) == 200


def test_a_full_queue(checkpoint):
    with serving(checkpoint(), ServeOptions(max_waiting=1)) as server:
        server.llm.thread.set_pace(0)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as first:
            first.sendall(raw_post(COMPLETIONS, {"prompt": FOX, "max_tokens": 9}))
            server.until(lambda: server.engine.scheduler.waiting)
            with pytest.raises(openai.RateLimitError, match="1 sequences wait already") as error:
                server.client().completions.create(model="tiny", prompt=FOX)
            assert error.value.response.headers["retry-after"] == "1"
            server.llm.thread.set_pace()
            assert first.recv(1000).startswith(b"HTTP/1.1 200")


def test_samples_are_counted_before_they_wait(checkpoint):
    """Never more than max_waiting wait, however they come: as n, as prompts, or at once in several requests."""
    with serving(checkpoint(), ServeOptions(max_waiting=8)) as server:
        server.llm.thread.set_pace(0)
        for body in ({"prompt": FOX, "n": 9}, {"prompt": [FOX] * 3, "n": 3}, {"prompt": [FOX] * 9}):
            status, raw = server.send(COMPLETIONS, json.dumps(body).encode())
            assert status == 400 and b"between 1 and 8, found 9" in raw
        with pytest.raises(ValueError, match=r"may have 8 samples \(max_waiting\), found 9"):
            asyncio.run_coroutine_threadsafe(
                anext(server.llm.generate(FOX, SamplingParams(n=9))), server.llm.thread.loop
            ).result(PATIENCE_S)

        def ask(num: int) -> int:
            return server.send(COMPLETIONS, json.dumps({"prompt": [FOX] * 5, "max_tokens": 1}).encode())[0]

        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(ask, i) for i in range(6)]
            server.until(lambda: sum(answer.done() for answer in answers) == 5)
            assert len(server.engine.scheduler.waiting) == 5
            server.llm.thread.set_pace()
            assert sorted(answer.result(PATIENCE_S) for answer in answers) == [200] + [429] * 5


def test_deadlines(checkpoint):
    """While it waits, and in the middle of its answer."""
    with serving(checkpoint(), ServeOptions(request_timeout=0.4)) as server:
        for num_steps, streams in ((0, False), (1, True)):
            server.llm.thread.set_pace(num_steps)
            with pytest.raises(openai.APIError, match=r"not done after 0\.4 s") as error:
                list(server.client().completions.create(model="tiny", prompt=FOX, stream=streams, **LONG))
            assert streams or error.value.status_code == 504
            server.assert_at_rest()


def test_a_failed_step_is_500_and_the_server_goes_on(server, client, monkeypatch):
    for streams in (False, True):
        plant(monkeypatch, server.engine.model_runner, "run", [1], ArithmeticError("planted"))
        with pytest.raises(openai.InternalServerError, match="planted"):
            client.completions.create(model="tiny", prompt=FOX, stream=streams)
    again = client.completions.create(model="tiny", prompt=FOX, **LONG | {"max_tokens": 3})
    assert again.usage.completion_tokens == 3


def without_tokens(result):
    return replace(result, sampled_token_ids=[[NO_TOKEN] * len(row) for row in result.sampled_token_ids])


def test_a_sample_that_fails_is_500(server, client, monkeypatch):
    run = server.engine.model_runner.run
    monkeypatch.setattr(server.engine.model_runner, "run", lambda output: without_tokens(run(output)))
    for streams in (False, True):
        with pytest.raises(openai.APIError, match="there is no token to choose") as error:
            list(client.completions.create(model="tiny", prompt=FOX, stream=streams))
        assert streams or (error.value.status_code, error.value.code) == (500, "sample_failed")
    server.assert_at_rest()


def test_keys_are_tenants(checkpoint):
    """Nobody finds what another tenant has sent, whatever salt they send; the same tenant does."""
    with serving(checkpoint(), ServeOptions(api_key=("one", "two"))) as server:

        def found(key: str, salt: str | None = None) -> int:
            extra = {"cache_salt": salt} if salt else {}
            made = server.client(key).completions.create(model="tiny", prompt=FOX, max_tokens=1, extra_body=extra)
            return made.usage.prompt_tokens_details.cached_tokens

        assert found("one") == 0 < found("one")
        assert found("two") == 0 < found("two")
        assert found("one", "a") == 0 < found("one", "a") and found("two", "a") == 0
        assert found("one") > 0
        for key in ("three", "", "onetwo"):
            with pytest.raises(openai.AuthenticationError, match="key"):
                server.client(key or "x").models.list()
        for host in ("localhost:/x", "localhost:?", "localhost:#", "localhost:["):  # the path is not what it looks like
            assert server.send("/v1/models", headers={"Host": host})[0] in (400, 401, 403)
        for path in ("/v1/models", "/inside/events"):
            assert server.send(path)[0] == server.send(path, headers={"Authorization": "Bearer"})[0] == 401
        assert server.send("/health")[0] == server.send("/metrics")[0] == server.send("/")[0] == 200


def test_pages_elsewhere(checkpoint):
    options = ServeOptions(allowed_origins=("http://ui.example",), api_key=("k",))
    with serving(checkpoint(), options) as server:
        for origin, status in (("http://ui.example", 200), ("http://evil.example", 400)):
            preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            assert server.send(COMPLETIONS, headers=preflight, method="OPTIONS")[0] == status


def test_vllms_variable_for_the_key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert ServeOptions().api_key == ("k",) and ServeOptions(api_key=("own",)).api_key == ("own",)


def test_one_text_is_a_list_of_one():
    options = ServeOptions(api_key="key", served_model_name="tiny", lora_modules="a=b", allowed_origins="http://a.b")
    assert (options.api_key, options.served_model_name, options.lora_modules) == (("key",), ("tiny",), ("a=b",))
    assert options.allowed_origins == ("http://a.b",)


def test_what_the_servers_end_cuts_off_is_told(server):
    server.llm.thread.set_pace(0)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(server.send, COMPLETIONS, json.dumps({"prompt": FOX, "max_tokens": 50}).encode())
        server.until(lambda: server.llm.readers)
        server.call(lambda: Server._end_readers(server))
        status, raw = asking.result()
    server.llm.thread.set_pace()
    assert status == 503 and "--shutdown-timeout has passed" in json.loads(raw)["error"]["message"]
    server.assert_at_rest()


def test_a_page_elsewhere_changes_nothing(server):
    """Nor where a request needs no body, which a browser sends without asking first. Proxies may rename the host."""
    for headers, status in (
        ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 403),
        ({"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://hub.example", "Sec-Fetch-Site": "same-origin"}, 200),
        ({}, 200),
    ):
        answer = server.send("/reset_prefix_cache", b"", headers=headers)
        assert answer[0] == status and (status == 200 or b"--allowed-origins" in answer[1])


def test_a_method_of_a_clients_own_is_no_label(server):
    for number in range(3):
        server.send("/", method=f"BREW{number}")
    text = server.send("/metrics")[1]
    assert b"BREW" not in text and b'method="other"' in text


def test_metrics(server, client):
    before = metrics(server)
    client.completions.create(model="tiny", prompt=FOX, n=2, **LONG | {"max_tokens": 5})
    for _ in client.completions.create(model="tiny", prompt=FOX, stream=True, **LONG | {"max_tokens": 4}):
        pass
    after = metrics(server)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:generation_tokens_total"] == 14 and grown["nanovllm_finished_requests_total"] == 2
    assert grown["vllm:time_to_first_token_seconds_count"] == 2 == grown["vllm:e2e_request_latency_seconds_count"]
    assert grown["vllm:inter_token_latency_seconds_count"] == 7  # of the first sample of each
    assert grown["vllm:prefix_cache_hits_total"] > 0 and after["vllm:num_requests_running"] == 0
    assert grown["vllm:e2e_request_latency_seconds_sum"] > grown["vllm:time_to_first_token_seconds_sum"] > 0


def test_what_is_known_of_requests_that_have_ended_is_forgotten(server):
    """Also where none of them got as far as a token."""
    counted = Metrics(server.engine, "tiny")
    for number in range(300):
        seq = Sequence([5])
        seq.request_id = str(number)
        counted.on_step(SchedulerOutput([], [seq], 0), [])
    assert len(counted._preemptions) <= 101


def metrics(server) -> dict[str, float]:
    """Those that have no labels of their own."""
    families = text_string_to_metric_families(server.send("/metrics")[1].decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: sample.value for sample in samples if not sample.labels.keys() - {"model_name", "engine"}}


# -- the engine's inside ----------------------------------------------------------------------------------------------


def test_frames_are_the_engine(server, client):
    """What a page is told is what the engine holds, step by step; nothing is drawn when nobody looks."""
    assert server.engine.block_manager.on_event is None
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as page:
        page.sendall(b"GET /inside/events HTTP/1.0\r\nHost: localhost\r\n\r\n")
        lines = page.makefile()
        while lines.readline().strip():
            pass

        def frames():
            for line in lines:
                if line.startswith("data: "):
                    yield json.loads(line[6:])

        told = frames()
        first = next(told)
        assert (first["num_blocks"], first["block_size"], first["blocks_per_cell"]) == (160, 4, 1)
        cells: dict[int, str] = {}

        def follow(condition):
            """Frames until one shows it."""
            ends = time.monotonic() + PATIENCE_S
            for frame in told:
                assert time.monotonic() < ends, "no frame shows it"
                cells.update({int(i): html for i, html in frame.get("cells", {}).items()})
                if "panels" in frame and condition(frame):
                    return frame["panels"]

        def drawn() -> dict[int, str]:
            held = holders(server.engine.scheduler.running, server.inside.drawing.names)
            blocks = server.engine.block_manager.blocks
            return {block.block_id: draw_block(block, held.get(block.block_id, []), []) for block in blocks}

        def assert_same() -> None:
            for number, html in cells.items():  # what one reads when one points at a cell
                [title] = re.findall(r'title="([^"]*)"', html)
                assert re.fullmatch(rf"block {number}: (free|cached|held by \w+|shared by \w+(, \w+)+)", title), html
            unmarked = {i: re.sub(r' data-event="\w+" style="[^"]*"', "", html) for i, html in cells.items()}
            assert unmarked == server.call(drawn)

        server.llm.thread.set_pace(0)
        with ThreadPoolExecutor(2) as pool:
            given = dict(model="tiny", prompt=FOX, **LONG | {"max_tokens": 9})
            answers = [pool.submit(client.completions.create, **given) for _ in range(2)]
            follow(lambda f: f["steps_left"] == 0 and f["panels"]["waiting"].count("WAITING") == 2)
            assert_same()
            assert server.send("/inside/pace", b'{"steps_left": 3, "delay_s": 0.01}') == (200, b"{}")
            panels = follow(lambda f: f["steps_left"] == 0 and f["panels"]["running"].count("DECODE") == 2)
            assert "shared" in "".join(cells.values()) and panels["steps"].count("<svg") == 3
            assert_same()
            assert server.send("/inside/pace", b"{}")[0] == 200
            follow(lambda f: "Nothing runs" in f["panels"]["running"])
            assert all(answer.result(PATIENCE_S).usage.completion_tokens == 9 for answer in answers)
        assert "cached" in "".join(cells.values())
        assert_same()
        assert json.loads(server.send("/inside/forget", b"{}")[1]) == {"done": True}
        follow(lambda f: "cached" not in "".join(cells.values()))
        assert_same()
        for body in (b'{"steps_left": -1}', b'{"steps_left": "x"}', b'{"delay_s": 99}', b'{"stepsleft": 1}', b"[]"):
            assert server.send("/inside/pace", body)[0] == 400
        server.llm.thread.set_pace(0)
        lines.close()
    server.until(lambda: server.engine.block_manager.on_event is None)
    server.until(lambda: server.llm.thread.steps_left == math.inf)  # whoever had paused it has gone


def test_a_picture_that_fails_is_not_the_last(server, client, monkeypatch):
    plant(monkeypatch, server.inside.drawing, "draw", [1], ArithmeticError("planted"))
    assert server.send("/inside/events", method="HEAD")[0] == 200  # and ends
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as page:
        page.sendall(b"GET /inside/events HTTP/1.0\r\nHost: localhost\r\n\r\n")
        with page.makefile() as lines:
            assert any("panels" in line for line in lines)


@pytest.mark.parametrize("num_turns", range(5))
def test_a_page_that_closes_as_a_picture_comes(server, client, num_turns):
    """Its viewer goes, in whatever turn of the event loop the picture is there."""
    inside, is_closed = server.inside, asyncio.Event()

    async def receive():
        await is_closed.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    async def open_and_close():
        request = Request({"type": "http", "method": "GET", "app": server.app})
        page = asyncio.create_task((await inside.show(request))({}, receive, send))
        while not inside.viewers or any(viewer.changed.is_set() for viewer in inside.viewers):
            await asyncio.sleep(0)
        [viewer] = inside.viewers
        is_closed.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        viewer.changed.set()
        await asyncio.wait({page}, timeout=PATIENCE_S)
        assert page.done() and not inside.viewers

    asyncio.run_coroutine_threadsafe(open_and_close(), server.llm.thread.loop).result(2 * PATIENCE_S)
    server.until(lambda: server.engine.block_manager.on_event is None)


def test_only_a_classroom_is_played_with(checkpoint):
    with serving(checkpoint()) as server:
        for path in ("/inside/pace", "/inside/forget"):
            status, raw = server.send(path, b"{}")
            assert status == 403 and b"--classroom" in raw
        assert server.llm.thread.steps_left == math.inf
