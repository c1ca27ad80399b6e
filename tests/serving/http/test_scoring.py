"""A text is scored, and token ids are asked for: over HTTP, whole and in streams, with the numbers of transformers."""

import json
import random
from itertools import chain

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from nanovllm.files.token_bytes import token_bytes
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.openai.answer import CHAT, COMPLETIONS
from nanovllm.serving.openai.offsets import is_text
from tests.checkpoints import reference_logits
from tests.servers import serving
from tests.test_detokenizer import WORDS, byte_fallback, byte_level

FOX = "the quick brown fox jumps over the lazy dog"
USER = [{"role": "user", "content": "two gulls circled"}]
GREEDY = dict(model="tiny", temperature=0)


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint(), dtype="float32", max_num_batched_tokens=16) as running:
        yield running


@pytest.fixture
def client(server):
    yield server.client()
    server.assert_at_rest()


@pytest.fixture(scope="module")
def tokenizer(server):
    return server.llm.llm.get_tokenizer()


def expected_logprobs(checkpoint, token_ids: list[int]) -> list[float]:
    logprobs = reference_logits(checkpoint(), token_ids).log_softmax(-1)
    return logprobs[range(len(token_ids) - 1), token_ids[1:]].tolist()


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


def test_a_text_is_scored(client, checkpoint, tokenizer):
    """Texts and token ids, several at a time and several samples each: nothing is generated, nothing is cached."""
    ids = tokenizer(FOX).input_ids
    for prompt in (FOX, ids, [FOX, FOX], [ids, ids]):
        extra = {"n": 2} if prompt is FOX else {}
        made = client.completions.create(prompt=prompt, echo=True, logprobs=1, max_tokens=0, **extra, **GREEDY)
        assert len(made.choices) == (2 if prompt is FOX or len(prompt) == 2 else 1)
        for choice in made.choices:
            assert choice.text == tokenizer.decode(ids) == FOX and choice.finish_reason == "length"
            first, *logprobs = choice.logprobs.token_logprobs
            assert first is None and choice.logprobs.top_logprobs[0] is None
            assert logprobs == pytest.approx(expected_logprobs(checkpoint, ids), abs=1e-4)
            assert "".join(choice.logprobs.tokens) == FOX
            assert [FOX[at:][: len(token)] for at, token in _offsets(choice)] == choice.logprobs.tokens
            for token, logprob, top in _rows(choice)[1:]:
                assert top[token] == logprob <= max(top.values()) and 1 <= len(top) <= 2 and next(iter(top)) == token
        assert made.usage.completion_tokens == 0 and made.usage.prompt_tokens_details.cached_tokens == 0


def _rows(choice) -> list[tuple]:
    found = choice.logprobs
    return list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))


def _offsets(choice) -> list[tuple[int, str]]:
    return list(zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True))


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_a_stream_echoes_what_the_whole_answer_does(client, max_tokens):
    given = dict(prompt=[FOX, "two gulls"], echo=True, logprobs=2, max_tokens=max_tokens, **GREEDY)
    given["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    whole = client.completions.create(**given)
    parts: dict[int, list] = {0: [], 1: []}
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **given):
        for choice in chunk.choices:
            parts[choice.index].append(choice)
        usage = chunk.usage
    for choice in whole.choices:
        first, *rest = parts[choice.index]
        assert "".join(part.text for part in parts[choice.index]) == choice.text
        assert first.prompt_token_ids == choice.prompt_token_ids and not any("prompt_token_ids" in p for p in rest)
        assert joined(part.token_ids for part in parts[choice.index]) == choice.token_ids
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert joined(getattr(part.logprobs, name) for part in (first, *rest)) == getattr(choice.logprobs, name)
        assert len(choice.token_ids) == max_tokens and not any(part.finish_reason for part in (first, *rest)[:-1])
    assert usage.completion_tokens == whole.usage.completion_tokens == 2 * max_tokens


