"""What an operator has: ids, lines in the log, metrics under vLLM's names, and endpoints beside those for answers."""

import asyncio
import difflib
import json
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue

import pytest
from prometheus_client.parser import text_string_to_metric_families

import nanovllm
from nanovllm.serving import async_llm
from nanovllm.serving.http import log
from nanovllm.serving.http.access import MAX_ID_CHARS
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.requests import INSTEAD
from nanovllm.serving.openai import fields
from nanovllm.serving.openai.answer import CHAT, COMPLETIONS
from tests.faults import plant
from tests.servers import PATIENCE_S, serving

FOX = "the quick brown fox jumps over the lazy dog"
USER = [{"role": "user", "content": "two gulls circled"}]


@pytest.fixture(scope="module")
def running(checkpoint):
    with serving(checkpoint(), ServeOptions(enable_tokenizer_info_endpoint=True)) as running:
        yield running


@pytest.fixture
def server(running):
    yield running
    running.llm.thread.set_pace()
    running.assert_at_rest()


class Lines(logging.Handler):
    """The access log's, as they come: each is written when its answer has gone out."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: Queue[str] = Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.queue.put(record.getMessage())

    def next(self) -> str:
        return self.queue.get(timeout=PATIENCE_S)


@pytest.fixture
def lines():
    handler, logger = Lines(), logging.getLogger("nanovllm.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def ask(server, body: dict, path: str = COMPLETIONS, headers: dict[str, str] | None = None):
    status, raw, found = server.exchange(path, json.dumps(body).encode(), headers)
    return status, raw if raw.startswith(b"data: ") else json.loads(raw or b"null"), found


@contextmanager
def streaming(server):
    """A stream whose engine pauses after two tokens."""
    server.llm.thread.set_pace(2)
    given = dict(model="tiny", prompt=FOX, temperature=0, max_tokens=200, extra_body={"ignore_eos": True})
    stream = server.client().completions.create(stream=True, **given)
    next(iter(stream))
    server.until(lambda: server.llm.thread.steps_left == 0)
    yield stream


# -- ids and the log --------------------------------------------------------------------------------------------------


def test_a_line_for_each_request(server, lines):
    num_in = len(server.llm.llm.get_tokenizer()(FOX).input_ids)
    num_cached = (num_in - 1) // 4 * 4
    body = {"prompt": FOX, "max_tokens": 5, "ignore_eos": True, "cache_salt": "a line"}
    asked = [(1, 0, {}), (1, num_cached, {"stream": True}), (2, 2 * num_cached, {"prompt": [FOX, FOX]})]
    for number, (num, cached, more) in enumerate(asked):
        ask(server, body | more, headers={"X-Request-Id": f"request {number}"})
        said = f"POST /v1/completions 200: {num * num_in} tokens in ({cached} cached), {5 * num} out, "
        line = lines.next()
        assert line.startswith(said) and line.endswith(f" s, id request {number}")
    ask(server, {"prompt": FOX, "n": 0})
    assert lines.next().startswith("POST /v1/completions 400: 0.")
    for path in ("/health", "/ping", "/metrics", "/load", "/v1/models%0ainjected"):
        server.send(path)
    assert lines.next().startswith("GET /v1/models%0Ainjected 404: "), "a probe that finds all well is worth no line"


def test_the_line_of_who_leaves(server, lines):
    with streaming(server) as stream:
        stream.close()
    line = lines.next()
    assert line.startswith("POST /v1/completions 499: ") and " 2 out, " in line


def test_ids_in_both_directions(server, lines):
    body = {"prompt": FOX, "max_tokens": 1}
    _, answer, headers = ask(server, body)
    own = headers["x-request-id"]
    assert len(own) == 32 and answer["id"] == f"cmpl-{own}" and lines.next().endswith(f"id {own}")
    for given, more in (("mine-1", {}), ("mine-1", {"request_id": "x"}), ("", {"request_id": "mine-1"})):
        _, answer, headers = ask(server, body | more, headers={"X-Request-Id": given})
        assert headers["x-request-id"] == "mine-1" and answer["id"] == "cmpl-mine-1"
        assert lines.next().endswith("id mine-1")
    _, raw, headers = ask(server, body | {"stream": True}, headers={"X-Request-Id": "mine-2"})
    assert b'"id": "cmpl-mine-2"' in raw and headers["x-request-id"] == "mine-2"
    for path in ("/health", "/v1/nothing", "/"):
        assert server.exchange(path, headers={"X-Request-Id": "mine-3"})[2]["x-request-id"] == "mine-3"
    for bad in ("x" * (MAX_ID_CHARS + 1), "caf\xe9", "a\tb"):
        status, raw, headers = server.exchange("/v1/models", headers={"X-Request-Id": bad})
        assert status == 400 and b"printable ASCII" in raw and len(headers["x-request-id"]) == 32
        assert ask(server, body | {"request_id": bad})[0] == 400


def test_an_id_may_come_twice_at_once(server):
    server.llm.thread.set_pace(0)
    with ThreadPoolExecutor(3) as pool:
        body, headers = {"prompt": FOX, "max_tokens": 2}, {"X-Request-Id": "again"}
        answers = [pool.submit(ask, server, body, COMPLETIONS, headers) for _ in range(3)]
        server.until(lambda: len(server.engine.requests) == 3)
        server.llm.thread.set_pace()
        assert [answer.result(PATIENCE_S)[0] for answer in answers] == [200] * 3


def test_a_failure_that_is_ours_has_an_id_and_a_line(server, lines, monkeypatch):
    plant(monkeypatch, server.llm, "prepare", [1], ArithmeticError("planted"))
    status, answer, headers = ask(server, {"tokens": [5]}, "/detokenize", {"X-Request-Id": "bad luck"})
    assert status == 500 and "planted" not in str(answer) and headers["x-request-id"] == "bad luck"
    line = lines.next()
    assert line.startswith("POST /detokenize 500: ") and line.endswith("id bad luck")


def test_a_log_that_nobody_reads_slows_nobody(monkeypatch):
    monkeypatch.setattr(log, "MAX_UNWRITTEN", 100)
    read, write = os.pipe()
    handler, logger = log.Unhurried(write), logging.getLogger("test_unhurried")
    logger.addHandler(handler)
    logger.propagate = False
    for number in range(5000):
        logger.warning("line %d %s", number, "x" * 100)
    with os.fdopen(read) as file:
        os.set_blocking(read, True)
        first = file.readline()
        assert first.split()[2:4] == ["line", "0"] and first[4] == "-"
        logger.warning("the last")
        handler.flush()
        reader = threading.Thread(target=os.close, args=(write,))
        reader.start()
        text = file.read()
    assert "lines were lost: nobody read them)" in text and text.count("\n") < 4000
    handler.flush()


def test_a_sum_every_ten_seconds(server, monkeypatch, caplog):
    monkeypatch.setattr(log, "INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO, log.logger.name)
    before = server.call(server.llm.llm.stats)
    ask(server, {"prompt": FOX, "max_tokens": 20, "ignore_eos": True})
    now = server.call(server.llm.llm.stats)
    queries, hits = (now["prefix_cache"][name] - before["prefix_cache"][name] for name in ("queries", "hits"))
    num_in = now["num_prefill_tokens"] - before["num_prefill_tokens"]
    assert log.summary(before, now, 0.5) == (
        f"0 running, 0 waiting; prompts {num_in * 2:,} tokens/s, output 40 tokens/s; KV cache 0.0% in use, "
        f"prefix cache hits {hits / queries:.1%}"
    )


def test_a_sum_that_fails_is_not_the_last(monkeypatch, caplog):
    """Of four times that the engine is asked, the first and the third fail."""
    monkeypatch.setattr(log, "INTERVAL_S", 0.0)
    monkeypatch.setattr(log, "summary", lambda before, now, seconds: f"{before['num_steps']} to {now['num_steps']}")
    caplog.set_level(logging.INFO, log.logger.name)
    asked = iter(range(5))

    class Engine:
        async def stats(self) -> dict:
            if (number := next(asked)) in (0, 2):
                raise RuntimeError("not now")
            if number == 4:
                raise asyncio.CancelledError
            return {"num_steps": number, "num_waiting": 0}

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(log.sum_up(Engine()))
    assert caplog.messages == ["the sum of ten seconds is not known"] * 2 + ["1 to 3"]


# -- fields that nobody knows -----------------------------------------------------------------------------------------

NEUTRAL = {
    "priority": 0,
    "return_token_ids": False,
    "store": False,
    "reasoning_effort": "none",
    "top_logprobs": 0,
    "verbosity": "low",
    "metadata": {"a": "b"},
    "prompt_cache_key": "x",
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": False, "include_usage": None},
    "stream": True,
    "logit_bias": {},
    "seed": None,
    "functions": [],
    "web_search_options": None,
    "best_of": 1,
    "n": 1,
}


def test_what_asks_for_nothing_is_taken(server, caplog):
    for path, what in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": FOX})):
        body = what | NEUTRAL | {"max_tokens": 2}
        if path == COMPLETIONS:
            del body["top_logprobs"]
        status, raw, headers = ask(server, body, path)
        assert status == 200 and b"[DONE]" in raw and "warning" not in headers
    assert not caplog.records


def test_priorities(server, checkpoint):
    bodies = (COMPLETIONS, {"prompt": FOX}), (CHAT, {"messages": USER}), ("/v1/responses", {"input": FOX})
    for path, body in bodies:
        status, raw, _ = ask(server, body | {"priority": 1}, path)
        assert status == 400 and "scheduling_policy='priority'" in raw["error"]["message"]
    with serving(checkpoint(), scheduling_policy="priority") as other:
        priorities: list[int] = []
        other.engine.on_step = lambda output, _: priorities.extend(chunk.seq.priority for chunk in output.chunks)
        for number, (path, body) in enumerate(bodies, start=-1):
            status, _, headers = ask(other, body | {"priority": number}, path)
            assert status == 200 and "warning" not in headers and set(priorities) == {*range(-1, number + 1)}


def test_an_unknown_field_is_named_in_a_header_and_once_in_the_log(server, caplog, monkeypatch):
    monkeypatch.setattr(fields, "_told", set())
    for stream in (False, True):
        body = {"prompt": FOX, "max_tokens": 2, "stream": stream, "temprature": 1, 'a"\u00e9\n': None, 'b"\u00e9\n': 1}
        status, _, headers = ask(server, body)
        assert status == 200
        assert headers["warning"] == (
            "299 nanovllm \"left out, because nobody here knows it: 'temprature' (did you mean 'temperature'?), "
            "'b\\\"\\\\xe9\\\\n'\""
        )
    status, _, headers = ask(server, {"prompt": FOX, "stream": True, "stream_options": {"x": 5 > 4}, "max_tokens": 1})
    assert status == 200 and "stream_options: 'x'" in headers["warning"]
    assert [message.count("'temprature'") for message in caplog.messages] == [1, 0, 0]


def test_many_unknown_fields_cost_as_little_as_ten(monkeypatch):
    """To look for a name like one takes half a millisecond, and a body has room for 200,000."""
    compared = []
    monkeypatch.setattr(fields, "_told", {f"x{n}" for n in range(1000)})

    def find(name, known, n):
        compared.extend([name] * bool(known))
        return []

    monkeypatch.setattr(difflib, "get_close_matches", find)
    body, unknown = fields.without_unknown({"prompt": FOX} | {f"x{n}": 1 for n in range(1000)})
    assert body == {"prompt": FOX} and len(unknown) == 1000 and len(compared) == fields.MAX_NAMED
    assert fields.warning_of(unknown).endswith("'x9' and 990 more")


# -- metrics ----------------------------------------------------------------------------------------------------------


def metrics(server) -> dict[tuple[str, tuple], float]:
    text = server.send("/metrics")[1].decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


LABELS = (("engine", "0"), ("model_name", "tiny"))
# What vLLM's Grafana boards ask for (examples/observability in its repository), histograms without their suffixes.
OF_BOARDS = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total prompt_tokens_total prompt_tokens_cached_total generation_tokens_total num_preemptions_total"""
HISTOGRAMS_OF_BOARDS = """time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds
request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_n
request_params_max_tokens request_num_preemptions iteration_tokens_total request_time_per_output_token_seconds
request_prefill_kv_computed_tokens"""


