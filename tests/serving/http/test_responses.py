"""/v1/responses, asked by OpenAI's own client: answers, streams, conversations that go on, answers that are kept."""

import json
import logging
import time
from queue import Queue

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from nanovllm import LLM, SamplingParams
from nanovllm.serving.async_llm import Overloaded
from nanovllm.serving.http import responses_api
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.responses_api import RESPONSES
from nanovllm.serving.openai.answer import CHAT
from tests.checkpoints import SMALL
from tests.faults import plant
from tests.servers import PATIENCE_S, serving

GULLS = "two gulls circled"
SHORT = dict(model="tiny", temperature=0, max_output_tokens=10)
LONG = SHORT | {"max_output_tokens": 150, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint(), ServeOptions(max_body_bytes=200_000)) as running:
        yield running


@pytest.fixture
def client(server):
    yield server.client()
    server.llm.thread.set_pace()
    server.assert_at_rest()


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint()), **SMALL)


def ask(server, path: str, body: dict) -> tuple[int, dict, dict[str, str]]:
    status, raw, headers = server.exchange(path, json.dumps(body).encode())
    return status, json.loads(raw), headers


def stop_in(text: str) -> tuple[str, str]:
    """A letter that is not the first of this text, and what stands before it."""
    letter = next(letter for letter in text[1:] if letter.isascii() and letter.isalpha() and letter != text[0])
    return letter, text[: text.index(letter)]


# -- answers ----------------------------------------------------------------------------------------------------------


def test_an_answer_is_the_chats(client, llm):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": GULLS}]
    [expected] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=10))
    given = dict(instructions="be brief", metadata={"a": "b"}, user="u", **SHORT)
    found = client.responses.create(input=GULLS, **given)
    assert found.output_text == expected.outputs[0].text and found.id.startswith("resp_")
    assert found.usage.input_tokens == len(expected.prompt_token_ids) and found.usage.output_tokens == 10
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.instructions, found.metadata, found.user, found.model) == ("be brief", {"a": "b"}, "u", "tiny")
    assert (found.temperature, found.max_output_tokens, found.error, found.truncation) == (0, 10, None, "disabled")
    parts = [{"type": "input_text", "text": GULLS}]
    again = client.responses.create(input=[{"type": "message", "role": "user", "content": parts}], **given)
    assert again.output_text == found.output_text and again.id != found.id
    Response.model_validate(again.model_dump(by_alias=True))
    stop, before = stop_in(client.responses.create(input=GULLS, **SHORT).output_text)
    ended = client.responses.create(input=GULLS, extra_body={"stop": [stop]}, **SHORT)
    assert ended.status == "completed" and ended.output_text == before
    assert ended.output[0].status == "completed" and ended.completed_at >= ended.created_at


def test_a_stream_is_the_answer(client):
    whole = client.responses.create(input=GULLS, **SHORT)
    events = list(client.responses.create(input=GULLS, stream=True, **SHORT))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert (events[-1].type, last.output_text) == ("response.incomplete", whole.output_text)
    assert last.usage.total_tokens == whole.usage.total_tokens and events[0].response.usage is None
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
    assert client.responses.retrieve(last.id) == last


def test_the_clients_own_stream(client):
    """It follows the events, and needs each item to be opened before it grows."""
    stop, before = stop_in(client.responses.create(input=GULLS, **SHORT).output_text)
    with client.responses.stream(input=GULLS, extra_body={"stop": [stop]}, **SHORT) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        done = stream.get_final_response()
    assert done.status == "completed" and snapshots[-1] == done.output_text == before


