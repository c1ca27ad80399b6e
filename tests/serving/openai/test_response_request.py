"""A body of the responses API as one of a chat: items as messages, fields under the chat's names."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.serving.openai.json_lines import to_json
from nanovllm.serving.openai.responses.items import add_items, read_input
from nanovllm.serving.openai.responses.responses_request import READ_HERE, Kept, translate

WEATHER = {"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True}
TIME = {"type": "function", "name": "time"}
EARLIER = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "earlier"}]
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "an answer", "annotations": [], "logprobs": []}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def call(number: int, name: str = "weather") -> dict:
    return {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": name, "arguments": "{}"}


def result(number: int, output: object = "sun") -> dict:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


def of_chat(*numbers: int) -> dict:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "weather", "arguments": "{}"}} for n in numbers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def tool(number: int) -> dict:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": "sun"}


USER = {"role": "user", "content": "hi"}
MESSAGES = {
    "a text": ("hi", [USER]),
    "without a type": ([USER], [USER]),
    "parts": ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [USER]),
    "two parts": (
        [{"role": "developer", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
        [{"role": "developer", "content": "a\nb"}],
    ),
    "an answer is replayed": ([USER, ANSWER, USER], [USER, {"role": "assistant", "content": "an answer"}, USER]),
    "an answer without content": (
        [{"type": "message", "role": "assistant", "content": []}, USER],
        [{"role": "assistant", "content": ""}, USER],
    ),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [{"role": "assistant", "content": "no"}],
    ),
    "a thought and its answer are one message": (
        [USER, THOUGHT, ANSWER],
        [USER, {"role": "assistant", "reasoning": "hm", "content": "an answer"}],
    ),
    "a thought after an answer is another's": (
        [ANSWER, THOUGHT, ANSWER],
        [
            {"role": "assistant", "content": "an answer"},
            {"role": "assistant", "reasoning": "hm", "content": "an answer"},
        ],
    ),
    "a thought without a text is nothing": ([USER, {"type": "reasoning", "summary": []}, USER], [USER, USER]),
    "a summary stands for its thought": (
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, call(1)],
        [of_chat(1) | {"reasoning": "hm"}],
    ),
    "parallel calls are one message": ([call(1), call(2), result(1), result(2)], [of_chat(1, 2), tool(1), tool(2)]),
    "calls one after another": ([call(1), result(1), call(2)], [of_chat(1), tool(1), of_chat(2)]),
    "a text and its call": ([ANSWER, call(1)], [of_chat(1) | {"content": "an answer"}]),
    "a call and its text": ([call(1), ANSWER, result(1)], [of_chat(1) | {"content": "an answer"}, tool(1)]),
    "texts around a call": ([ANSWER, call(1), ANSWER], [of_chat(1) | {"content": "an answer" * 2}]),
    "a thought between calls": ([call(1), THOUGHT, call(2), result(1)], [of_chat(1, 2) | {"reasoning": "hm"}, tool(1)]),
    "an open text after a call": (
        [call(1), ANSWER | {"status": "incomplete"}],
        [of_chat(1), {"role": "assistant", "content": "an answer"}],
    ),
    "a result in parts": ([call(1), result(1, [{"type": "input_text", "text": "sun"}])], [of_chat(1), tool(1)]),
    "a reference": (
        [{"type": "item_reference", "id": "msg_1"}, USER],
        [{"role": "assistant", "content": "an answer"}, USER],
    ),
    "a reference without a type": ([{"id": "msg_1"}], [{"role": "assistant", "content": "an answer"}]),
}


def find(item_id: str) -> dict[str, dict]:
    return {"msg_1": ANSWER, "rs_1": THOUGHT} if item_id in ("msg_1", "rs_1") else {}


def conversation(response_id: str) -> list[dict]:
    if response_id != "resp_1":
        raise KeyError(response_id)
    return EARLIER


def translated(**body: object):
    return translate({"input": "hi"} | body, Kept(conversation, find))


@pytest.mark.parametrize("name", MESSAGES)
def test_items_as_messages(name):
    given, expected = MESSAGES[name]
    assert add_items([], read_input(given, find)) == expected


def test_references_cost_little():
    """An answer with many items is read once; an item stands in a conversation once."""
    asked = []

    def counted(item_id: str) -> dict[str, dict]:
        asked.append(item_id)
        return find(item_id)

    references = [{"type": "item_reference", "id": item_id} for item_id in ("rs_1", "msg_1")]
    assert read_input([*references, USER], counted) == [THOUGHT, ANSWER, USER] and asked == ["rs_1"]
    with pytest.raises(ValueError, match="input item 2: 'rs_1' is referred to twice"):
        read_input([*references, references[0]], counted)
    with pytest.raises(ValueError, match="input may have 4096 items, found 30000"):
        read_input(references * 15_000, counted)


def test_an_answer_of_many_items_is_joined_once():
    """10 MB in 4,000 items: to join them one by one would copy 20 GB."""
    said = {"type": "message", "role": "assistant", "content": "x" * 2500}
    items = [USER, call(1), *[said] * 4000, {"type": "reasoning", "content": [{"text": "why"}]}]
    [_, answer] = translated(input=items).messages
    assert answer["content"] == "x" * 10_000_000 and answer["reasoning"] == "why"


def test_a_conversation_goes_on():
    """What was kept is not changed: two answers may go on from it."""
    asked = translated(input=[call(1), result(1)], previous_response_id="resp_1", instructions="be brief")
    assert asked.messages == [EARLIER[0], of_chat(1) | {"content": "earlier"}, tool(1)]
    assert asked.chat["messages"] == [{"role": "system", "content": "be brief"}, *asked.messages]
    assert EARLIER[1] == {"role": "assistant", "content": "earlier"}
    with pytest.raises(KeyError):
        translated(previous_response_id="resp_2")


FIELDS = [
    ({}, {}),
    (
        {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.5, "user": "u", "top_k": 3},
        {"max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.5, "user": "u", "top_k": 3},
    ),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    ({"reasoning": None, "text": None, "include": None, "tools": None, "truncation": "auto", "store": False}, {}),
    ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"response_format": {"type": "text"}}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True, "description": None}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}},
    ),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
    ({"include": ["reasoning.encrypted_content"], "top_logprobs": 3}, {}),
    ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    (
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"stream": True, "stream_options": {"include_obfuscation": False, "include_usage": True}},
    ),
    (
        {"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "name": "time"}, "parallel_tool_calls": False},
        {
            "tools": [
                {"type": "function", "function": {name: value for name, value in WEATHER.items() if name != "type"}},
                {"type": "function", "function": {"name": "time"}},
            ],
            "tool_choice": {"type": "function", "function": {"name": "time"}},
            "parallel_tool_calls": False,
        },
    ),
    (
        {"tools": [WEATHER, TIME], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [TIME]}},
        {"tools": [{"type": "function", "function": {"name": "time"}}], "tool_choice": "required"},
    ),
    ({"tools": [], "tool_choice": "auto"}, {"tool_choice": "auto"}),
    (
        {"input": [USER, ANSWER | {"status": "incomplete"}]},
        {
            "messages": [USER, {"role": "assistant", "content": "an answer"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
]


@pytest.mark.parametrize("body, expected", FIELDS, ids=[",".join(body) or "nothing" for body, _ in FIELDS])
def test_fields_under_the_names_of_a_chat(body, expected):
    asked = translated(**body)
    assert asked.chat == {"messages": [USER]} | expected and not asked.unknown


def test_what_nobody_knows_is_named():
    asked = translated(nonsense=1, reasoning={"efort": "low"}, text={"x": 1}, include=["y"])
    assert asked.chat == {"messages": [USER]}
    assert [name.split(" (")[0] for name in asked.unknown] == [
        "'nonsense'",
        "reasoning: 'efort'",
        "text: 'x'",
        "include: 'y'",
    ]


OTHERS = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "custom_tool_call", "call_id": "call_1", "name": "apply", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
    {"type": "local_shell_call", "call_id": "call_2", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "call_2", "output": "a"},
    {"type": "computer_call", "call_id": "call_3", "action": {"type": "screenshot"}},
    {"type": "mcp_list_tools", "server_label": "s", "tools": []},
    {"type": "mcp_approval_request", "name": "f", "arguments": "{}", "server_label": "s"},
    {"type": "image_generation_call", "result": None},
    {"type": "tool_search_output", "tools": []},
]


def test_items_of_tools_that_are_not_here_are_left_out_and_named():
    """As agents send them back from another server's turns; what this server has stays, in its order."""
    mixed = [USER, *OTHERS[:4], call(1), *OTHERS[4:], result(1), USER]
    asked = translated(input=mixed)
    assert asked.messages == translated(input=[USER, call(1), result(1), USER]).messages and asked.items == [
        USER, call(1), result(1), USER]  # fmt: skip
    places = [*range(1, 5), *range(6, 12)]
    expected = [f"input[{place}] of type {mixed[place]['type']!r}" for place in places]
    assert asked.unknown == expected