def test_metrics_have_vllms_names(server):
    """The counts that vLLM's own test expects of so many requests, one after another, of the same prompt."""
    num_requests, max_tokens = 4, 5
    num_prompt = len(server.llm.llm.get_tokenizer()(FOX).input_ids)
    before = metrics(server)
    for _ in range(num_requests):
        ask(server, {"prompt": FOX, "max_tokens": max_tokens, "ignore_eos": True, "cache_salt": "metrics"})
    after = metrics(server)
    ours = [name for name, labels in after if labels == LABELS]
    grown = {name.removeprefix("vllm:"): after[name, LABELS] - before[name, LABELS] for name in ours}
    assert {*OF_BOARDS.split()} <= {*grown}
    per_request = {"inter_token_latency_seconds": max_tokens - 1, "iteration_tokens_total": max_tokens}
    for name in HISTOGRAMS_OF_BOARDS.split():
        assert (f"vllm:{name}_bucket", tuple(sorted([*LABELS, ("le", "+Inf")]))) in after
        assert grown[f"{name}_count"] == num_requests * per_request.get(name, 1), name
    assert grown["prompt_tokens_total"] == grown["request_prompt_tokens_sum"] == num_requests * num_prompt
    assert grown["generation_tokens_total"] == grown["request_generation_tokens_sum"] == num_requests * max_tokens
    assert grown["iteration_tokens_total_sum"] == num_requests * (num_prompt + max_tokens)
    assert grown["request_params_max_tokens_sum"] == num_requests * max_tokens
    assert grown["prompt_tokens_cached_total"] == (num_requests - 1) * ((num_prompt - 1) // 4 * 4)
    assert grown["prefix_cache_hits_total"] <= grown["prefix_cache_queries_total"] <= num_requests * num_prompt
    assert grown["e2e_request_latency_seconds_sum"] >= grown["request_inference_time_seconds_sum"] > 0
    [info] = [dict(labels) for name, labels in after if name == "vllm:cache_config_info"]
    assert info["kv_cache_size_tokens"] == "640" and float(info["kv_cache_max_concurrency"]) == 2.5
    answers = ("http_requests_total", (("handler", COMPLETIONS), ("method", "POST"), ("status", "2xx")))
    assert after[answers] - before.get(answers, 0) == num_requests


def test_who_asks_for_metrics_at_the_same_time_gets_one_answer(server, monkeypatch):
    """No key is needed, and the engine makes no step before all that it was asked is done."""
    counts, is_free, whole = [], threading.Event(), async_llm.snapshot
    monkeypatch.setattr(async_llm, "snapshot", lambda engine: counts.append(whole(engine)) or counts[-1])
    server.llm.thread.ask(lambda: is_free.wait(PATIENCE_S))
    open_ones, ends = server.connections, time.monotonic() + PATIENCE_S
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(server.send, "/metrics") for _ in range(20)]
        while len(open_ones.open) - len(open_ones.waiting) < 20:
            assert time.monotonic() < ends
            time.sleep(0.005)
        is_free.set()
        assert {answer.result()[0] for answer in answers} == {200}
    assert 1 <= len(counts) <= 3, "one for these, and perhaps for a line of the log"


