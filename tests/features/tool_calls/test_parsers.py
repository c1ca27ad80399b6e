"""Answers as larger models write them, read in each format: calls, what is left as content, and any way of cutting."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.features.tool_calls.parse import (
    FORMATS,
    Parsed,
    ToolCall,
    ToolCallStream,
    call_id,
    format_of,
    parse_tool_calls,
    parsed,
)
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
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "argum'),
    ("mistral", "[TOOL_CALLS] none of them"),
    ("llama3_json", '{"name": "now"}'),
    ("pythonic", "[weather('Oslo')]"),
    ("pythonic", "[unknown()]"),
    ("pythonic", "[weather(ci"),
    ("qwen3_coder", "<tool_call>weather</tool_call>"),
    ("qwen3_coder", "<function=weather>Oslo</function>"),
    ("json_list", '[{"name": "now", "argum'),
    ("json_list", '{"answer": 42}'),
]  # fmt: skip


def hermes(arguments: str, name: str = "write", end: str = "}</tool_call>") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}{end}'


def xml(name: str = "write", **parameters: str) -> str:
    shown = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in parameters.items())
    return f"<tool_call>\n<function={name}>\n{shown}</function>\n</tool_call>"


# As small models write: format, text, content, calls.
DAMAGED = [
    ("hermes", hermes('{"text": "a\n\tb\x01"}'), None, [("write", {"text": "a\n\tb\x01"})]),
    ("mistral", '[TOOL_CALLS]write{"text": "a\nb"}', None, [("write", {"text": "a\nb"})]),
    ("llama3_json", '{"name": "write", "parameters": {"text": "a\nb"}}', None, [("write", {"text": "a\nb"})]),
    ("pythonic", '[write(text="a\nb"), now()]', None, [("write", {"text": "a\nb"}), NOW]),
    ("hermes", hermes('{"a": NaN, "b": [Infinity, -Infinity, 1e999, -0.5e1], "c": nan}'), None,
     [("write", {"a": None, "b": [None, None, None, -5], "c": None})]),
    ("hermes", hermes('{"a": 1, "b": [1, 2, ], }'), None, [("write", {"a": 1, "b": [1, 2]})]),
    ("hermes", hermes("{'a': 'it\\'s', 'b': 'say \"so\"', 'c': True, 'd': None}"), None,
     [("write", {"a": "it's", "b": 'say "so"', "c": True, "d": None})]),
    ("hermes", hermes(r'{"a": "\d+\.\s", "b": "\n\u00e9\/", "c": "\u12"}'), None,
     [("write", {"a": r"\d+\.\s", "b": "\né/", "c": "\\u12"})]),
    ("hermes", hermes(r'{"a": "\ud83d", "b": "\ud83d\ude00", "c": "\ude00x", "d": "\ud83d\n"}'), None,
     [("write", {"a": "\ufffd", "b": "\U0001f600", "c": "\ufffdx", "d": "\ufffd\n"})]),
    ("hermes", hermes('{"a": "say "so" to him", "b": 1}'), None, [("write", {"a": 'say "so" to him', "b": 1})]),
    ("hermes", hermes('{city: Oslo, "days": +2, "more": 007}', "weather"), None,
     [("weather", {"city": "Oslo", "days": 2, "more": 7})]),
    ("hermes", hermes('{"a": {"b": 1}}', end="}}}\n</tool_call>"), None, [("write", {"a": {"b": 1}})]),
    ("hermes", hermes('{"a": {"b": 1}}', end="</tool_call> So."), " So.", [("write", {"a": {"b": 1}})]),
    ("hermes", hermes('{"a": {"b": [1, 2', end="</tool_call>\n") + HERMES_OSLO, None,
     [("write", {"a": {"b": [1, 2]}}), OSLO]),
    ("hermes", hermes('{"a": 1}', end="} so </tool_call> it is"), "so  it is", [("write", {"a": 1})]),
    ("hermes", hermes('{"a": 1}', end="}</tool_c"), None, [("write", {"a": 1})]),
    ("hermes", hermes('{"a": 1}', end="} so</tool_c"), "so", [("write", {"a": 1})]),
    ("hermes", hermes('{"a": 1]}'), None, [("write", {"a": 1})]),
    ("hermes", hermes('{"a": [1}'), None, [("write", {"a": [1]})]),
    ("hermes", hermes("[" * 999 + "]" * 999).replace('"arguments": ', '"arguments": {"a": '), None, None),
    ("llama3_json", LLAMA_OSLO + "}" + LLAMA_NOW, None, [OSLO, NOW]),
    ("llama3_json", LLAMA_OSLO[:-1] + " So.", "So.", [OSLO]),
    ("pythonic", "[f(a=true, b=[false, null]), g(c=1)]", None,
     [("f", {"a": True, "b": [False, None]}), ("g", {"c": 1})]),
    ("pythonic", "[now()]\n[weather(city='Oslo')]", None, [NOW, OSLO]),
    ("pythonic", "[write(tags=(1, 'a', ()), text=\"\"\"a \"b\"\nc\"\"\"), now()", None,
     [("write", {"tags": [1, "a", []], "text": 'a "b"\nc'}), NOW]),
    ("pythonic", "[now()\nweather(city='Oslo')]", None, [NOW, OSLO]),
    ("hermes", '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call> So.', " So.", [NOW, NOW]),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>\n' + HERMES_OSLO, None, [NOW, NOW, OSLO]),
    ("hermes", '<tool_call>{"name": "now"}\n{so}</tool_call>', "{so}", [NOW]),
    ("mistral", '[TOOL_CALLS][{"name": "now"}\n{"name": "now"}]', None, [NOW, NOW]),
    ("pythonic", "[weather(city='Oslo', 5, days=2)]", None, [("weather", {"city": "Oslo", "days": 2})]),
    ("qwen3_coder", xml(path='a "b"\t\\d\n', size="140.0", tags="['a', True,]"), None,
     [("write", {"path": 'a "b"\t\\d\n', "size": 140, "tags": ["a", True]})]),
    ("qwen3_coder", xml(text="a").replace("</parameter>", "</parameter> so"), None, [("write", {"text": "a"})]),
    ("qwen3_coder", xml(text="a").replace("</function>", "</functon>") + " So.", " So.", [("write", {"text": "a"})]),
    ("qwen3_coder", xml("now").replace("</tool_call>", "</tool_c"), None, [NOW]),
    ("qwen3_coder", xml(text="a").replace("</tool_call>", "so</tool_call>"), "so", [("write", {"text": "a"})]),
    ("qwen3_coder", f"<function=now>\n<parameter=\n>{XML_OSLO}", None, [NOW, OSLO]),
]  # fmt: skip
CUT = [  # the answer ends within the call: format, text, content, arguments
    ("hermes", hermes('{"a": "b', end=""), None, '{"a": "b'),
    ("hermes", "So. " + hermes('{"a": 1', end=""), "So. ", '{"a": '),
    ("hermes", hermes('{"a": "\\u00', end=""), None, '{"a": "'),
    ("qwen3_coder", "<function=write>\n<parameter=text>\na\n</para", None, '{"text": "a'),
    ("qwen3_coder", "<function=write>\n<parameter=text>\na\n</parameter>\n", None, '{"text": "a"'),
    ("qwen3_coder", "<function=write>\n<parameter=text>\na\n</parameter>\n</func", None, '{"text": "a"'),
    ("qwen3_coder", "<function=write>\n<parameter=size>\n12", None, '{"size": '),
    ("qwen3_coder", "<tool_call>\n<function=write>\n", None, ""),
    ("pythonic", "[write(text='a', tags=[1, ", None, '{"text": "a", "tags": [1'),
    ("mistral", '[TOOL_CALLS]write{"a', None, "{"),
]  # fmt: skip


@pytest.mark.parametrize("format_name, text, content, calls", CASES)
def test_answers(format_name, text, content, calls):
    found = parse_tool_calls(text, format_name, TOOLS)
    assert found.content == content
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == calls


@pytest.mark.parametrize("format_name, text", BROKEN)
def test_a_call_that_cannot_be_read_is_content(format_name, text):
    assert parse_tool_calls(text, format_name, TOOLS) == parsed([Event("text", text)])


@pytest.mark.parametrize("format_name, text, content, calls", DAMAGED)
def test_a_damaged_call(format_name, text, content, calls):
    """One meaning for each thing that small models do; the arguments are JSON."""
    tools = [] if "f(a" in text else TOOLS
    found = parse_tool_calls(text, format_name, tools)
    assert found.content == content
    read = [(call.name, json.loads(call.arguments, parse_constant=pytest.fail)) for call in found.tool_calls]
    assert read == calls or (calls is None and len(read) == 1)


@pytest.mark.parametrize("format_name, text, content, arguments", CUT)
def test_an_answer_that_ends_in_a_call(format_name, text, content, arguments):
    found = parse_tool_calls(text, format_name, TOOLS)
    assert found == Parsed(content, [ToolCall("write", arguments)])
    assert streamed(format_name, [text])[-1] == Event("cut")


def test_calls_before_a_broken_one_stay():
    broken = '<tool_call>{"name": 7}</tool_call>'
    found = parse_tool_calls(f"{HERMES_OSLO}\n{broken}\n{HERMES_ROME}", tools=TOOLS)
    assert [call.name for call in found.tool_calls] == ["weather"] * 2 and broken in (found.content or "")
    found = parse_tool_calls("[now(), weather(1)]", "pythonic", TOOLS)
    assert (found.content, [call.name for call in found.tool_calls]) == (", weather(1)]", ["now"])


def merged(events: list[Event]) -> list[Event]:
    """Without the cuts."""
    whole: list[Event] = []
    for event in events:
        if whole and event.kind in ("text", "arguments") and whole[-1].kind == event.kind:
            event = Event(event.kind, whole[-1].text + event.text, whole.pop().at)
        whole.append(event)
    return whole


def streamed(format_name: str, pieces: list[str]) -> list[Event]:
    stream = ToolCallStream(format_name, TOOLS)
    return merged([event for piece in pieces for event in stream.feed(piece)] + stream.end())


def same(one: list[Event], other: list[Event]) -> bool:
    places = [[event.at for event in events if event.kind == "text"] for events in (one, other)]
    return one == other and places[0] == places[1]


PARTS = sorted(
    {
        part
        for _, text, *_ in [*CASES, *BROKEN, *DAMAGED, *CUT]
        for part in (text, text[: len(text) // 2])
        if len(text) < 999
    }
)
# What a damage puts in: signs that mean something in one of the formats.
SIGNS = ["", *"{}[]()\"'\\,:;=<>\n\t 0", "\\u", "\\ud83d", "NaN", "</", "<parameter=", "</function>", "</tool_call>"]
DAMAGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.sampled_from(SIGNS)), max_size=4)


def damaged(text: str, damages: list[tuple[int, int, str]]) -> str:
    for place, num_lost, sign in damages:
        place %= len(text) + 1
        text = text[:place] + sign + text[place + num_lost :]
    return text


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*FORMATS, "json_list"]), st.lists(st.sampled_from(PARTS), min_size=1, max_size=3), DAMAGES)
def test_no_cut_changes_what_is_read(format_name, parts, damages):
    """Also of texts that are in another format, cut short, stuck together or damaged, in pieces of every size."""
    check_reading(format_name, damaged("".join(parts), damages))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([*FORMATS, "json_list"]), st.lists(st.sampled_from([*SIGNS, "a", "<tool_call>", "[TOOL_CALLS]",
       "<|python_tag|>", "<function=f>", '{"name": "f", "arguments": ', "[f(a="]), max_size=40))  # fmt: skip
def test_no_cut_changes_what_is_read_of_noise(format_name, parts):
    check_reading(format_name, "".join(parts))


def check_reading(format_name: str, text: str) -> None:
    whole = streamed(format_name, [text])
    for size in (1, 2, 3, 5, 8, 13, 34):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert same(streamed(format_name, pieces), whole), size
    kinds = [event.kind for event in whole if event.kind not in ("text", "arguments")]
    assert kinds.count("cut") <= 1 and "cut" not in kinds[:-1]
    assert kinds[::2] == ["begin"] * -(-len(kinds) // 2) and len(kinds) % 2 == 0
    calls = parsed(whole).tool_calls
    for call, end in zip(calls, kinds[1::2], strict=True):
        json.dumps(call).encode()  # no half of a character
        call.arguments.encode()
        if end == "end":
            json.loads(call.arguments, parse_constant=pytest.fail)
    for event in whole:
        if event.kind == "text":
            assert text[event.at :].startswith(event.text[:1])


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