INSIDE = {
    "input[0]: 'x'": {"input": [USER | {"x": 1}]},
    "input[0].content[0]: 'cache_control'": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": {}}]}]
    },
    "input[1]: 'namespace' (did you mean 'name'?)": {"input": [USER, call(1) | {"namespace": "n"}, result(1)]},
    "input[2]: 'is_error'": {"input": [USER, call(1), result(1) | {"is_error": False}]},
    "input[1]: 'signature'": {"input": [USER, THOUGHT | {"signature": "s"}, ANSWER]},
    "text.format: 'shema' (did you mean 'schema'?)": {"text": {"format": {"type": "json_object", "shema": {}}}},
    "text.format: 'schema'": {"text": {"format": {"type": "text", "schema": {}}}},
    "tools[1]: 'paramters' (did you mean 'parameters'?)": {"tools": [WEATHER, TIME | {"paramters": {}}]},
    "tool_choice: 'mode'": {"tools": [TIME], "tool_choice": {"type": "function", "name": "time", "mode": "auto"}},
    "stream_options: 'x'": {"stream": True, "stream_options": {"x": True}},
}


def without(field: str, value):
    if isinstance(value, list):
        return [without(field, item) for item in value]
    if isinstance(value, dict):
        return {name: without(field, inner) for name, inner in value.items() if name != field}
    return value


