"""Tools and reasoning in /v1/responses, asked by OpenAI's own client."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from nanovllm.serving.http.options import ServeOptions
from tests.checkpoints import make_checkpoint
from tests.servers import serving

GULLS = "two gulls circled"
GIVEN = dict(model="tiny", temperature=0, max_output_tokens=120)
SCHEMA = {"type": "object", "properties": {"bird": {"enum": ["gull", "crow"]}}, "required": ["bird"]}
COUNT = {"type": "function", "name": "count", "parameters": SCHEMA | {"additionalProperties": False}, "strict": True}
FORCED = dict(tools=[COUNT], parallel_tool_calls=False)
NAMED = {"type": "function", "name": "count"}


class Look(BaseModel):
    """Look at a bird."""

    model_config = ConfigDict(extra="forbid")
    bird: Literal["gull", "crow"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Long enough for tools, which are a token a letter here."""
    return make_checkpoint(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def client(model):
    pytest.importorskip("llguidance")
    with serving(model, block_size=16, max_model_len=2048, num_gpu_blocks_override=512) as server:
        yield server.client()


@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}])
def test_a_call(client, choice):
    """It fits its schema, and a stream says the same."""
    found = client.responses.create(input=GULLS, tool_choice=choice, **FORCED, **GIVEN)
    [call] = found.output
    assert (found.status, call.type, call.name, call.status) == ("completed", "function_call", "count", "completed")
    assert json.loads(call.arguments)["bird"] in ("gull", "crow") and call.call_id and found.output_text == ""
    events = list(client.responses.create(input=GULLS, tool_choice=choice, stream=True, **FORCED, **GIVEN))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    [streamed] = events[-1].response.output
    assert "".join(pieces) == streamed.arguments == call.arguments and len(pieces) > 1
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith("delta")]
    assert kinds == (
        "created in_progress output_item.added function_call_arguments.done output_item.done completed".split()
    )


def test_a_call_that_is_cut_short(client):
    """An incomplete item with the arguments that there are, whole and streamed."""
    given = GIVEN | dict(tool_choice="required", max_output_tokens=44)
    found = client.responses.create(input=GULLS, **FORCED, **given)
    [call] = found.output
    assert (found.status, call.status, found.output_text) == ("incomplete", "incomplete", "")
    assert call.arguments and '{"bird": "gull"}'.startswith(call.arguments[:8]) and not call.arguments.endswith("}")
    [*_, last] = client.responses.create(input=GULLS, stream=True, **FORCED, **given)
    [streamed] = last.response.output
    assert (streamed.status, streamed.arguments) == ("incomplete", call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "cut short"}
    for given in (dict(previous_response_id=found.id), dict(input=[call, result])):
        assert client.responses.create(**{"input": [result]} | given, **FORCED, **GIVEN).output, "the next turn"


ONE = '<tool_call>{"name": "count", "arguments": {"bird": "gull"}}</tool_call>'
SAYS = [  # what the model says, and the items that this is; a regular expression stands for the model
    (f"{ONE} so it is.\n{ONE}\n", [ONE, (" so it is.\n"), ONE]),
    (f"<think>Hm.</think>\n\nIt [is]:\n{ONE}", ["Hm.", "\n\nIt [is]:\n", ONE]),
    (f"One é 🙂 <tool_ca, {ONE}\n", ["One é 🙂 <tool_ca, ", ONE]),
    (ONE.replace("</tool_call>", "</tool_c"), [ONE]),
    (ONE.replace("gull", "gull\n\t"), [ONE.replace("gull", "gull\\n\\t")]),
]