def test_prompts_that_are_only_scored_are_counted(server):
    before = metrics(server)
    ask(server, {"prompt": FOX, "max_tokens": 0, "echo": True, "logprobs": 0})
    after, num_prompt = metrics(server), len(server.llm.llm.get_tokenizer()(FOX).input_ids)
    for name in ("prompt_tokens_total", "request_prompt_tokens_sum", "iteration_tokens_total_sum"):
        assert after[f"vllm:{name}", LABELS] - before[f"vllm:{name}", LABELS] == num_prompt, name


def test_metrics_say_how_requests_end(server):
    def ended() -> dict[str, float]:
        found = [
            (dict(labels), value) for (name, labels), value in metrics(server).items() if "request_success" in name
        ]
        return {labels["finished_reason"]: value for labels, value in found}

    before = ended()
    ask(server, {"prompt": FOX, "max_tokens": 3, "ignore_eos": True, "n": 2})
    ask(server, {"prompt": FOX, "max_tokens": 200, "stop": ["e", "a", "o", " "]})
    with streaming(server) as stream:
        found = metrics(server)
        assert found["vllm:num_requests_running", LABELS] == 1 and found["vllm:kv_cache_usage_perc", LABELS] > 0
        assert json.loads(server.send("/load")[1]) == {"server_load": 1}
        stream.close()
    server.assert_at_rest()
    body = {"input": FOX, "background": True, "max_output_tokens": 200, "ignore_eos": True}
    kept = json.loads(server.send("/v1/responses", json.dumps(body).encode())[1])
    server.until(lambda: server.llm.engine.requests)
    assert json.loads(server.send(f"/v1/responses/{kept['id']}/cancel", b"")[1])["status"] == "cancelled"
    server.assert_at_rest()
    after = ended()
    assert {reason: after[reason] - before[reason] for reason in after} == dict(stop=1, length=2, abort=2, error=0)
    server.until(lambda: json.loads(server.send("/load")[1]) == {"server_load": 0})