@pytest.mark.parametrize("name", INSIDE)
def test_an_unknown_field_inside_of_a_known_object_is_named(name):
    """And the rest is what it is without that field."""
    asked = translated(**INSIDE[name])
    assert asked.unknown == [name]
    plain = translated(**without(name.split("'")[1], INSIDE[name]))
    assert plain.unknown == [] and (asked.chat, asked.items) == (plain.chat, plain.items)


def test_instructions_and_pictures_of_other_messages():
    """Such a message stays beside them; the chat refuses its picture, as it does without instructions."""
    parts = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": "data:,"}]
    asked = translated(input=[{"role": "developer", "content": parts}, USER], instructions="be brief")
    first, second, _ = asked.chat["messages"]
    assert first == {"role": "system", "content": "be brief"} and second["content"][1]["type"] == "image_url"


def test_instructions_and_system_messages_are_one():
    """Templates that take a system message at the beginning only would refuse the second."""
    system = [{"role": role, "content": f"as {role}"} for role in ("system", "developer")]
    user = {"role": "user", "content": "hi"}
    asked = translated(input=[*system, user], instructions="be brief")
    assert asked.chat["messages"] == [{"role": "system", "content": "be brief\n\nas system\n\nas developer"}, user]
    assert asked.messages == [*system, user], "instructions are of one answer only"
    assert translated(input=[*system, user]).chat["messages"] == [*system, user]