def test_how_it_travels(server):
    """Each event has its name; no [DONE], which OpenAI's server does not send here either."""
    _, raw, headers = server.exchange(RESPONSES, json.dumps({"input": GULLS, "stream": True}).encode())
    assert headers["content-type"].startswith("text/event-stream")
    lines = raw.decode().removesuffix("\n\n").split("\n\n")
    for line in lines:
        name, data = line.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_logprobs(client):
    given = dict(input=GULLS, include=["message.output_text.logprobs"], top_logprobs=3, **SHORT)
    whole = client.responses.create(**given).output[0].content[0].logprobs
    assert len(whole) == 10 and all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in whole)
    events = list(client.responses.create(stream=True, **given))
    streamed = [entry for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert events[-1].response.output[0].content[0].logprobs == whole
    assert client.responses.create(input=GULLS, top_logprobs=3, **SHORT).output[0].content[0].logprobs == []


def test_json(client):
    pytest.importorskip("llguidance")

    class Choice(BaseModel):
        yes: bool

    given = SHORT | dict(max_output_tokens=60, extra_body={"logit_bias": {"2": -100}})
    found = client.responses.parse(input=GULLS, text_format=Choice, **given)
    assert found.status == "completed" and found.output_parsed == Choice.model_validate_json(found.output_text)
    with client.responses.stream(input=GULLS, text_format=Choice, **given) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed
    with pytest.raises(openai.BadRequestError, match="json_schema needs"):
        client.responses.create(input=GULLS, text={"format": {"type": "json_schema", "name": "x"}}, **SHORT)


# -- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on(server, client, llm):
    """The model sees what was said, and its blocks are found again; instructions are of one answer only."""
    first = client.responses.create(input=GULLS, **SHORT)
    second = client.responses.create(input="and then?", previous_response_id=first.id, **SHORT)
    messages = [
        {"role": "user", "content": GULLS},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and then?"},
    ]
    assert (
        second.output_text
        == client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=10)
        .choices[0]
        .message.content
    )
    assert second.previous_response_id == first.id
    third = client.responses.create(input="and?", previous_response_id=second.id, **SHORT)
    cached = [response.usage.input_tokens_details.cached_tokens for response in (second, third)]
    assert first.usage.input_tokens - 4 < cached[0] < second.usage.input_tokens - 4 < cached[1]  # blocks of 4
    brief = client.responses.create(input="and?", previous_response_id=second.id, instructions="be brief", **SHORT)
    after = client.responses.create(input="so?", previous_response_id=brief.id, **SHORT)
    messages += [
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": brief.output_text},
        {"role": "user", "content": "so?"},
    ]
    assert after.usage.input_tokens == len(llm.chat_prompt(messages)["prompt_token_ids"])
    by_reference = [
        {"role": "user", "content": GULLS},
        {"type": "item_reference", "id": first.output[0].id},
        messages[2],
    ]
    assert client.responses.create(input=by_reference, **SHORT).output_text == second.output_text
    replayed = [messages[0], *first.output, messages[2]]
    assert client.responses.create(input=replayed, **SHORT).output_text == second.output_text


def test_an_open_message_goes_on(client, llm):
    """And the next turn finds one answer."""
    whole = client.responses.create(input=GULLS, **SHORT).output_text
    open_message = {"type": "message", "role": "assistant", "status": "incomplete", "content": whole[:4]}
    found = client.responses.create(input=[{"role": "user", "content": GULLS}, open_message], **SHORT)
    closed = client.responses.create(
        input=[{"role": "user", "content": GULLS}, open_message | {"status": "completed"}], **SHORT
    )
    assert found.usage.input_tokens < closed.usage.input_tokens
    after = client.responses.create(input="and?", previous_response_id=found.id, **SHORT)
    messages = [
        {"role": "user", "content": GULLS},
        {"role": "assistant", "content": whole[:4] + found.output_text},
        {"role": "user", "content": "and?"},
    ]
    assert after.usage.input_tokens == len(llm.chat_prompt(messages)["prompt_token_ids"])


def test_what_is_kept(client):
    kept = client.responses.create(input=GULLS, **SHORT)
    assert client.responses.retrieve(kept.id) == kept
    client.responses.delete(kept.id)
    not_kept = client.responses.create(input=GULLS, store=False, **SHORT)
    for gone in (kept.id, not_kept.id, "resp_x"):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match=f"Response with id '{gone}' not found."):
                call(gone)
        with pytest.raises(openai.BadRequestError, match=f"Previous response with id '{gone}' not found.") as error:
            client.responses.create(input=GULLS, previous_response_id=gone, **SHORT)
        assert error.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="no answer that is kept has the item 'msg_x'"):
        client.responses.create(input=[{"type": "item_reference", "id": "msg_x"}], **SHORT)
    with pytest.raises(openai.BadRequestError, match="made without stream or background"):
        client.responses.retrieve(client.responses.create(input=GULLS, **SHORT).id, stream=True)


