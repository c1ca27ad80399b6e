"""Embeddings, ranking and scores over HTTP, with the client that programs use."""

import json
import struct
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from openai import BadRequestError, OpenAI

from nanovllm import LLM
from nanovllm.serving.async_llm import Overloaded
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.openai import pooling
from tests.checkpoints import SMALL
from tests.servers import serving

TEXTS = ["two gulls circled above a red boat", "two gulls circled", "the lazy dog"]
USER = [{"role": "user", "content": "two"}]


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def vectors(folder):
    llm = LLM(str(folder), runner="pooling", **SMALL)
    return [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder, runner="pooling", hf_overrides={"is_matryoshka": True}) as running:
        yield running


def post(server, path, **body):
    status, raw = server.send(path, json.dumps(body).encode())
    return status, json.loads(raw)


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def test_openais_client(client: OpenAI, server, vectors):
    """Which asks for base64, and unpacks it."""
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    assert [each.embedding for each in answer.data] == [pytest.approx(v) for v in vectors]
    assert [each.index for each in answer.data] == [0, 1, 2]
    num_tokens = sum(len(server.llm.llm.get_tokenizer()(text).input_ids) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.object) == (num_tokens, num_tokens, "list")
    create = partial(client.embeddings.create, model="tiny")
    assert create(input=TEXTS[0], encoding_format="float").data[0].embedding == vectors[0]
    ids = [server.llm.llm.get_tokenizer()(text).input_ids for text in TEXTS]
    assert [each.embedding for each in create(input=ids, encoding_format="float").data] == vectors
    assert create(input=ids[1], encoding_format="float").data[0].embedding == vectors[1]
    short = create(input=TEXTS[0], dimensions=8, encoding_format="float").data[0].embedding
    length = sum(x * x for x in vectors[0][:8]) ** 0.5
    assert short == pytest.approx([x / length for x in vectors[0][:8]], abs=1e-6)
    for wrong, text in (
        ({"input": []}, "input must be a text"),
        ({"input": ["x", ""]}, "input[1]: a prompt must have 1 to"),
        ({"input": "x", "dimensions": 65}, "dimensions must be"),
        ({"input": "x", "model": "large"}, None),
        ({"input": ["x"] * 2049}, "the number of texts"),
        ({"input": "x", "extra_body": {"normalize": True}}, "takes 'normalize' only as None"),
        ({"input": "x " * 600}, "truncate_prompt_tokens=-1 cuts it"),
    ):
        with pytest.raises(
            Exception if text is None else BadRequestError, match=text and text.replace("[1]", r"\[1\]")
        ):
            create(**wrong)
    assert create(input="x " * 600, extra_body={"truncate_prompt_tokens": -1}).usage.prompt_tokens == 256


def test_more_texts_than_may_wait(folder, vectors):
    """They go in by portions, and the answer is in their order."""
    with serving(folder, ServeOptions(max_waiting=8), runner="pooling", max_num_seqs=2) as server:
        found = server.client().embeddings.create(model="tiny", input=TEXTS * 7, encoding_format="float")
        assert [each.embedding for each in found.data] == vectors * 7


def test_base64(server, vectors):
    status, answer = post(server, "/v1/embeddings", input=TEXTS[0], encoding_format="base64")
    raw = b64decode(answer["data"][0]["embedding"])
    assert (status, list(struct.unpack(f"<{len(raw) // 4}f", raw))) == (200, pytest.approx(vectors[0]))


@pytest.mark.parametrize("path, names", [("/rerank", ("query", "documents")), ("/score", ("text_1", "text_2"))])
def test_what_a_document_has_beside_its_text_is_named(server, path, names):
    body = {names[0]: "two", names[1]: ["a", {"text": "b", "title": "t"}]}
    status, _, headers = server.exchange(path, json.dumps(body).encode())
    assert status == 200 and f"knows it: {names[1]}[1]: 'title'" in headers["warning"]


