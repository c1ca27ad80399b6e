"""Answers as larger models write them, read in each format: calls, what is left as content, and any way of cutting."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.features.tool_calls import source
from nanovllm.features.tool_calls.parse import (
    FORMATS,
    Parsed,
    ToolCall,
    ToolCallStream,
    call_id,
    format_of,
    parse_tool_calls,
    parsed,
    schemas_of,
)
from nanovllm.features.tool_calls.source import Event
from tests.errors import expect
from tests.features.tool_calls.answers import (
    BROKEN,
    CASES,
    CUT,
    DAMAGED,
    DAMAGES,
    HERMES_OSLO,
    HERMES_ROME,
    PARTS,
    SIGNS,
    TOOLS,
    damaged,
)


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


def test_a_function_in_a_function_is_none():
    text = '{"function": ' * 2000
    for format_name, tag in (("llama3_json", ""), ("hermes", "<tool_call>")):
        assert parse_tool_calls(tag + text, format_name).tool_calls == []


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
    stream = ToolCallStream(format_name, schemas_of(TOOLS))
    return merged([event for piece in pieces for event in stream.feed(piece)] + stream.end())


def same(one: list[Event], other: list[Event]) -> bool:
    places = [[event.at for event in events if event.kind == "text"] for events in (one, other)]
    return one == other and places[0] == places[1]


any_text = given(
    st.sampled_from([*FORMATS, "json_list"]), st.lists(st.sampled_from(PARTS), min_size=1, max_size=3), DAMAGES
)


@settings(max_examples=80, deadline=None)
@any_text
def test_no_cut_changes_what_is_read(format_name, parts, damages):
    """Also of texts that are in another format, cut short, stuck together or damaged, in pieces of every size."""
    check_reading(format_name, damaged("".join(parts), damages))


@pytest.mark.nightly
@settings(max_examples=200, deadline=None)
@any_text
def test_no_cut_changes_what_is_read_at_length(format_name, parts, damages):
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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


any_value = given(VALUES, st.sampled_from([repr, ascii]))


@settings(max_examples=60, deadline=None)
@any_value
def test_what_python_writes_means_the_same(value, write):
    check_value(value, write)


@pytest.mark.nightly
@settings(max_examples=200, deadline=None)
@any_value
def test_what_python_writes_means_the_same_at_length(value, write):
    check_value(value, write)


def check_value(value: Any, write: Callable[[Any], str]) -> None:
    [call] = parse_tool_calls(f"[f(a={write(value)}, b=1)]", "pythonic").tool_calls
    assert json.loads(call.arguments) == {"a": value, "b": 1}


@pytest.mark.parametrize("format_name", ["hermes", "llama3_json", "qwen3_coder", "mistral", "pythonic"])
def test_arguments_go_out_as_they_come(format_name):
    """A long text does not wait for its end."""
    beginning = {
        "hermes": '<tool_call>{"name": "write", "arguments": {"text": "',
        "llama3_json": '{"name": "write", "parameters": {"text": "',
        "qwen3_coder": "<tool_call>\n<function=write>\n<parameter=text>\n",
        "mistral": '[TOOL_CALLS]write{"text": "',
        "pythonic": '[write(text="',
    }[format_name]
    stream = ToolCallStream(format_name, schemas_of(TOOLS))
    assert next(event.kind for event in stream.feed(beginning)) == "begin"
    for word in ("two ", "gulls "):
        assert stream.feed(word) == [Event("arguments", word)]


def test_white_space_is_looked_at_as_it_comes(monkeypatch):
    """Not again with each piece."""
    num_looked_at, spaces = [], source.SPACES

    def match(text: str, start: int) -> Any:
        found = spaces.match(text, start)
        num_looked_at.append(found.end() - start)
        return found

    monkeypatch.setattr(source, "SPACES", SimpleNamespace(match=match))
    text = f'<tool_call>{{"name": "now", "arguments": {{"a": "b"{" " * 1000}}}}}</tool_call>{" " * 1000}'
    assert parsed(streamed("hermes", list(text))).tool_calls == [ToolCall("now", '{"a": "b"}')]
    assert sum(num_looked_at) < 5000


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
CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
WRITTEN = {
    f"<tool_call>{CALL}</tool_call>": "hermes",
    f"<tool_calls>[{CALL}]</tool_calls>": "jamba",
    f"<TOOLCALL>[{CALL}]</TOOLCALL>": "nemotron_json",
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}': "llama3_json",
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}": "mistral",
    "<tool_call><function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v }}\n</parameter>{% endfor %}</function></tool_call>": "qwen3_coder",
    # After a turn's header, as vLLM's templates for ToolACE and Llama 3.2 write them, and after a special token.
    "<|start_header_id|>assistant<|end_header_id|>\n\n[{{ c.function.name }}({% for k in c.function.arguments %}"
    "{{ k }}={{ '%sr' | format(c.function.arguments[k]) }}{% endfor %})]<|eot_id|>": "pythonic",
    "assistant\n<|python_start|>[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
    "{{ v | tojson }}{% endfor %})]<|python_end|>": "llama4_pythonic",
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
    caplog.clear()
    assert format_of(SAYS.replace("CALL", f"<call>{CALL}</call>")) == "llama3_json"
    assert "writes them between tags, which no format here has: '<call>{" in caplog.text
    assert format_of("this one says nothing") == "hermes"
    assert "says nothing of how calls are written" in caplog.text