def test_what_an_answer_was_made_from(client):
    """In pages, which the client asks for one after another; without what comes from earlier answers."""
    first = client.responses.create(input=GULLS, **SHORT)
    [item] = client.responses.input_items.list(first.id)
    assert (item.type, item.role, item.content[0].type, item.content[0].text) == (
        "message",
        "user",
        "input_text",
        GULLS,
    )
    given = [{"role": "user", "content": f"gull {number}"} for number in range(4)]
    given += [{"role": "assistant", "content": "a gull", "id": "mine"}, {"role": "user", "content": "?", "id": "mine"}]
    made = client.responses.create(input=given, previous_response_id=first.id, **SHORT)
    found = list(client.responses.input_items.list(made.id, limit=2, order="asc"))
    texts = [item.content[0].text for item in found]
    assert texts == [item["content"] for item in given] and len({item.id for item in found}) == 6
    assert [item.content[0].text for item in client.responses.input_items.list(made.id, limit=4)] == texts[::-1]
    assert client.responses.input_items.list(made.id, after=found[0].id).has_more is False
    for query, message in (
        (dict(limit=0), "from 1 to 100"),
        (dict(order="up"), "asc or desc"),
        (dict(after="x"), "id"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.responses.input_items.list(made.id, **query)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_x")


def test_tenants(checkpoint):
    """Nobody reads, continues, refers to, ends or deletes what another has been answered."""
    with serving(checkpoint(), ServeOptions(api_key=("one", "two"))) as server:
        one, two = server.client("one").responses, server.client("two").responses
        made = one.create(input=GULLS, **SHORT)
        reference = [{"type": "item_reference", "id": made.output[0].id}]
        for call in (two.retrieve, two.delete, two.cancel):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            two.create(input=GULLS, previous_response_id=made.id, **SHORT)
        with pytest.raises(openai.BadRequestError, match="no answer that is kept has the item"):
            two.create(input=reference, **SHORT)
        assert one.create(input=reference, **SHORT).output and one.retrieve(made.id) == made
        assert two.create(input=GULLS, **SHORT).usage.input_tokens_details.cached_tokens == 0
        with pytest.raises(openai.AuthenticationError):
            server.client("three").responses.retrieve(made.id)


# -- in the background ------------------------------------------------------------------------------------------------


def until_ended(client, response_id: str) -> Response:
    ends = time.monotonic() + PATIENCE_S
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < ends, "it has not ended"
        time.sleep(0.005)
    return found


def test_in_the_background(server, client):
    whole = client.responses.create(input=GULLS, **SHORT)
    server.llm.thread.set_pace(0)
    begun = client.responses.create(input=GULLS, background=True, **SHORT)
    assert begun.status == "queued" == client.responses.retrieve(begun.id).status and begun.background
    with pytest.raises(openai.BadRequestError, match="not complete"):
        client.responses.create(input="and?", previous_response_id=begun.id, **SHORT)
    server.llm.thread.set_pace(2)
    server.until(lambda: server.llm.thread.steps_left == 0)
    assert client.responses.retrieve(begun.id).status == "in_progress"
    server.llm.thread.set_pace()
    ended = until_ended(client, begun.id)
    assert (ended.status, ended.output_text) == ("incomplete", whole.output_text)
    assert client.responses.cancel(begun.id) == ended, "what has ended stays as it is"
    assert client.responses.create(input="and?", previous_response_id=begun.id, **SHORT).output
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(whole.id)


def test_a_stream_in_the_background(server, client):
    """Its reader may leave and come back: the events after any number, of what works and of what has ended."""
    whole = list(client.responses.create(input=GULLS, stream=True, **LONG))
    server.llm.thread.set_pace(5)
    stream = client.responses.create(input=GULLS, stream=True, background=True, **LONG)
    begun = [next(stream) for _ in range(5)]  # up to the first text
    stream.close()
    response_id = begun[0].response.id
    server.until(lambda: server.llm.thread.steps_left == 0)
    assert client.responses.retrieve(response_id).status == "in_progress", "it goes on without a reader"
    resumed = client.responses.retrieve(response_id, stream=True, starting_after=3)
    assert next(resumed).sequence_number == 4
    server.llm.thread.set_pace()
    followed = list(resumed)
    assert [event.sequence_number for event in followed] == list(range(5, len(followed) + 5))
    kinds = [[event.type for event in events if "delta" not in event.type] for events in (begun + followed, whole)]
    assert kinds[0] == kinds[1], "one delta may have the text of several steps"
    ended = followed[-1].response
    assert ended.output_text == whole[-1].response.output_text and client.responses.retrieve(response_id) == ended
    again = list(client.responses.retrieve(response_id, stream=True))
    assert again == begun + followed
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=9999)) == []
    for number in ("x", "-2", "9" * 5000):
        status, _ = server.send(f"{RESPONSES}/{response_id}?stream=true&starting_after={number}")
        assert status == 400


