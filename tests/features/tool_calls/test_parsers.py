"""Answers as larger models write them, read in each format: calls, what is left as content, and any way of cutting."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.features.tool_calls.parse import FORMATS, ToolCallStream, call_id, format_of, parse_tool_calls, parsed
from nanovllm.features.tool_calls.source import Event
from tests.errors import expect


def tool(name: str, **properties: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer"}, metric={"type": "boolean"}),
    tool("write", path={"type": "string"}, text={"type": "string"}, tags={"type": "array"}, size={"type": "number"}),
    tool("now"),
    tool(
        "find",
        code={"anyOf": [{"type": "string"}, {"type": "null"}]},
        also={"type": ["string", "null"]},
        x={"enum": [1]},
    ),
]
OSLO, ROME = ("weather", {"city": "Oslo"}), ("weather", {"city": "Rome", "days": 2})
NOW = ("now", {})
HERMES_OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES_ROME = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'
LLAMA_OSLO, LLAMA_NOW = '{"name": "weather", "parameters": {"city": "Oslo"}}', '{"name": "now", "parameters": {}}'
XML_OSLO = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"
XML_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CODE = 'def f(a):\n    return "<b>" if a else {}\n'

# format, text, content, calls
CASES = [
    ("hermes", "Two gulls.", "Two gulls.", []),
    ("hermes", "", "", []),
    ("hermes", " \n", " \n", []),
    ("hermes", HERMES_OSLO, None, [OSLO]),
    ("hermes", f"\n\n{HERMES_OSLO}\n{HERMES_ROME}\n", None, [OSLO, ROME]),
    ("hermes", f"I shall look. {HERMES_ROME}", "I shall look. ", [ROME]),
    ("hermes", f"{HERMES_ROME} Done.", " Done.", [ROME]),
    ("hermes", HERMES_OSLO.removesuffix("\n</tool_call>"), None, [OSLO]),
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', None, [OSLO]),
    ("hermes", r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}</tool_call>', None, [OSLO]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "Oslo"}</tool_call>', None, [("weather", "Oslo")]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', None, [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [NOW]),
    ("hermes", '<tool_call>{"id": 1, "name": "now", "arguments": {}, "type": "function"}</tool_call>', None, [NOW]),
    ("hermes", r'<tool_call>{"name": "f\"\u00e9}", "arguments": {"a": "}]\\\""}}', None, [('f"é}', {"a": '}]\\"'})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": [[1.5e3, null], "</tool_call>"]}}}</tool_call>', None,
     [("f", {"a": {"b": [[1500, None], "</tool_call>"]}})]),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]', None, [OSLO]),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}, "name": "now"},{"name": "now"}]\nso', "\nso", [NOW] * 2),
    ("mistral", 'Hello[TOOL_CALLS]weather{"city": "Oslo"}[TOOL_CALLS]now{}', "Hello", [OSLO, NOW]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Oslo"}', None, [NOW, OSLO]),
    ("mistral", "It is [TOOL", "It is [TOOL", []),
    ("llama3_json", LLAMA_OSLO, None, [OSLO]),
    ("llama3_json", f"<|python_tag|>{LLAMA_OSLO}; {LLAMA_NOW};\n{LLAMA_OSLO}", None, [OSLO, NOW, OSLO]),
    ("llama3_json", LLAMA_NOW.replace("parameters", "arguments"), None, [NOW]),
    ("llama3_json", f"Look: {LLAMA_NOW} {{so}}", "Look:  {so}", [NOW]),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', None, [NOW]),
    ("llama3_json", '{"city": "Oslo", "days": 2}', '{"city": "Oslo", "days": 2}', []),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),  # no function
    ("pythonic", '[weather(city="Oslo"), now()]', None, [OSLO, NOW]),
    ("pythonic", "[write(path='it\\'s)', tags=['a', {'b': None}], size=-1.5, text=\"\")]", None,
     [("write", {"path": "it's)", "tags": ["a", {"b": None}], "size": -1.5, "text": ""})]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", None, [NOW]),
    ("pythonic", " [now()] So.", "So.", [NOW]),
    ("pythonic", "See [1] and now().", "See [1] and now().", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("qwen3_coder", f"<tool_call>\n{XML_OSLO}\n</tool_call>\n{XML_NOW}", None, [OSLO, NOW]),
    ("qwen3_coder", f"Yes. {XML_OSLO}", "Yes. ", [OSLO]),
    ("qwen3_coder", XML_OSLO.replace("</parameter>", "<parameter=days>\n2\n</parameter>\n<parameter=metric>True"), None,
     [("weather", {"city": "Oslo", "days": 2, "metric": True})]),
    ("qwen3_coder", f"<function=write><parameter=text>\n{CODE}\n</parameter><parameter=tags>['a', 1]</parameter>"
     "<parameter=size>big</parameter><parameter=more>7</parameter></function>", None,
     [("write", {"text": CODE, "tags": ["a", 1], "size": "big", "more": "7"})]),
    ("qwen3_coder", "<function=find><parameter=code>0123</parameter><parameter=also>\nnull\n</parameter>"
     "<parameter=x>1</parameter></function>", None, [("find", {"code": "0123", "also": None, "x": 1})]),
    ("hermes", '<tool_call>{"why": ["x"], "name": "now", "arguments": {}, "so": 1}</tool_call>', None, [NOW]),
    ("json_list", '[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "now", "parameters": {}}]', None,
     [OSLO, NOW]),
]  # fmt: skip
BROKEN = [  # all of it is content
    ("hermes", "<tool_call>weather in Oslo</tool_call>"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 2000 + "}" * 2000 + "}</tool_call>"),
    ("mistral", "[TOOL_CALLS] none of them"),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {]}'),
    ("llama3_json", '{"name": "now", "parameters": {so it goes}'),
    ("llama3_json", '{"name": "now"}'),
    ("pythonic", "[weather(city=Oslo)]"),
    ("pythonic", "[weather('Oslo')]"),
    ("pythonic", "[weather(days=1e999)]"),
    ("pythonic", "[weather(city='Os"),
    ("pythonic", "[unknown()]"),
    ("qwen3_coder", "<tool_call>weather</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nOs"),
    ("qwen3_coder", "<function=weather>Oslo</function>"),
    ("json_list", '[{"name": "now", "argum'),
    ("json_list", '{"answer": 42}'),
]  # fmt: skip


@pytest.mark.parametrize("format_name, text, content, calls", CASES)
def test_answers(format_name, text, content, calls):
    found = parse_tool_calls(text, format_name, TOOLS)
    assert found.content == content
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == calls


@pytest.mark.parametrize("format_name, text", BROKEN)
def test_a_call_that_cannot_be_read_is_content(format_name, text):
    assert parse_tool_calls(text, format_name, TOOLS) == parsed([Event("text", text)])


def test_calls_before_a_broken_one_stay():
    broken = '<tool_call>{"name": "now", "arguments": [}</tool_call>'
    found = parse_tool_calls(f"{HERMES_OSLO}\n{broken}\n{HERMES_ROME}", tools=TOOLS)
    assert [call.name for call in found.tool_calls] == ["weather"] * 2 and broken in (found.content or "")
    found = parse_tool_calls("[now(), weather(1)]", "pythonic", TOOLS)
    assert (found.content, [call.name for call in found.tool_calls]) == (", weather(1)]", ["now"])


def merged(events: list[Event]) -> list[Event]:
    """Without the cuts."""
    whole: list[Event] = []
    for event in events:
        if whole and event.kind in ("text", "arguments") and whole[-1].kind == event.kind:
            event = Event(event.kind, whole.pop().text + event.text)
        whole.append(event)
    return whole


def streamed(format_name: str, pieces: list[str]) -> list[Event]:
    stream = ToolCallStream(format_name, TOOLS)
    return merged([event for piece in pieces for event in stream.feed(piece)] + stream.end())


PARTS = sorted(
    {part for _, text, *_ in [*CASES, *BROKEN] for part in (text, text[: len(text) // 2]) if len(text) < 999}
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*FORMATS, "json_list"]), st.lists(st.sampled_from(PARTS), min_size=1, max_size=3), st.data())
def test_no_cut_changes_what_is_read(format_name, parts, data):
    """Also of texts that are in another format, cut short, or stuck together."""
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = streamed(format_name, [text])
    assert streamed(format_name, pieces) == whole
    assert streamed(format_name, list(text)) == whole
    for call in parsed(whole).tool_calls:
        json.loads(call.arguments)


@pytest.mark.parametrize("format_name", ["hermes", "llama3_json", "qwen3_coder", "mistral"])
def test_arguments_go_out_as_they_come(format_name):
    """A long text does not wait for its end."""
    beginning = {
        "hermes": '<tool_call>{"name": "write", "arguments": {"text": "',
        "llama3_json": '{"name": "write", "parameters": {"text": "',
        "qwen3_coder": "<tool_call>\n<function=write>\n<parameter=text>\n",
        "mistral": '[TOOL_CALLS]write{"text": "',
    }[format_name]
    stream = ToolCallStream(format_name, TOOLS)
    assert next(event.kind for event in stream.feed(beginning)) == "begin"
    for word in ("two ", "gulls "):
        assert stream.feed(word) == [Event("arguments", word)]


@pytest.mark.parametrize(
    "format_name, text", [("qwen3_coder", "<function={}></function>"), ("mistral", "[TOOL_CALLS]{}{{}}")]
)
@pytest.mark.parametrize("num_chars, num_calls", [(1000, 1), (1001, 0)])
def test_a_name_has_a_bound(format_name, text, num_chars, num_calls):
    text = text.format("a" * num_chars)
    whole = streamed(format_name, [text])
    assert streamed(format_name, list(text)) == whole and len(parsed(whole).tool_calls) == num_calls


def test_names_and_ids():
    expect("the format of tool calls must be one of hermes", parse_tool_calls, "x", "hermse")
    assert format_of("{{ '<tool_call>' }} ... <function=example>") == "qwen3_coder"
    assert format_of("... <tool_call> ...") == format_of("nothing of tools") == "hermes"
    assert format_of("[TOOL_CALLS]") == "mistral" and format_of("<|python_tag|>") == "llama3_json"
    ids = {call_id(name) for name in ("hermes", "mistral") for _ in range(9)}
    assert len(ids) == 18 and {len(found) for found in ids} == {29, 9}


SAYS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
HERMES = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
WRITTEN = {
    HERMES: "hermes",
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}': "llama3_json",
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}": "mistral",
    "<tool_call><function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v }}\n</parameter>{% endfor %}</function></tool_call>": "qwen3_coder",
}


@pytest.mark.parametrize("way", WRITTEN)
def test_the_format_is_the_one_in_which_a_template_writes_a_call(way, caplog):
    caplog.set_level("INFO", "nanovllm")
    assert format_of(SAYS.replace("CALL", way)) == WRITTEN[way]
    assert f"in the format '{WRITTEN[way]}'" in caplog.text


def test_a_template_whose_calls_no_format_reads(caplog):
    """GLM's have Hermes' tag, functionary's have Qwen3-Coder's: neither is read by them."""
    for way in (
        "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>",
        "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>",
    ):
        caplog.clear()
        assert format_of(SAYS.replace("CALL", way)) == "hermes"
        assert "writes calls as no format here" in caplog.text and "get_time" in caplog.text
    assert format_of("this one says nothing") == "hermes"
    assert "says nothing of how calls are written" in caplog.text
