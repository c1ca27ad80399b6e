"""Calls of tools and reasoning over HTTP, through OpenAI's own client."""

import json
from functools import reduce
from typing import Any

import jsonschema
import openai
import pytest

from nanovllm.features.reasoning.think import TAGS
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.openai.openai_request import translate
from nanovllm.serving.openai.reading import Parsers
from nanovllm.serving.openai.shown import CHAT
from tests.checkpoints import CHAT_TEMPLATE, make_checkpoint
from tests.errors import expect
from tests.marks import by_night
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
    given = dict(model="tiny", messages=USER, temperature=0, max_tokens=400) | given
    extra = given.pop("extra_body", {}) | {
        name: given.pop(name) for name in ("chat_template_kwargs", "include_reasoning") if name in given
    }
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
        assert call["type"] == "function" and call["id"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


@pytest.mark.parametrize("stream", [False, by_night(True)])
@pytest.mark.parametrize("seed", [1, 2])
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


@pytest.mark.parametrize("stream", [False, by_night(True)])
def test_named(server, stream):
    for name in ("weather", 'now "and here"'):
        choice = {"type": "function", "function": {"name": name}}
        message, reason, _ = ask(server, stream, tools=TOOLS, tool_choice=choice)
        [(found, _)] = called(message)
        assert (found, reason) == (name, "stop"), "OpenAI's reason for a function that was named"


@pytest.mark.parametrize("stream", [False, by_night(True)])
def test_a_forced_call_without_a_name_is_no_content(server, stream):
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        message, reason, _ = ask(server, stream, tools=TOOLS, tool_choice=choice, max_tokens=5)
        assert reason == "length" and not message.get("content") and not message.get("tool_calls")


def test_allowed_tools(server):
    """The model is shown no others; a mode without required lets it speak. Or as a response has it, with one level."""
    nested = {"allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "weather"}}]}}
    for own, mode in ((nested, "auto"), ({"mode": "required", "tools": [{"name": "weather"}]}, "required")):
        allowed = {"type": "allowed_tools", **own}
        found = ask(server, False, tools=TOOLS, tool_choice=allowed, max_tokens=200, **ONE)
        alone = ask(server, False, tools=[WEATHER], tool_choice=mode, max_tokens=200, **ONE)
        for message, _, _ in (found, alone):
            for call in message["tool_calls"] or ():
                del call["id"]
        assert found[:2] == alone[:2] and found[2]["prompt_tokens"] == alone[2]["prompt_tokens"]
    assert [call["function"]["name"] for call in found[0]["tool_calls"]] == ["weather"]
    body = dict(messages=USER, tools=TOOLS, tool_choice=allowed, max_tokens=1)
    assert "warning" not in server.exchange(CHAT, json.dumps(body).encode())[2]


# -- calls that a model makes by itself: a regular expression stands for the model ---------------------------------

CLOSED = {"additionalProperties": False}
ONE = {"parallel_tool_calls": False}
TWICE = 'Sure\\. (<tool_call>\n\\{"name": "weather", "arguments": \\{"city": "Oslo"\\}\\}\n</tool_call>\n){2}'


def says(regex: str, **more) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": {"regex": regex}} | more}


@pytest.mark.parametrize("stream", [False, True])
def test_auto(server, stream):
    message, reason, _ = ask(server, stream, tools=TOOLS, **says(TWICE))
    assert (message["content"], reason) == ("Sure. ", "tool_calls")
    assert called(message) == [("weather", {"city": "Oslo"})] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    message, reason, _ = ask(server, stream, tools=TOOLS, **says(TWICE), parallel_tool_calls=False)
    assert (len(called(message)), reason) == (1, "tool_calls")
    message, reason, _ = ask(server, stream, tools=TOOLS, **says("No\\."))
    assert (message["content"], reason, message.get("tool_calls")) == ("No.", "stop", None)


@pytest.mark.parametrize("stream", [False, by_night(True)])
def test_none(server, stream):
    """What looks like a call is content then."""
    message, reason, _ = ask(server, stream, tools=TOOLS, tool_choice="none", **says(TWICE))
    assert message["content"].count("</tool_call>") == 2 and reason == "stop" and not message.get("tool_calls")


def test_an_answer_cut_in_a_call_says_so(server):
    """It has what there is of the call, whole and streamed."""
    for max_tokens in (60, 61):
        whole, reason, _ = ask(server, False, tools=TOOLS, max_tokens=max_tokens, **says(TWICE))
        [call] = whole["tool_calls"]
        assert reason == "length" and whole["content"] == "Sure. "
        assert '{"city": "Oslo"'.startswith(call["function"]["arguments"])
        streamed, reason, _ = ask(server, True, tools=TOOLS, max_tokens=max_tokens, **says(TWICE))
        assert reason == "length" and streamed["content"] == whole["content"]
        assert [call["function"] for call in streamed["tool_calls"]] == [call["function"]]


def test_a_stream_begins_with_the_name(server):
    """index, id, type and name first, then nothing but pieces of arguments; the reason comes last, and once."""
    chunks = server.client().chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=400, stream=True, tools=TOOLS, **says(TWICE)
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant" and all(choice.delta.role is None for choice in choices[1:])
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    for index in (0, 1):
        first, *others = [call for call in calls if call.index == index]
        assert (first.type, first.function.name, first.function.arguments) == ("function", "weather", "")
        assert first.id and len(others) > 5
        assert all(call.id is None and call.type is None and call.function.name is None for call in others)


@pytest.mark.parametrize("seed", [1, 2])
def test_calls_or_a_form(server, seed):
    """tool_choice auto and response_format: an answer is a call or fits the form."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": takes(answer={"enum": [42]}) | CLOSED}}
    message, reason, _ = ask(server, False, tools=TOOLS, response_format=form, temperature=1.0, seed=seed, **ONE)
    if message["content"]:
        assert (json.loads(message["content"]), reason) == ({"answer": 42}, "stop")
    else:
        assert reason in ("tool_calls", "length") and called(message)


@pytest.mark.parametrize("more", [{}, {"tools": [NOW]}], ids=["no tools", "tools"])
def test_options_of_structured_outputs(server, more):
    """They hold for the form whether or not there are tools."""
    asked = {"json": takes(a={"enum": [1, 2]}), "disable_additional_properties": True, "disable_any_whitespace": True}
    for seed in range(4):
        given = dict(extra_body={"structured_outputs": asked}, temperature=1.5, seed=seed)
        message, reason, _ = ask(server, False, **given, **more)
        assert reason in ("tool_calls", "length") if more and not message["content"] else reason == "stop"
        assert message["content"] in ('{"a":1}', '{"a":2}') or not message["content"]


def test_strict(server):
    """What comes where a call begins: tests/features/tool_calls/test_forced.py. Here nothing does."""
    strict = tool("weather", takes(city=CITY), strict=True)
    message, reason, _ = ask(server, False, tools=[strict], max_tokens=5)
    assert reason == "length" and message["content"] == ask(server, False, tools=[strict], max_tokens=5)[0]["content"]
    status, raw = server.send(
        "/v1/chat/completions",
        json.dumps({"messages": USER, "tools": [tool("f", {"type": "x"}, strict=True)]}).encode(),
    )
    assert status == 400 and b"structural_tag cannot be used" in raw


def test_a_conversation_with_tools(server):
    """What was called, and what it gave, is in the next prompt; arguments are JSON text, content is null."""
    message, _, _ = ask(server, False, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    [call] = message["tool_calls"]
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}
    messages = [{"role": "developer", "content": "Be brief."}, *USER, message, answer, answer]
    _, reason, usage = ask(server, False, tools=[WEATHER], messages=messages, max_tokens=5)
    assert reason == "length" and usage["prompt_tokens"] > 200
    prompt = server.llm.llm.chat_prompt(messages, tools=[WEATHER])["prompt"]
    system, rest = prompt.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n") and json.dumps(WEATHER) in system
    called_text = f'<tool_call>\n{{"name": "weather", "arguments": {call["function"]["arguments"]}}}\n</tool_call>'
    given_text = "<tool_response>\nRain.\n</tool_response>"
    assert rest == (
        f"<|im_start|>user\ntwo gulls<|im_end|>\n<|im_start|>assistant\n{called_text}<|im_end|>\n"
        f"<|im_start|>user\n{given_text}\n{given_text}<|im_end|>\n<|im_start|>assistant\n"
    )


BAD = [
    (dict(tools={"name": "f"}), "tools must be a list of at most 1024 functions"),
    (dict(tools=["f"]), "tools[0] must be {"),
    (dict(tools=[NOW, {"type": "function", "function": {}}]), "tools[1] must have a name of 1 to 256 characters"),
    (dict(tools=[tool("")]), "tools[0] must have a name"),
    (dict(tools=[{"type": "web_search"}], tool_choice={"type": "web_search"}), "tool_choice, as an object, must be"),
    (dict(tools=[{"type": "custom", "custom": {"name": "f"}}], tool_choice="required"), "there are no tools"),
    (
        dict(tools=[NOW], tool_choice={"type": "custom", "custom": {"name": "f"}}),
        "found {'type': 'custom', 'custom': {",
    ),
    (dict(tools=[NOW], tool_choice={"type": "mcp"}), "tools that run on a server"),
    (dict(tools=[NOW], tool_choice="any"), "'any' is 'required' here"),
    (dict(tools=[NOW], tool_choice={"type": "allowed_tools"}), "allowed_tools needs a list tools"),
    (dict(tools=[NOW], tool_choice=dict(type="allowed_tools", allowed_tools={"tools": [WEATHER]})), "allows 'weather'"),
    (dict(tools=[{"type": 5}]), "tools[0] must be {"),
    (dict(tools=[tool("f", ["x"])]), "tools[0]: parameters must be a JSON schema, found ['x']"),
    (dict(tools=[tool("f", strict="yes")]), "tools[0]: strict must be true or false"),
    (dict(tools=TOOLS, tool_choice="always"), "tool_choice must be auto, required, none or an object"),
    (dict(tools=TOOLS, tool_choice={"type": "function"}), "tool_choice, as an object, must be"),
    (dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "then"}}), "tool_choice names 'then'"),
    (dict(tool_choice={"type": "function", "function": {"name": "now"}}), "tool_choice names 'now'"),
    (dict(tool_choice="required"), "there are no tools"),
    (dict(tools=[], tool_choice="required"), "there are no tools"),
    (dict(tools=TOOLS, parallel_tool_calls="no"), "parallel_tool_calls must be true or false"),
    (dict(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}), "'auto' allows both"),
    (dict(tools=[tool("f", {"type": "strange"})], tool_choice="required"), "structural_tag cannot be used"),
    (dict(tools=[tool("f", {"$ref": "#/$defs/no"})], tool_choice="required"), "structural_tag cannot be used"),
    (dict(reasoning_effort="lots"), "reasoning_effort must be one of none, minimal"),
    (dict(include_reasoning="yes"), "include_reasoning must be true or false"),
    (dict(response_format={"type": "structural_tag"}), "a format is an object with a type"),
]


@pytest.mark.parametrize("given, text", BAD, ids=[text for _, text in BAD])
def test_bad_bodies(server, given, text):
    body = dict(model="tiny", messages=USER, max_tokens=2) | given
    status, raw = server.send("/v1/chat/completions", json.dumps(body).encode())
    assert status == 400 and text in json.loads(raw)["error"]["message"], raw


def test_tools_that_are_no_functions(server):
    """Left out, of the prompt as well, and named."""
    others = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "f"}}, {"type": "größer🙂"}]
    body: dict[str, Any] = dict(messages=USER, max_tokens=1, temperature=0)
    answers = []
    for tools in ([NOW], [*others, NOW], others):
        status, raw, headers = server.exchange("/v1/chat/completions", json.dumps(body | {"tools": tools}).encode())
        assert status == 200, raw
        answers.append((json.loads(raw)["usage"]["prompt_tokens"], headers.get("warning", "")))
    assert answers[0] == (answers[1][0], "") and answers[2][0] < answers[0][0]
    for _, warning in answers[1:]:
        assert "tools[0] of type 'web_search', tools[1] of type 'custom', tools[2] of type 'gr" in warning
    message, reason, _ = ask(server, True, tools=[*others, NOW], tool_choice="required", **ONE)
    assert called(message) == [('now "and here"', {})] and reason == "tool_calls"


def escaped(text: str) -> str:
    """A regular expression for this text."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


HERMES = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
WRITTEN = [  # what a model writes, and the arguments of its call; more are in tests/features/tool_calls
    ('{"city": NaN, "days": [Infinity, 1,],}', {"city": None, "days": [None, 1]}),
    ('{"city": {"name": "Oslo"}', {"city": {"name": "Oslo"}}),
]


@pytest.mark.parametrize("written, arguments", WRITTEN, ids=range(len(WRITTEN)))
def test_what_small_models_write(server, written, arguments):
    """One call, whole and streamed, that the next turn takes."""
    given: dict[str, Any] = dict(tools=TOOLS, **says(escaped(HERMES % written)))
    messages = [ask(server, stream, **given) for stream in (False, True)]
    for message, reason, _ in messages:
        assert called(message) == [("weather", arguments)] and reason == "tool_calls" and not message.get("content")
    assert len({call["function"]["arguments"] for message, *_ in messages for call in message["tool_calls"]}) == 1
    answer = {"role": "tool", "tool_call_id": messages[0][0]["tool_calls"][0]["id"], "content": "Rain."}
    assert ask(server, False, messages=[*USER, messages[0][0], answer], tools=TOOLS, max_tokens=2)[1] == "length"


def test_neutral_values(server):
    given = dict(tool_choice="auto", reasoning_effort="low", parallel_tool_calls=True, include_reasoning=False)
    for more in ({}, {"tools": []}, {"tools": None, "tool_choice": "none"}):
        message, _, usage = ask(server, False, max_tokens=3, **given | more)
        assert not message["tool_calls"] and message["reasoning"] is None and not usage["completion_tokens_details"]


VALUES = {  # schema, what Qwen3-Coder writes, the argument; more are in test_schema_types.py
    "a": ({"enum": ["123", "456"]}, "123", "123"),
    "b": ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}], "default": None}, "7", "7"),
    "c": ({"type": "integer"}, "1e3", 1000),
}