def test_a_stream_in_the_background_is_ended_or_fails(server, client, monkeypatch):
    server.llm.thread.set_pace(5)
    stream = client.responses.create(input=GULLS, stream=True, background=True, **LONG)
    response_id = next(stream).response.id
    assert client.responses.cancel(response_id).status == "cancelled"
    events = list(stream)
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    assert events[-1].response.id == response_id
    assert list(client.responses.retrieve(response_id, stream=True))[1:] == events
    server.llm.thread.set_pace()
    for num_steps in (1, 4):
        plant(monkeypatch, server.engine.model_runner, "run", [num_steps], ArithmeticError("planted"))
        events = list(client.responses.create(input=GULLS, stream=True, background=True, **LONG))
        assert (events[0].type, events[-1].type) == ("response.created", "response.failed")
        assert "planted" in events[-1].response.error.message
        monkeypatch.undo()
        assert list(client.responses.retrieve(events[0].response.id, stream=True)) == events


@pytest.mark.parametrize("num_steps, delete", [(0, False), (3, False), (3, True)])
def test_an_answer_in_the_background_is_ended(server, client, num_steps, delete):
    """Before its first token, and in its middle; its blocks are free then."""
    server.llm.thread.set_pace(num_steps)
    begun = client.responses.create(input=GULLS, background=True, **LONG)
    seqs = server.engine.scheduler.seqs
    server.until(lambda: [seq.num_generated_tokens for seq in seqs.values()] == [num_steps])
    if delete:
        client.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(begun.id)
    else:
        ended = client.responses.cancel(begun.id)
        assert ended.status == "cancelled" and bool(num_steps) <= ended.usage.output_tokens <= num_steps
        assert client.responses.retrieve(begun.id) == ended
    server.assert_at_rest()


def test_what_goes_wrong_in_the_background(server, client, monkeypatch, caplog):
    for body, status in ((dict(input=GULLS, temperature="hot"), 400), (dict(input=GULLS, model="gpt-4o"), 404)):
        assert ask(server, RESPONSES, body | {"background": True})[0] == status
    plant(monkeypatch, server.engine.model_runner, "run", [1], ArithmeticError("planted"))
    begun = client.responses.create(input=GULLS, background=True, **SHORT)
    failed = until_ended(client, begun.id)
    assert failed.status == "failed" and failed.error.code == "server_error" and "planted" in failed.error.message
    plant(monkeypatch, server.llm, "_enter", [2], Overloaded("planted"))  # others have filled the queue meanwhile
    failed = until_ended(client, client.responses.create(input=GULLS, background=True, **SHORT).id)
    assert failed.error.code == "rate_limit_exceeded" and failed.error.message == "planted"
    caplog.clear()
    plant(monkeypatch, responses_api, "Chunks", [1], ArithmeticError("planted"))
    failed = until_ended(client, client.responses.create(input=GULLS, background=True, **SHORT).id)
    assert failed.error.message == "internal error; the server's log has it"
    assert [record.exc_info[0] for record in caplog.records] == [ArithmeticError]


# -- as at every other endpoint ---------------------------------------------------------------------------------------