# -- endpoints --------------------------------------------------------------------------------------------------------


def test_tokens_and_texts(server):
    tokenizer = server.llm.llm.get_tokenizer()
    ids = tokenizer(FOX).input_ids
    for strings in (False, True):
        status, answer, _ = ask(server, {"model": "small", "prompt": FOX, "return_token_strs": strings}, "/tokenize")
        expected = dict(count=len(ids), max_model_len=256, tokens=ids, token_strs=None)
        assert (status, answer) == (
            200,
            expected | ({"token_strs": tokenizer.convert_ids_to_tokens(ids)} if strings else {}),
        )
    for options in (
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": False},
    ):
        text = tokenizer.apply_chat_template(USER, tokenize=False, **{"add_generation_prompt": True} | options)
        _, answer, _ = ask(server, {"messages": USER, **options}, "/tokenize")
        assert answer["tokens"] == tokenizer(text, add_special_tokens=False).input_ids
        assert ask(server, {"tokens": answer["tokens"]}, "/detokenize")[1] == {"prompt": text}
    long = "x " * 4000
    assert ask(server, {"prompt": long}, "/tokenize")[1]["count"] > 256, "to know how long it is, it need not fit"
    _, _, headers = ask(server, {"prompt": FOX, "promt": 1}, "/tokenize")
    assert "did you mean 'prompt'?" in headers["warning"]
    _, _, headers = ask(server, {"messages": USER, "chat_template_content_format": "string"}, "/tokenize")
    assert "chat_template_content_format" in headers["warning"], "it is the server's"
    for path, body, status, message in (
        ("/tokenize", {}, 400, "a prompt, which is a text, or messages"),
        ("/tokenize", {"prompt": [5]}, 400, "a prompt, which is a text, or messages"),
        ("/tokenize", {"prompt": FOX, "add_special_tokens": 1}, 400, "add_special_tokens must be true or false"),
        ("/tokenize", {"prompt": FOX, "model": "gpt-4o"}, 404, "gpt-4o"),
        ("/tokenize", {"prompt": FOX, "model": {}}, 400, "model must be a text, found {}"),
        ("/tokenize", {"prompt": FOX, "messages": USER}, 400, "a body has a prompt or messages, found both"),
        ("/tokenize", {"messages": [{"role": "judge", "content": "x"}]}, 400, "unknown role judge"),
        ("/tokenize", {"messages": USER, "chat_template": "{{ 7 }}"}, 400, "a request may not bring one"),
        ("/tokenize", {"messages": USER * 5000}, 400, "messages may have 4096 entries, found 5000"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "not valid Unicode"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens must be a list of ids"),
        ("/detokenize", {"tokens": [5, "x"]}, 400, "tokens must be a list of ids"),
        ("/detokenize", {"tokens": [320]}, 400, "between 0 and 319"),
        ("/detokenize", {"tokens": [-1]}, 400, "between 0 and 319"),
    ):
        found, answer, _ = ask(server, body, path)
        assert found == status and message in answer["error"]["message"], (body, answer)


def test_a_chat_template_of_the_operators(checkpoint, tmp_path):
    """All chats have it, and none the checkpoint's."""
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with serving(checkpoint(), ServeOptions(chat_template=str(tmp_path / "chat.jinja"))) as server:
        tokens = server.llm.llm.get_tokenizer()("[two gulls circled]", add_special_tokens=False).input_ids
        assert ask(server, {"messages": USER}, "/tokenize")[1]["tokens"] == tokens
        chat = ask(server, {"messages": USER, "max_tokens": 1}, CHAT)[1]
        response = ask(server, {"input": USER, "max_output_tokens": 16}, "/v1/responses")[1]
        assert chat["usage"]["prompt_tokens"] == response["usage"]["input_tokens"] == len(tokens)


def test_what_the_server_says_of_itself(server):
    assert json.loads(server.send("/version")[1]) == {"version": nanovllm.__version__}
    assert server.send("/ping") == server.send("/ping", b"{}") == (200, b"")
    tokenizer, info = server.llm.llm.get_tokenizer(), json.loads(server.send("/tokenizer_info")[1])
    assert info["eos_token"] == tokenizer.eos_token and info["chat_template"] == tokenizer.chat_template
    assert info["tokenizer_class"] == type(tokenizer).__name__ and "/" not in str(info["added_tokens_decoder"])
    assert not [name for name in info if "path" in name or "file" in name]


def test_the_prefix_cache_is_forgotten(server):
    body = {"prompt": FOX, "max_tokens": 1}

    def cached() -> int:
        return ask(server, body)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0 and server.send("/reset_prefix_cache", b"") == (200, b'{"success": true}') and cached() == 0
    server.llm.thread.set_pace(1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, {"prompt": FOX, "max_tokens": 9, "ignore_eos": True})
        server.until(lambda: server.llm.thread.steps_left == 0 and server.engine.requests)
        assert json.loads(server.send("/reset_prefix_cache", b"")[1]) == {"success": False}
        assert json.loads(server.send("/reset_prefix_cache?reset_running_requests=true", b"")[1]) == {"success": True}
        server.llm.thread.set_pace()
        assert answer.result(PATIENCE_S)[1]["usage"]["completion_tokens"] == 9
    for query in ("reset_running_requests=perhaps", "reset_external=perhaps"):
        assert server.send(f"/reset_prefix_cache?{query}", b"")[0] == 400


def test_keys_guard_what_is_more_than_numbers(checkpoint):
    with serving(checkpoint(), ServeOptions(api_key=("key",), enable_tokenizer_info_endpoint=True)) as server:
        key = {"Authorization": "Bearer key"}
        for path, body in (
            ("/tokenize", b'{"prompt": "x"}'),
            ("/detokenize", b'{"tokens": [5]}'),
            ("/reset_prefix_cache", b""),
            ("/tokenizer_info", None),
        ):
            status, _, headers = server.exchange(path, body)
            assert status == 401 and headers["x-request-id"] and server.send(path, body, key)[0] == 200
        for path in ("/version", "/ping", "/load", "/health", "/metrics"):
            assert server.send(path)[0] == 200


def test_a_known_path_that_is_not_here_says_why(server):
    for path, message in (
        ("/v1/embeddings", "a server that was started with --runner pooling has it"),
        ("/v1/chat/completion", "there is no '/v1/chat/completion' here; did you mean /v1/chat/completions?"),
        ("/v1/nothing", "there is no '/v1/nothing' here"),
        ("/v1/responses/input_tokens", "there is no '/v1/responses/input_tokens' here; /tokenize counts"),
        ("/v1/responses/compact", "leave out of the input what is no longer needed"),
        ("/v1/batches", "nanovllm run-batch"),
        ("/v1/chat/completions/chatcmpl-1", "chats are not kept"),
    ):
        status, raw = server.send(path, b"{}")
        assert status == 404 and message in json.loads(raw)["error"]["message"]
    for start in INSTEAD:
        assert server.send(f"{start}/x", b"{}")[0] == 404