def test_a_value_has_the_type_that_its_schema_says(tmp_path):
    model = make_checkpoint(tmp_path, "llama", max_position_embeddings=4096)
    schema = takes(**{name: schema for name, (schema, *_) in VALUES.items()}) | {"$defs": {"text": {"type": "string"}}}
    write = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, (_, text, _) in VALUES.items())
    call = f"<function=set>\n{write}</function>"
    with serving(model, ServeOptions(tool_call_parser="qwen3_coder"), block_size=64, max_model_len=4096) as server:
        given: dict[str, Any] = dict(tools=[tool("set", schema)], max_tokens=900, **says(escaped(call)))
        for stream in (False, True):
            message, reason, _ = ask(server, stream, **given)
            assert called(message) == [("set", {name: value for name, (*_, value) in VALUES.items()})]
            assert reason == "tool_calls"
        for pattern, expected in (("(^x|y$)", 200), ("(?=x)", 400)):
            odd = tool("odd", takes(a={"type": "string", "pattern": pattern}), strict=True)
            body = {"messages": USER, "max_tokens": 1, "tools": [odd]}
            status, _, headers = server.exchange("/v1/chat/completions", json.dumps(body).encode())
            assert status == expected and ("'pattern' of 'odd', 'a'" in headers.get("warning", "")) == (status == 200)