def test_fields(server, client):
    """What asks for nothing is taken, what nobody knows is named, what cannot be done is refused."""
    nothing = dict(parallel_tool_calls=True, tool_choice="none", tools=[], truncation="auto", service_tier="auto")
    nothing |= dict(reasoning={"effort": "none", "summary": "auto"}, text={"verbosity": "low"}, safety_identifier="s")
    nothing |= dict(include=["reasoning.encrypted_content"], prompt_cache_key="k", max_tool_calls=3, background=False)
    status, _, headers = ask(server, RESPONSES, {"input": GULLS, "max_output_tokens": 2, **nothing})
    assert status == 200 and "warning" not in headers
    status, _, headers = ask(
        server, RESPONSES, {"input": GULLS, "max_output_tokens": 2, "nonsense": 1, "text": {"x": 1}}
    )
    assert status == 200 and "'nonsense', text: 'x'" in headers["warning"]
    for body, message in (
        ({}, "input must be a text"),
        ({"input": GULLS, "messages": []}, "messages is a field of chats; here it is input"),
        ({"input": GULLS, "tool_choice": {"type": "web_search"}}, "tools that run on a server"),
        ({"input": GULLS, "temperature": "hot"}, "temperature must be a number"),
        ({"input": GULLS, "chat_template": "{{ 7 * 7 }}"}, "a request may not bring one"),
        ({"input": GULLS, "stream_options": {"include_obfuscation": True}}, "stream_options needs stream: true"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, "input may have 4096 items, found 4097"),
        ({"input": [{"id": "x"}] * 5_000}, "4096 items"),
        ({"input": "x" * 4000}, "tokens"),
        ({"input": "\ud800"}, "not valid Unicode"),
    ):
        status, answer, _ = ask(server, RESPONSES, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"\xff\xfe", b"[" * 90_000, b'{"input":' + b"[" * 40_000 + b"]" * 40_000 + b"}"]
)
def test_hostile_bodies(server, client, raw):
    assert server.send(RESPONSES, raw)[0] == 400


def nested(levels: int) -> object:
    value: object = {}
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("levels", [3, 100, 400])
def test_what_is_nested_can_be_written_or_is_refused(server, client, levels):
    """It may be read with less of the stack than it takes to write it again."""
    tool = {"type": "web_search", "more": nested(levels)}
    item = {"type": "message", "role": "user", "content": GULLS, "more": nested(levels)}
    for body in ({"tools": [tool]}, {"input": [item]}, {"text": {"format": {"type": "text", "x": nested(levels)}}}):
        status, answer, _ = ask(server, RESPONSES, {"input": GULLS, **body, **SHORT})
        assert status == (200 if levels == 3 else 400), answer
        if levels > 3:
            assert "levels of objects and lists" in answer["error"]["message"]


def test_a_failure_in_a_stream_is_an_event(server, client, monkeypatch):
    plant(monkeypatch, server.engine.model_runner, "run", [1], ArithmeticError("planted"))
    with pytest.raises(openai.InternalServerError, match="planted"):  # nothing has been sent: there is a status
        client.responses.create(input=GULLS, stream=True, **SHORT)
    server.llm.thread.set_pace(20)
    stream = client.responses.create(input=GULLS, stream=True, **LONG)
    server.until(lambda: server.llm.thread.steps_left == 0)
    plant(monkeypatch, server.engine.model_runner, "run", [1], ArithmeticError("planted"))
    server.llm.thread.set_pace()
    events = list(stream)
    assert events[-1].type == "response.failed" and "planted" in events[-1].response.error.message
    assert client.responses.retrieve(events[0].response.id) == events[-1].response


def test_who_leaves_frees_its_blocks(server, client):
    server.llm.thread.set_pace(2)
    stream = client.responses.create(input=GULLS, stream=True, **LONG)
    next(iter(stream))
    stream.close()
    server.assert_at_rest()


def test_ids_and_the_log(server, client):
    lines: Queue[str] = Queue()
    handler, logger = logging.Handler(), logging.getLogger("nanovllm.access")
    handler.emit = lambda record: lines.put(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        found = client.responses.with_raw_response.create(input=GULLS, extra_headers={"X-Request-Id": "mine"}, **SHORT)
        assert found.headers["x-request-id"] == "mine"
        line = lines.get(timeout=PATIENCE_S)
        assert line.startswith("POST /v1/responses 200: ") and " 10 out, " in line and line.endswith("id mine")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_the_chat_is_as_it_was(server, client):
    status, answer, _ = ask(server, CHAT, {"messages": [{"role": "user", "content": GULLS}], "max_tokens": 3})
    assert status == 200 and answer["object"] == "chat.completion"