@pytest.mark.parametrize("path", pooling.RERANK)
def test_rerank(server, vectors, path):
    documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[0]]
    status, answer = post(server, path, model="tiny", query=TEXTS[0], documents=documents, top_n=2)
    assert status == 200 and answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] > 0
    first, second = answer["results"]
    assert (first["index"], first["document"]) == (2, {"text": TEXTS[0]})
    assert first["relevance_score"] == pytest.approx(1) and second["relevance_score"] < 1
    status, answer = post(server, path, query="two", documents=documents, return_documents=False)
    scores = [result["relevance_score"] for result in answer["results"]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True) and "document" not in answer["results"][0]
    assert "query must be a text" in post(server, path, documents=["x"])[1]["error"]["message"]
    assert "documents must be a text or a list" in post(server, path, query="x")[1]["error"]["message"]


def test_score_and_pooling(server, vectors):
    expected = sum(a * b for a, b in zip(vectors[0], vectors[2], strict=True))
    for names in pooling.NAMES:
        body = dict(zip(names, (TEXTS[0], [TEXTS[2], TEXTS[0]]), strict=True))
        for path in pooling.SCORE:
            data = post(server, path, **body)[1]["data"]
            assert [each["score"] for each in data] == pytest.approx([expected, 1], abs=1e-6)
    assert "two lists of texts" in post(server, "/score", queries="x")[1]["error"]["message"]
    [found] = post(server, "/pooling", input=TEXTS[0])[1]["data"]
    assert (found["object"], found["data"]) == ("pooling", vectors[0])


@pytest.mark.parametrize(
    "body",
    [
        *({"input": wrong} for wrong in (None, 3, {}, [3.5], ["x", 3], [[]], [[5, "x"]], [[-1]], [[320]], [None])),
        *({"input": "x", name: []} for name in ("truncate_prompt_tokens", "truncation_side", "encoding_format")),
        *({"input": "x", name: 3} for name in ("model", "use_activation", "add_special_tokens", "cache_salt", "task")),
        {"input": "x", "task": []},
        {"input": "x", "truncate_prompt_tokens": 257},
        {"input": "x", "embed_dtype": "float16"},
        {"input": "x", "dimensions": True},
    ],
    ids=str,
)
def test_bad_bodies(server, body):
    status, answer = post(server, "/pooling", **body)
    assert status in (400, 404) and answer["error"]["message"]


def test_an_embedder_reads_a_query_once(server, monkeypatch):
    monkeypatch.setattr(pooling, "MAX_CHARS_OF_PAIRS", 200)
    for path, query, documents in (("/score", "queries", "documents"), ("/rerank", "query", "documents")):
        assert post(server, path, **{query: "two gulls " * 10, documents: ["a boat"] * 4})[0] == 200
        message = post(server, path, **{query: "two gulls " * 10, documents: ["a boat"] * 20})[1]["error"]["message"]
        assert "the number of characters of all pairs must be a whole number between 0 and 200, found 220" in message


def test_each_server_says_what_it_is_for(server, folder, checkpoint):
    status, answer = post(server, "/v1/chat/completions", messages=USER)
    assert status == 400 and "samples no tokens: ask it by embed() and score() (POST /v1/embeddings" in str(answer)
    assert post(server, "/v1/completions", prompt="x")[0] == post(server, "/v1/responses", input="x")[0] == 400
    with serving(folder) as generating:
        for path in pooling.URLS:
            status, answer = post(generating, path, input="x")
            assert (status, "started with --runner pooling" in answer["error"]["message"]) == (404, True)