MAPS = {  # schema, arguments that Qwen3-Coder's form writes without quotes
    "numbers": ({"additionalProperties": {"type": "integer"}}, {"a": 5, "b 2": -1}),
    "by their names": (
        {"patternProperties": {"^n_": {"type": ["integer", "null"]}, "^t_": {"type": "string"}}},
        {"n_1": 5, "t_1": "5", "n_2": None},
    ),
    "beside a name": ({"properties": {"n": {"type": "string"}}, "additionalProperties": CITY}, {"n": "7", "x": "Rome"}),
    "of lists": (
        {"additionalProperties": {"type": "array", "items": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "number"}}},
        {"a": [1, 2.5]},
    ),
}


@pytest.mark.parametrize("parser", ["qwen3_coder", *map(by_night, ("hermes", "llama3_json", "mistral"))])
def test_maps_of_values(tmp_path, parser):
    """The values have the types that their map says, in each format; strict or not; and what is no map is refused."""
    model = make_checkpoint(tmp_path, "llama", max_position_embeddings=4096)
    with serving(model, ServeOptions(tool_call_parser=parser), block_size=64, max_model_len=4096) as server:
        for schema, arguments in MAPS.values():
            jsonschema.validate(arguments, schema)
            given = dict(tools=[tool("set", schema)], max_tokens=900, **says(escaped(written(parser, arguments))))
            for stream in (False, True):
                message, reason, _ = ask(server, stream, **given)
                assert called(message) == [("set", arguments)] and reason == "tool_calls"
            body = {"messages": USER, "max_tokens": 1, "tools": [tool("set", schema, strict=True)]}
            status, _, headers = server.exchange(CHAT, json.dumps(body).encode())
            assert status == 200 and "warning" not in headers
        for odd, text in (
            ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, '["if", "then"]'),
            ({"additionalProperties": {"not": {"type": "integer"}}}, '["not"]'),
            ({"dependentRequired": {"a": ["b"]}}, '["dependentRequired"]'),
        ):
            body = {"messages": USER, "max_tokens": 1, "tools": [tool("set", takes(a=CITY) | odd, strict=True)]}
            status, raw = server.send(CHAT, json.dumps(body).encode())
            assert status == 400 and text in json.loads(raw)["error"]["message"], raw
            body["tools"] = [tool("set", takes(a=CITY) | odd)]
            assert server.send(CHAT, json.dumps(body).encode())[0] == 200, "who is not strict is held to nothing"