REFUSED = [
    ({"input": []}, "input must be a text, or a list of items, not empty"),
    ({"input": None}, "input must be a text"),
    ({"input": [5]}, "input item 0 must be an object"),
    ({"input": [USER, {"role": "tool", "content": "x"}]}, "input item 1: role must be one of user, assistant"),
    ({"input": [{"role": "user"}]}, "input item 0: content must be a text or parts"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "an input_image needs an image_url"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "this engine reads no files"),
    ({"input": [{"type": "web_search_call"}]}, "all items of the input are of tools that this server"),
    ({"input": [{"type": "mesage", "role": "user", "content": "hi"}]}, "this server reads items of type message, func"),
    ({"input": [USER, {"type": "compaction", "encrypted_content": "x"}]}, "found type 'compaction'"),
    ({"input": [{"type": ["message"]}]}, "found type"),
    (
        {"input": [{"type": "item_reference", "id": "msg_2"}]},
        "no answer that is kept has the item 'msg_2'; send the item itself",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "x", "name": "f"}]},
        "input item 0: arguments must be a text, found None",
    ),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input item 0: call_id must be a text, found None"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "made by another server"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "reasoning must have a list of parts"),
    ({"messages": [USER]}, "messages is a field of chats; here it is input"),
    ({"max_tokens": 5}, "here it is max_output_tokens"),
    ({"response_format": {"type": "text"}}, "here it is text.format"),
    ({"max_output_tokens": 0}, "max_output_tokens must be a whole number from 1"),
    ({"prompt": {"id": "pmpt_1"}}, "body of a response takes 'prompt' only as None (found {'id'"),
    ({"conversation": "conv_1"}, "conversation: there are none here; previous_response_id goes on"),
    ({"truncation": "bogus"}, "takes 'truncation' only as 'auto' or 'disabled' (found 'bogus')"),
    ({"n": 2}, "takes 'n' only as 1 (found 2)"),
    ({"background": True, "store": False}, "background can only be used when `store` is true"),
    ({"store": 1}, "store must be true or false"),
    ({"instructions": [USER]}, "instructions must be a text"),
    ({"metadata": {"a": 1}}, "metadata must be an object whose values are texts"),
    ({"reasoning": "low"}, "reasoning must be an object"),
    ({"reasoning": {"effort": "lots"}}, "reasoning.effort must be one of none, minimal"),
    ({"text": {"format": {"type": "banana"}}}, "text.format must be an object of type text, json_object, json_schema"),
    ({"include": "x"}, "include must be a list of texts"),
    ({"top_logprobs": -1}, "top_logprobs must be a whole number from 0"),
    ({"tools": {}}, "tools must be a list"),
    ({"tools": [{"name": "f"}]}, "tools[0] must be an object with a type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "needs a string 'name' beside its type"),
    ({"tools": [TIME], "tool_choice": {"type": "mcp"}}, "tools that run on a server"),
    (
        {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "tools": [WEATHER]}},
        "allows 'weather', and tools has time",
    ),
    ({"tools": [TIME], "tool_choice": {"type": "allowed_tools", "tools": {}}}, "allowed_tools needs a list tools"),
]


@pytest.mark.parametrize("body, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refused(body, message):
    with pytest.raises(ValueError) as error:
        translated(**body)
    assert message in str(error.value)


WORDS = st.sampled_from(
    "type id role content text name arguments call_id output status summary function tools mode format schema effort "
    "message reasoning function_call function_call_output item_reference input_text output_text assistant user "
    "incomplete allowed_tools json_schema msg_1 auto".split()
)
PLAIN = st.none() | st.booleans() | st.integers() | WORDS
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4))


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(sorted(READ_HERE - {"previous_response_id"})), VALUES))
def test_whatever_comes_is_translated_or_refused(body):
    with suppress(ValueError):
        chat = json.loads(to_json(translated(**body).chat))
        assert isinstance(chat["messages"], list) and chat["messages"]