def test_prompt_logprobs(client, checkpoint, tokenizer):
    """Of completions in each choice, of a chat beside its choices; a chat's prompt is what its template makes."""
    made = client.completions.create(prompt=FOX, max_tokens=2, extra_body={"prompt_logprobs": 2}, **GREEDY)
    of_chat = client.chat.completions.create(
        messages=USER, max_tokens=2, extra_body={"prompt_logprobs": 2, "return_token_ids": True}, **GREEDY
    )
    for rows, ids in (
        (made.choices[0].prompt_logprobs, tokenizer(FOX).input_ids),
        (of_chat.prompt_logprobs, of_chat.prompt_token_ids),
    ):
        assert rows[0] is None and len(rows) == len(ids)
        found = [row[str(token_id)]["logprob"] for token_id, row in zip(ids[1:], rows[1:], strict=True)]
        assert found == pytest.approx(expected_logprobs(checkpoint, ids), abs=1e-4)
        assert all({1, 2} <= {entry["rank"] for entry in row.values()} and len(row) <= 3 for row in rows[1:])
    assert "two gulls circled" in tokenizer.decode(of_chat.prompt_token_ids)
    assert made.choices[0].prompt_token_ids is None is made.choices[0].token_ids
    both = dict(prompt=FOX, echo=True, logprobs=2, max_tokens=1, extra_body={"prompt_logprobs": 1})
    [choice] = client.completions.create(**both, **GREEDY).choices
    assert max(len(row) for row in choice.prompt_logprobs[1:]) == 2 < max(map(len, choice.logprobs.top_logprobs[1:]))