@pytest.mark.parametrize("text, items", SAYS, ids=range(len(SAYS)))
def test_whole_and_streamed_are_one(model, text, items):
    """The same items in the model's order, and each token's logprobs with the text that it is of."""
    with serving(model, ServeOptions(reasoning_parser="qwen3"), max_model_len=2048, block_size=16) as server:
        regex = "".join(f"\\x{{{ord(letter):x}}}" if not letter.isalnum() else letter for letter in text)
        given: dict = dict(input=GULLS, tools=[COUNT | {"strict": False}], include=["message.output_text.logprobs"])
        given |= GIVEN | dict(max_output_tokens=600, extra_body={"structured_outputs": {"regex": regex}})
        whole = server.client().responses.create(**given).model_dump()
        events = [event.model_dump() for event in server.client().responses.create(stream=True, **given)]
    streamed = events[-1]["response"]
    names = {"function_call": "arguments", "message": "content", "reasoning": "content"}
    for answer in (whole, streamed):
        shown = []
        for item in answer["output"]:
            value = item[names[item["type"]]]
            shown.append(ONE.replace('{"bird": "gull"}', value) if isinstance(value, str) else value[0]["text"])
            if item["type"] == "message":
                tokens = value[0]["logprobs"]
                assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == value[0]["text"]
            for name in ("id", "call_id"):
                item.pop(name, None)
        assert shown == items
    assert (whole["output"], whole["status"]) == (streamed["output"], streamed["status"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    for event in deltas:
        assert "".join(token["token"] for token in event["logprobs"]) == event["delta"]


def test_the_next_turn_has_the_result(client):
    """By the answer's id, and replayed; the model sees the same."""
    first = client.responses.create(input=GULLS, tool_choice="required", **FORCED, **GIVEN)
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": '{"number": 2}'}
    given = GIVEN | dict(max_output_tokens=8, tools=[COUNT], tool_choice="none")
    by_id = client.responses.create(input=[result], previous_response_id=first.id, **given)
    replayed = [{"role": "user", "content": GULLS}, *first.output, result]
    again = client.responses.create(input=replayed, **given)
    assert by_id.output_text == again.output_text and by_id.output[0].type == "message"
    assert by_id.usage.input_tokens == again.usage.input_tokens > first.usage.input_tokens
    assert by_id.usage.input_tokens_details.cached_tokens > 0


def test_the_clients_own_tools(client):
    """pydantic_function_tool describes them; parse() and stream() read the arguments."""
    given = dict(tools=[openai.pydantic_function_tool(Look)], tool_choice="required", parallel_tool_calls=False)
    found = client.responses.parse(input=GULLS, **given, **GIVEN)
    [call] = found.output
    assert isinstance(call.parsed_arguments, Look)
    with client.responses.stream(input=GULLS, **given, **GIVEN) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.function_call_arguments.delta"]
        [last] = stream.get_final_response().output
    assert snapshots[-1] == last.arguments == call.arguments and last.parsed_arguments == call.parsed_arguments


OTHERS = {
    "web_search_call": {"id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    "custom_tool_call": {"call_id": "c", "name": "patch", "input": "x"},
    "custom_tool_call_output": {"call_id": "c", "output": "done"},
    "local_shell_call": {"call_id": "d", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    "mcp_approval_response": {"approval_request_id": "m", "approve": True},
}


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_other_servers_tools(client, stream):
    """Sent back by an agent that has moved here: left out, also of what the answer was made from, and named."""
    others = [{"type": kind} | item for kind, item in OTHERS.items()]
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a gull"}]
    rest = [{"role": "user", "content": "go on"}]
    given = GIVEN | dict(max_output_tokens=8, stream=stream)
    raw = client.responses.with_raw_response.create(input=[*turn, *others, *rest], **given)
    named = [f"input[{place}] of type {kind!r}" for place, kind in enumerate(OTHERS, len(turn))]
    assert ", ".join(named) in raw.headers["warning"]
    found = [*raw.parse()][-1].response if stream else raw.parse()
    plain = client.responses.create(input=turn + rest, **GIVEN | dict(max_output_tokens=8))
    assert (found.output_text, found.usage.input_tokens) == (plain.output_text, plain.usage.input_tokens)
    assert [item.type for item in client.responses.input_items.list(found.id).data] == ["message"] * 3
    more = client.responses.with_raw_response.create(input="and?", previous_response_id=found.id, **GIVEN)
    assert "warning" not in more.headers
    with pytest.raises(openai.BadRequestError, match="all items of the input are of tools"):
        client.responses.create(input=others, **GIVEN)
    with pytest.raises(openai.BadRequestError, match=r"input item 1: .*found type 'web_search'"):
        client.responses.create(input=[others[0], {"type": "web_search"}], **GIVEN)


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_a_picture_where_none_can_be(client, role, instructions):
    """A client's mistake, with instructions and without, alone or beside texts; the log has no traceback."""
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}
    for parts in ([picture], [{"type": "input_text", "text": "look"}, picture]):
        for more in ([], [{"role": "user", "content": "hi"}]):
            given = [{"role": role, "content": parts}, *more]
            with pytest.raises(openai.BadRequestError, match=f"images belong in messages of role user.*{role}"):
                client.responses.create(input=given, instructions=instructions, **GIVEN)


def test_a_schema_of_a_json_object(client):
    """As llama.cpp's users write it; what is left out of such a form is named."""
    bird = {"type": "object", "properties": {"bird": {"enum": ["gull"]}}, "required": ["bird"]}
    form = {"type": "json_object", "schema": bird | {"additionalProperties": False}, "name": "bird"}
    raw = client.responses.with_raw_response.create(input=GULLS, text={"format": form}, **GIVEN)
    assert json.loads(raw.parse().output_text) == {"bird": "gull"} and "text.format: 'name'" in raw.headers["warning"]


def test_a_schema_of_an_answer(client):
    """OpenAI's form: whole and streamed, a key that is optional, a format that nobody knows; what cannot be held."""
    place = {"type": "string", "format": "path", "maxLength": 3}
    schema = {"type": "object", "properties": {"note": place, "bird": {"enum": ["gull"]}}, "required": ["bird"]}
    form = {"type": "json_schema", "name": "sight", "schema": schema | {"additionalProperties": False}, "strict": True}
    whole = client.responses.create(input=GULLS, text={"format": form}, **GIVEN)
    value = json.loads(whole.output_text)
    assert value["bird"] == "gull" and value.keys() <= {"bird", "note"} and len(value.get("note", "")) <= 3
    with client.responses.stream(input=GULLS, text={"format": form}, **GIVEN) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    raw = client.responses.with_raw_response.create(input=GULLS, text={"format": form | {"stric": 1}}, **GIVEN)
    assert "text.format: 'stric' (did you mean 'strict'?)" in raw.headers["warning"]
    for odd, named in (({"uniqueItems": True}, "uniqueItems"), ({"if": {}, "then": {}}, '"if", "then"')):
        with pytest.raises(openai.BadRequestError, match=named):
            client.responses.create(input=GULLS, text={"format": form | {"schema": schema | odd}}, **GIVEN)


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "f"}]}


