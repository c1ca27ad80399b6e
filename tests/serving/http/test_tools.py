"""Calls of tools and reasoning over HTTP, through OpenAI's own client."""

import json
from functools import reduce
from typing import Any

import pytest

from nanovllm.serving.http.options import ServeOptions
from tests.checkpoints import make_checkpoint
from tests.servers import serving

USER = [{"role": "user", "content": "two gulls"}]
CITY = {"enum": ["Oslo", "Rome"]}


def tool(name: str, parameters: dict | None = None, **more) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


def takes(**properties) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


WEATHER = tool("weather", takes(city={"$ref": "#/$defs/city"}, days={"enum": [1, 2]}) | {"$defs": {"city": CITY}})
NOW = tool('now "and here"')
TOOLS = [WEATHER, NOW]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Long enough for tools, which are a token a letter here."""
    model = make_checkpoint(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=2048)
    with serving(model, ServeOptions(), block_size=16, max_model_len=2048, num_gpu_blocks_override=512) as running:
        yield running


def added(one: Any, other: Any) -> Any:
    """Deltas, put together as a client does."""
    if isinstance(one, dict):
        return one | {name: added(one[name], value) if name in one else value for name, value in other.items()}
    if isinstance(one, list):
        calls = {call["index"]: call for call in one}
        for call in other:
            calls[call["index"]] = added(calls[call["index"]], call) if call["index"] in calls else call
        return list(calls.values())
    return other if isinstance(one, int | None) else one if other is None else one + other


def ask(server, stream: bool, **given) -> tuple[dict, str, dict]:
    """(message, finish_reason, usage) of a chat."""
    given = dict(model="tiny", messages=USER, temperature=0, max_tokens=120) | given
    extra = {name: given.pop(name) for name in ("chat_template_kwargs", "include_reasoning") if name in given}
    create = server.client().chat.completions.create
    if not stream:
        answer = create(**given, extra_body=extra)
        [choice] = answer.choices
        return choice.message.model_dump(), choice.finish_reason, answer.usage.model_dump()
    deltas, reasons, usage = [], [], {}
    for chunk in create(**given, extra_body=extra, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage.model_dump() if chunk.usage else usage
        for choice in chunk.choices:
            deltas.append(choice.delta.model_dump(exclude_unset=True))
            reasons += [choice.finish_reason] if choice.finish_reason else []
    [reason] = reasons
    message = reduce(added, deltas)
    for call in message.get("tool_calls", ()):
        del call["index"]
    return message, reason, usage


def called(message: dict) -> list[tuple[str, Any]]:
    for call in message.get("tool_calls") or ():
        assert call["type"] == "function" and call["id"].startswith("call_")
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_required(server, stream, seed):
    """The call fits its function's schema, whatever a model of random weights would rather say."""
    given = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1.0, seed=seed)
    message, reason, _ = ask(server, stream, **given)
    [(name, arguments)] = called(message)
    assert reason == "tool_calls" and not message.get("content")
    if name == "weather":
        assert arguments["city"] in CITY["enum"] and arguments["days"] in (1, 2) and len(arguments) == 2
    else:
        assert (name, arguments) == ('now "and here"', {})


@pytest.mark.parametrize("stream", [False, True])
def test_named(server, stream):
    for name in ("weather", 'now "and here"'):
        choice = {"type": "function", "function": {"name": name}}
        message, reason, _ = ask(server, stream, tools=TOOLS, tool_choice=choice)
        [(found, _)] = called(message)
        assert (found, reason) == (name, "stop"), "OpenAI's reason for a function that was named"


def test_streams_say_what_whole_answers_say(server):
    given = dict(tools=TOOLS, tool_choice="required", temperature=1.0, seed=5)
    (whole, reason, usage), (streamed, stream_reason, stream_usage) = (ask(server, s, **given) for s in (False, True))
    if reason == "tool_calls":
        assert called(whole) == called(streamed)
    assert (reason, usage["completion_tokens"]) == (stream_reason, stream_usage["completion_tokens"])