def test_a_stream_takes_prompt_logprobs_0(client):
    """As vLLM's, which shows none."""
    create = client.completions.create
    given = dict(prompt=FOX, max_tokens=3, extra_body={"prompt_logprobs": 0}, **GREEDY)
    assert "".join(part.choices[0].text for part in create(stream=True, **given)) == create(**given).choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_of_the_whole_context_is_scored(server, checkpoint, stream):
    """By echo or prompt_logprobs, several at a time; one token more is a client's mistake."""
    most = server.llm.engine.scheduler.max_model_len
    ids = [5 + i * 11 % 300 for i in range(most)]
    body = {"model": "tiny", "prompt": [ids, ids[:9]], "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    status, raw = server.send(COMPLETIONS, json.dumps(body).encode())
    parts = (
        [json.loads(part[6:]) for part in raw.decode().split("\n\n") if part[6:7] == "{"]
        if stream
        else [json.loads(raw)]
    )
    for index, num in ((0, most), (1, 9)):
        choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
        logprobs = joined(choice["logprobs"]["token_logprobs"] for choice in choices)
        assert logprobs[1:] == pytest.approx(expected_logprobs(checkpoint, ids[:num]), abs=1e-4)
        assert choices[-1]["finish_reason"] == "length"
    if not stream:
        more = body | {"echo": False, "logprobs": None, "prompt_logprobs": 0}
        made = json.loads(server.send(COMPLETIONS, json.dumps(more).encode())[1])
        assert len(made["choices"][0]["prompt_logprobs"]) == most and made["usage"]["completion_tokens"] == 0
    for longer in ({"prompt": [*ids, 5]}, {"prompt": ids, "max_tokens": 1}, {"prompt": ids, "max_tokens": None}):
        status, raw = server.send(COMPLETIONS, json.dumps(body | longer).encode())
        assert status == 400 and f"max_model_len is {most}" in json.loads(raw)["error"]["message"]


PIECES = dict(prompt="two é😀 你", seed=4, temperature=1.5, max_tokens=24, n=4, extra_body={"ignore_eos": True})


def test_each_token_beside_has_its_key(client, tokenizer):
    """Pieces of characters, too; the likeliest is among them, so is_greedy can be told."""
    given = PIECES | {"logprobs": 5, "echo": True}
    by_text = client.completions.create(model="tiny", **given)
    ids = {"return_tokens_as_token_ids": True}
    by_id = client.completions.create(model="tiny", **given | {"extra_body": PIECES["extra_body"] | ids})
    num_pieces = 0
    for named, numbered in zip(by_text.choices, by_id.choices, strict=True):
        rows = zip(named.logprobs.tokens, numbered.logprobs.tokens, strict=True)
        tops = zip(named.logprobs.top_logprobs, numbered.logprobs.top_logprobs, strict=True)
        for (name, number), (top, top_of_ids) in zip(rows, tops, strict=True):
            own = token_bytes(tokenizer).of(int(number.removeprefix("token_id:")))
            text = own.decode() if is_text(own) else "bytes:" + "".join(f"\\x{b:02x}" for b in own)
            assert name == (text or number)
            num_pieces += not is_text(own)
            if top is not None:
                assert list(top.values()) == list(top_of_ids.values()) and next(iter(top)) == name
                is_greedy = max(top, key=top.get) == name
                assert is_greedy == (max(top_of_ids, key=top_of_ids.get) == number)
    assert num_pieces > 20


@pytest.mark.parametrize("more", [{}, {"stop": ["e"]}, {"extra_body": {"skip_special_tokens": False}}], ids=str)
def test_offsets_point_into_the_text(client, tokenizer, more):
    given = PIECES | {"logprobs": 1} | more
    for echo in (True, False):
        whole = client.completions.create(model="tiny", echo=echo, **given)
        for choice in whole.choices:
            offsets = choice.logprobs.text_offset
            assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(choice.text)
            held = [name.startswith("bytes:") or choice.text.startswith(name, at) for at, name in _offsets(choice)]
            assert sum(held) >= len(held) - 2, "a stop string and special tokens are not in the text"
        parts: dict[int, list] = {index: [] for index in range(4)}
        for chunk in client.completions.create(model="tiny", echo=echo, stream=True, **given):
            for choice in chunk.choices:
                parts[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
        assert [parts[choice.index] for choice in whole.choices] == [c.logprobs.text_offset for c in whole.choices]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_offsets_of_pieces_of_characters(copy_of, kind):
    """A token begins where its first byte is: a space before a part of a character does not count for the rest of it.

    A vocabulary with such tokens, and one of whose texts the first space is dropped, also if it is a byte.
    """
    text, rng = " a 日本 é🙂 naïve  日 two", random.Random(0)
    data = text.encode()
    cuts = [sorted(rng.sample(range(len(data)), 2)) for _ in range(50)]
    made = byte_level([data[start:end] for start, end in cuts]) if kind == "byte level" else byte_fallback(WORDS)
    folder = copy_of("llama")
    made.save_pretrained(folder)
    num_dropped = kind == "byte fallback"
    with serving(folder, dtype="float32") as server:
        tokenizer = server.llm.llm.get_tokenizer()
        known = token_bytes(tokenizer).all
        for _ in range(20):
            ids, starts, at = [], [], 0
            while at < len(data):
                ids.append(rng.choice([i for i, own in enumerate(known) if own and data.startswith(own, at)]))
                starts.append(at)
                at += len(known[ids[-1]])
            [choice] = (
                server.client()
                .completions.create(model="tiny", prompt=ids, echo=True, logprobs=0, max_tokens=0)
                .choices
            )
            assert choice.text == tokenizer.decode(ids) == text[num_dropped:]
            expected = [max(0, len(data[:start].decode(errors="ignore")) - num_dropped) for start in starts]
            assert choice.logprobs.text_offset == expected, tokenizer.convert_ids_to_tokens(ids)


def test_bytes_of_a_chat(client, tokenizer):
    """Each token's own: together they are the text."""
    given = dict(messages=USER, logprobs=True, top_logprobs=2, seed=4, temperature=1.5, max_tokens=40, model="tiny")
    ids = {"return_tokens_as_token_ids": True, "ignore_eos": True}
    [choice] = client.chat.completions.create(extra_body=ids, **given).choices
    for row in choice.logprobs.content:
        for entry in (row, *row.top_logprobs):
            assert bytes(entry.bytes) == token_bytes(tokenizer).of(int(entry.token.removeprefix("token_id:")))
    whole = b"".join(bytes(row.bytes) for row in choice.logprobs.content)
    assert whole.decode(errors="replace") == choice.message.content


def test_logprobs_of_chosen_tokens(client, tokenizer):
    ids, extra = [300, 7, 5], {"logprob_token_ids": [300, 7, 5], "return_tokens_as_token_ids": True}
    given = dict(max_tokens=2, extra_body=extra, **GREEDY)
    of_text = client.completions.create(prompt=FOX, logprobs=3, **given).choices[0].logprobs
    of_chat = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=3, **given).choices[0].logprobs
    for token, top in zip(of_text.tokens, of_text.top_logprobs, strict=True):
        assert list(top) == [token, *(f"token_id:{i}" for i in ids)]
    for row in of_chat.content:
        assert [entry.token for entry in row.top_logprobs] == [row.token, *(f"token_id:{i}" for i in ids)]
        assert bytes(row.bytes).decode() == tokenizer.decode(int(row.token.removeprefix("token_id:")))


def test_token_ids_of_a_chat(client, tokenizer):
    given = dict(messages=USER, max_tokens=6, extra_body={"return_token_ids": True, "ignore_eos": True}, **GREEDY)
    whole = client.chat.completions.create(n=1, **given)
    [choice] = whole.choices
    assert tokenizer.decode(choice.token_ids) == choice.message.content
    first, *rest = client.chat.completions.create(stream=True, **given)
    assert first.prompt_token_ids == whole.prompt_token_ids
    assert not any("prompt_token_ids" in chunk.model_dump() for chunk in rest)
    assert joined(chunk.choices[0].token_ids for chunk in (first, *rest)) == choice.token_ids


def test_a_chat_begins_with_the_message_that_it_goes_on_with(client):
    said = "two gulls"
    given = dict(messages=[*USER, {"role": "assistant", "content": said}], max_tokens=4, **GREEDY)
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    plain, echoed = (
        client.chat.completions.create(extra_body=extra | {"echo": echo}, **given).choices[0].message.content
        for echo in (False, True)
    )
    assert echoed == said + plain
    parts = client.chat.completions.create(stream=True, extra_body=extra | {"echo": True}, **given)
    assert "".join(chunk.choices[0].delta.content for chunk in parts) == echoed


BAD = [
    ({"prompt": FOX, "max_tokens": 0}, "max_tokens must be a whole number from 1"),
    ({"prompt": FOX, "echo": "yes"}, "echo must be true or false"),
    ({"prompt": FOX, "return_token_ids": 1}, "return_token_ids must be true or false"),
    ({"prompt": FOX, "prompt_logprobs": 21}, "the number of prompt_logprobs must be a whole number between 0 and 20"),
    ({"prompt": FOX, "prompt_logprobs": -1}, "the number of prompt_logprobs must be a whole number between 0 and 20"),
    ({"prompt": FOX, "prompt_logprobs": True}, "the number of prompt_logprobs must be a whole number"),
    ({"prompt": FOX, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not available in a stream"),
    ({"prompt": FOX, "logprob_token_ids": [1]}, "logprob_token_ids needs logprobs"),
    ({"prompt": FOX, "logprobs": 1, "logprob_token_ids": [320]}, "a token id of logprob_token_ids must be"),
    ({"prompt": FOX, "logprobs": 1, "logprob_token_ids": [1] * 2 + list(range(2, 140))}, "may have 128 tokens"),
    ({"prompt": FOX, "best_of": 2}, "body takes 'best_of' only as 1 (found 2)"),
    ({"prompt": FOX, "suffix": "x"}, "body takes 'suffix' only as '' (found 'x')"),
    ({"prompt": FOX, "guided_choice": ["a"]}, "body takes 'guided_choice' only as None (found ['a'])"),
    ({"prompt": FOX, "add_special_tokens": 1}, "add_special_tokens must be true or false"),
    ({"messages": USER, "logprob_token_ids": [1]}, "logprob_token_ids needs logprobs: true"),
    ({"messages": USER, "top_logprobs": 1}, "top_logprobs needs logprobs: true"),
    ({"messages": USER, "max_tokens": 0, "echo": True}, "max_tokens must be a whole number from 1"),
]


@pytest.mark.parametrize("body, message", BAD, ids=[message for _, message in BAD])
def test_bad_requests(server, body, message):
    status, raw = server.send(CHAT if "messages" in body else COMPLETIONS, json.dumps(body).encode())
    assert status == 400 and message in json.loads(raw)["error"]["message"]


def test_too_many_logprobs_of_prompts(server, client, monkeypatch):
    monkeypatch.setattr("nanovllm.serving.openai.shown.MAX_PROMPT_LOGPROBS", 100)
    for body, status in (({"prompt": [FOX] * 2}, 200), ({"prompt": [FOX] * 9}, 400)):
        given = body | {"prompt_logprobs": 4, "max_tokens": 1}
        assert server.send(COMPLETIONS, json.dumps(given).encode())[0] == status


def test_an_answer_without_a_length_ends_with_its_logprobs(server, client, monkeypatch):
    """It is refused only if its length, or several samples, were asked for."""
    monkeypatch.setattr("nanovllm.serving.openai.openai_request.MAX_LOGPROBS_OF_LINE", 100)
    body = {"messages": USER, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    status, raw = server.send(CHAT, json.dumps(body).encode())
    assert status == 200
    [choice] = json.loads(raw)["choices"]
    assert choice["finish_reason"] == "length" and len(choice["logprobs"]["content"]) == 100 // 21
    for more in ({"max_tokens": 5}, {"n": 2}, {"min_tokens": 5}):
        status, raw = server.send(CHAT, json.dumps(body | more).encode())
        assert status == 400 and "the number of logprobs in the answer" in json.loads(raw)["error"]["message"]


def test_special_tokens(server, tokenizer):
    """Added to texts and not to chats, unless the body says otherwise."""
    backend, bos = tokenizer.backend_tokenizer, tokenizer.convert_tokens_to_ids("<|bos|>")
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    try:
        for path in (COMPLETIONS, CHAT, "/tokenize"):
            for what in ({"prompt": FOX}, {"messages": USER})[path == CHAT : 1 if path == COMPLETIONS else 2]:
                for add, expected in ((None, "prompt" in what), (True, True), (False, False)):
                    body = what | {"add_special_tokens": add, "max_tokens": 1, "return_token_ids": True}
                    status, raw = server.send(path, json.dumps(body).encode())
                    found = json.loads(raw)
                    ids = (
                        found.get("tokens") or found.get("prompt_token_ids") or found["choices"][0]["prompt_token_ids"]
                    )
                    assert status == 200 and (ids[0] == bos) == expected and bos not in ids[1:]
    finally:
        backend.post_processor = before


def test_what_the_operator_decides(checkpoint):
    """--max-logprobs -1, tokens as ids, usage in every stream."""
    options = dict(max_logprobs=-1, return_tokens_as_token_ids=True, enable_force_include_usage=True)
    with serving(checkpoint(), ServeOptions(**options)) as server:
        client = server.client()
        made = client.completions.create(prompt=FOX, logprobs=-1, echo=True, max_tokens=0, **GREEDY)
        assert {len(top) for top in made.choices[0].logprobs.top_logprobs[1:]} == {320}
        assert all(token.startswith("token_id:") for token in made.choices[0].logprobs.tokens)
        chunks = list(client.completions.create(prompt=FOX, max_tokens=3, stream=True, **GREEDY))
        assert all(chunk.usage for chunk in chunks) and chunks[-1].choices == []
        with pytest.raises(openai.BadRequestError, match="between -1 and 320"):
            client.completions.create(prompt=FOX, logprobs=321, max_tokens=1, **GREEDY)