def test_keys_limits_and_counters_hold(folder):
    """As for text: tenants share no prefix, a full queue answers 429, a late answer 504, and the log has tokens."""
    with serving(folder, ServeOptions(api_key=("a", "b")), runner="pooling") as server:
        cached = []
        for key in "aab":
            raw = server.client(key).embeddings.with_raw_response.create(model="tiny", input=TEXTS[0])
            cached.append(json.loads(raw.content)["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[1] > cached[0] == cached[2] == 0
        assert {server.send(path, b"{}")[0] for path in pooling.URLS} == {401}
        text = server.send("/metrics")[1].decode()
        for name in ("request_success_total", "time_to_first_token_seconds_count"):
            counts = [row for row in text.splitlines() if row.startswith(f"vllm:{name}{{")]
            assert sum(float(row.split()[-1]) for row in counts) == 3, name
    with serving(folder, ServeOptions(max_waiting=1), runner="pooling") as server, ThreadPoolExecutor() as threads:
        server.llm.thread.set_pace(0)
        waits = threads.submit(post, server, "/v1/embeddings", input=TEXTS[0])
        server.until(lambda: server.engine.scheduler.waiting)
        assert post(server, "/v1/embeddings", input=TEXTS[1])[0] == 429
        server.llm.thread.set_pace()
        assert waits.result()[0] == 200
    with serving(folder, ServeOptions(request_timeout=0.2), runner="pooling") as server:
        server.llm.thread.set_pace(0)
        status, answer = post(server, "/v1/embeddings", input=TEXTS[0])
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    with serving(folder, ServeOptions(request_timeout=0.5, max_waiting=4), runner="pooling") as server:
        run, done = server.llm.run, []

        async def run_the_first(make, left):
            if done:
                raise Overloaded("there is no room for another portion")
            done.append(make)
            async for outputs in run(make, left):
                yield outputs

        server.llm.run = run_the_first
        assert post(server, "/v1/embeddings", input=TEXTS[:2])[0] == 504 and done


def test_a_classifier(checkpoint):
    heads = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["f", "x"]}
    with serving(checkpoint("qwen3"), hf_overrides=heads | {"method": "no_post_processing"}) as server:
        [found] = post(server, "/pooling", input="two gulls")[1]["data"]
        assert sum(found["data"]) == pytest.approx(1) and len(found["data"]) == 2
        assert (
            "this classifier has 2 labels" in post(server, "/score", queries="x", documents="y")[1]["error"]["message"]
        )
        assert "convert='embed'" in post(server, "/v1/embeddings", input="x")[1]["error"]["message"]
    heads |= {"is_original_qwen3_reranker": True}
    with serving(checkpoint("qwen3"), hf_overrides=heads, max_model_len=512) as server:
        body = {"query": "who?", "documents": TEXTS, "instruction": "find gulls"}
        status, answer = post(server, "/rerank", **body)
        assert status == 200 and all(0 < result["relevance_score"] < 1 for result in answer["results"])
        assert post(server, "/rerank", **body, chat_template_kwargs={"x": 1})[0] == 400
        long = {"query": "who?", "documents": [text * 90 for text in TEXTS]}
        assert "truncate_prompt_tokens=-1 cuts it" in post(server, "/rerank", **long)[1]["error"]["message"]
        lengths = []
        for more in ({"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 5, "max_tokens_per_query": 1}):
            status, answer = post(server, "/rerank", **long, **more)
            assert status == 200 and all(0 < result["relevance_score"] < 1 for result in answer["results"])
            lengths.append(answer["usage"]["prompt_tokens"])
        assert 3 * 500 < lengths[0] <= 3 * 512 and lengths[1] < lengths[0]
        short = {"query": "w", "documents": ["two gulls"]}
        same = {"query": "w", "documents": ["two gulls circled"], "max_tokens_per_doc": 2}
        scores = [post(server, "/v1/rerank", **each)[1]["results"][0]["relevance_score"] for each in (short, same)]
        assert scores[0] == scores[1]
    template = "{{ messages[0].content }}|{{ messages[1].content }}"
    with serving(checkpoint("qwen3"), ServeOptions(chat_template=template), hf_overrides=heads) as server:
        num_tokens = len(server.llm.llm.get_tokenizer()("who?|two gulls").input_ids)
        answer = post(server, "/score", queries="who?", documents="two gulls")[1]
        assert answer["usage"]["prompt_tokens"] == num_tokens, "the operator's template comes before the reranker's"
        assert post(server, "/rerank", **short, max_tokens_per_doc=-1)[0] == 400
        for long in ("query", "instruction"):  # it reads both with each of the documents
            many = {"query": "x", "documents": ["y"] * 1500, long: "x" * 20_000}
            assert "the number of characters of all pairs" in post(server, "/rerank", **many)[1]["error"]["message"]