def written(parser: str, arguments: dict) -> str:
    """As a model writes it that does not know the types."""
    if parser == "qwen3_coder":
        values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
        shown = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"<tool_call>\n<function=set>\n{shown}</function>\n</tool_call>"
    frames = {
        "hermes": '<tool_call>\n{"name": "set", "arguments": %s}\n</tool_call>',
        "llama3_json": '{"name": "set", "parameters": %s}',
        "mistral": '[TOOL_CALLS][{"name": "set", "arguments": %s}]',
    }
    return frames[parser] % json.dumps(arguments)


# -- other templates ---------------------------------------------------------------------------------------------------

THINKS = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENS = CHAT_TEMPLATE + "{% if reasoning_effort != 'none' %}<think>\n{% endif %}"
SHOWS_TOOLS = "{% if tools %}[TOOL_CALLS] {{ tools | tojson }}{% endif %}{{ messages[-1].content }}"


@pytest.fixture
def template(server):
    tokenizer = server.llm.llm.get_tokenizer()
    before = tokenizer.chat_template
    yield lambda text: setattr(tokenizer, "chat_template", text)
    tokenizer.chat_template = before


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning(server, template, stream):
    template(THINKS)
    given = says("<think>One gull\\.</think>Two\\.")
    message, reason, usage = ask(server, stream, **given)
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == (
        "One gull.",
        "One gull.",
        "Two.",
    )
    details = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 10 < details < usage["completion_tokens"] and reason == "stop"
    message, _, hidden = ask(server, stream, include_reasoning=False, **given)
    assert message["content"] == "Two." and not message.get("reasoning")
    assert hidden["completion_tokens_details"] == usage["completion_tokens_details"]
    message, _, usage = ask(server, stream, chat_template_kwargs={"enable_thinking": False}, **given)
    assert message["content"] == "<think>One gull.</think>Two." and not usage["completion_tokens_details"]
    message, _, _ = ask(server, stream, reasoning_effort="none", **says("Two\\."))
    assert message["content"] == "Two." and not message.get("reasoning")
    message, _, _ = ask(server, stream, tools=TOOLS, **says("<think>Look\\.</think>" + TWICE))
    assert (message["reasoning"], message["content"], len(called(message))) == ("Look.", "Sure. ", 2)
    if not stream:  # tokens would spell the reasoning that is left out
        for shows in (True, False):
            extra = given["extra_body"] | {"include_reasoning": shows, "return_token_ids": True}
            body = dict(model="tiny", messages=USER, temperature=0, logprobs=True, max_tokens=400, extra_body=extra)
            [choice] = server.client().chat.completions.create(**body).choices
            assert shows == bool(choice.logprobs) == bool(choice.model_extra.get("token_ids"))