def test_tools_that_are_no_functions(client):
    """As an agent sends them to every model."""
    others = [{"type": "web_search"}, {"type": "custom", "name": "patch", "format": {"type": "text"}}]
    raw = client.responses.with_raw_response.create(
        input=GULLS, tools=[*others, COUNT], tool_choice="required", parallel_tool_calls=False, **GIVEN
    )
    assert "tools[0] of type 'web_search', tools[1] of type 'custom'" in raw.headers["warning"]
    found = raw.parse()
    assert found.output[0].name == "count" and [tool.type for tool in found.tools] == [
        "web_search",
        "custom",
        "function",
    ]


def test_bad_tools(client):
    for given, message in (
        (dict(tool_choice="required"), "there are no tools"),
        (dict(tools=[COUNT], tool_choice={"type": "function", "name": "look"}), "tool_choice names 'look'"),
        (dict(tools=[COUNT | {"parameters": []}]), "parameters must be a JSON schema"),
        (dict(tools=[COUNT, {"type": "mcp", "server_label": "x"}], tool_choice={"type": "mcp"}), "run on a server"),
        (dict(tools=[{"type": "custom", "name": "f"}], tool_choice="required"), "there are no tools"),
        (dict(tools=[COUNT, {"type": "custom", "name": "f"}], tool_choice=ALLOWED), "tool_choice allows 'f'"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.responses.create(input=GULLS, **given, **GIVEN)


def test_reasoning(model):
    """A model of random weights never stops to think: its answer is one reasoning item, whole and streamed."""
    with serving(model, ServeOptions(reasoning_parser="deepseek_r1"), max_model_len=512) as server:
        responses = server.client().responses
        given = GIVEN | dict(max_output_tokens=20, extra_body={"ignore_eos": True})
        found = responses.create(input=GULLS, reasoning={"effort": "low"}, **given)
        [item] = found.output
        assert (found.status, item.type, item.status, item.summary) == ("incomplete", "reasoning", "incomplete", [])
        assert item.content[0].type == "reasoning_text" and item.content[0].text and found.reasoning.effort == "low"
        assert found.usage.output_tokens_details.reasoning_tokens == found.usage.output_tokens == 20
        events = list(responses.create(input=GULLS, stream=True, **given))
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == events[-1].response.output[0].content[0].text == item.content[0].text
        assert events[-1].response.usage.output_tokens_details.reasoning_tokens == 20
        assert responses.create(input="and?", previous_response_id=found.id, **given).output