@pytest.mark.parametrize("stream", [False, by_night(True)])
def test_a_prompt_that_opens_the_reasoning(server, template, stream, monkeypatch):
    """A call is required, and it begins behind the reasoning, which this model ends with an "e"."""
    monkeypatch.setitem(TAGS, "qwen3", ("<think>", "e"))
    template(OPENS)
    bias = {str(server.llm.llm.get_tokenizer().convert_tokens_to_ids("e")): 2.0}
    given = dict(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=500)
    message, reason, usage = ask(server, stream, **given, logit_bias=bias, temperature=1.0, seed=2)
    [(name, arguments)] = called(message)
    assert (name, reason) == ("weather", "tool_calls") and arguments["city"] in CITY["enum"]
    assert message["reasoning"] and not message.get("content")
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"] - 50


def test_a_template_that_shows_tools_shows_them_itself(server, template):
    template(SHOWS_TOOLS)
    chat_prompt = server.llm.llm.chat_prompt
    assert chat_prompt(USER, tools=[NOW])["prompt"] == f"[TOOL_CALLS] [{json.dumps(NOW)}]two gulls"
    assert chat_prompt(USER)["prompt"] == "two gulls"
    message, reason, _ = ask(server, False, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert reason == "tool_calls" and len(message["tool_calls"][0]["id"]) == 9, "Mistral's form, and its ids"
    given = says('\\[TOOL_CALLS\\]now\\{"a": 1\\}')
    assert ask(server, True, tools=TOOLS, **given)[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_a_template_that_takes_no_tools_at_all(server, template):
    template("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x")
    with pytest.raises(openai.BadRequestError, match=r"a template that shows them would work.*no system"):
        ask(server, False, tools=TOOLS)


def test_a_message_that_the_template_leaves_out(server, template):
    template("{{ messages[-1].content }}")
    with pytest.raises(openai.BadRequestError, match=r"message 0 \(role system\).*put it into the first user message"):
        ask(server, False, messages=[{"role": "system", "content": "two"}, *USER])
    template("{% for part in messages[0].content if part.type == 'text' %}{{ part.text }}{% endfor %}")
    _, _, usage = ask(server, False, max_tokens=2)
    assert usage["prompt_tokens"] == len(server.llm.llm.get_tokenizer().encode("two gulls", add_special_tokens=False))


def test_tools_that_are_not_shown(server):
    body = dict(messages=USER, tools=TOOLS, tool_choice="none")
    shown, hidden = (
        translate(server.llm.llm, CHAT, body, (), parsers=Parsers(exclude_tools_when_none=excluded))[0][0]["prompt"]
        for excluded in (False, True)
    )
    assert "weather" in shown and "weather" not in hidden


def test_arguments_for_all_chats(server, template):
    """They yield to those of a request, and to its reasoning_effort."""
    template(THINKS)
    off = Parsers(template_kwargs={"enable_thinking": False, "word": "gull"})

    def prompt(**given) -> str:
        return translate(server.llm.llm, CHAT, dict(messages=USER) | given, (), parsers=off)[0][0]["prompt"]

    assert "<think>" in prompt() and "<think>" in prompt(chat_template_kwargs={"word": "crow"})
    assert "<think>" not in prompt(chat_template_kwargs={"enable_thinking": True})
    template("{{ word }} {{ reasoning_effort }} {{ enable_thinking }} {{ messages[0].content }}")
    assert prompt(reasoning_effort="low") == "gull low True two gulls"
    assert prompt(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}) == "gull low False two gulls"
    assert prompt(chat_template_kwargs={"word": "crow"}, reasoning_effort="none") == "crow none False two gulls"
    with pytest.raises(ValueError, match="chat_template_kwargs must be a dict, found 'x'"):
        prompt(chat_template_kwargs="x")


def test_flags():
    options = ServeOptions(tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    assert options.parsers == Parsers("mistral", "deepseek_r1")
    assert ServeOptions(reasoning_parser="").parsers.reasoning == ""
    kwargs = {"enable_thinking": False}
    assert ServeOptions(default_chat_template_kwargs=kwargs).parsers.template_kwargs == kwargs
    expect("--default-chat-template-kwargs must be a JSON object", ServeOptions, default_chat_template_kwargs=[1])
    expect("--tool-call-parser must be one of hermes", ServeOptions, tool_call_parser="glm45")
    expect("--reasoning-parser must be one of qwen3", ServeOptions, reasoning_parser="glm45")


def test_samples_and_logprobs_of_a_stream(server):
    """Each sample is read by itself, and no token's logprob is lost while a call is held back."""
    given = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1.0, seed=3)
    given |= dict(model="tiny", messages=USER, max_tokens=400, n=3, logprobs=True)
    create = server.client().chat.completions.create
    whole = create(**given)
    calls, num_tokens = dict.fromkeys(range(3), ""), 0
    for chunk in create(**given, stream=True):
        [choice] = chunk.choices
        num_tokens += len(choice.logprobs.content) if choice.logprobs else 0
        for call in choice.delta.tool_calls or ():
            calls[choice.index] += (call.function.name or "") + call.function.arguments
    assert num_tokens == whole.usage.completion_tokens
    functions = [choice.message.tool_calls[0].function for choice in whole.choices]
    assert list(calls.values()) == [function.name + function.arguments for function in functions]
    assert len(set(calls.values())) > 1
