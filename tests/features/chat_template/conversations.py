"""Conversations of every kind that OpenAI's API has, for templates that other people made."""

import json
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Which?"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "The sum of two", "parameters": NUMBERS}}
TOOLS = {"tools": [WEATHER]}
BOTH = {"tools": [WEATHER, ADD]}
CITY: dict[str, Any] = {"city": "Zürich", "days": 2}


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any, name: str = "get_weather", call_id: str = "a1b2c3d4e") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, name: str = "get_weather", call_id: str = "a1b2c3d4e") -> dict[str, Any]:
    return says("tool", content, tool_call_id=call_id, name=name)


HERONS = says("user", "Where do herons nest?")
TREES = says("assistant", "In tall trees.")
GULLS = says("user", "And gulls?")
BIRDS = says("system", "You know all about birds.")
ASKED = says("user", "How is the weather in Zürich?")
AS_TEXT = json.dumps(CITY, ensure_ascii=False)
CALLED = says("assistant", "", tool_calls=[call(AS_TEXT)])
RAIN = result("Rain, 12 degrees")

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a question": ([HERONS], {}),
    "system": ([BIRDS, HERONS], {}),
    "two turns": ([HERONS, TREES, GULLS], {}),
    "three turns and system": (
        [BIRDS, HERONS, TREES, GULLS, says("assistant", "On cliffs."), says("user", "Why?")],
        {},
    ),
    "a part": ([says("user", parts("Where do herons nest?"))], {}),
    "two parts": ([says("user", parts("Where do herons nest?", "Answer in French."))], {}),
    "system in parts": ([says("system", parts("You know all about birds.")), HERONS], {}),
    "turns in parts": ([HERONS, says("assistant", parts("In trees.")), says("user", parts("And gulls?"))], {}),
    "developer": ([says("developer", "You know all about birds."), HERONS], {}),
    "tools": ([ASKED], TOOLS),
    "tools and system": ([BIRDS, ASKED], BOTH),
    "arguments as an object": ([ASKED, says("assistant", "", tool_calls=[call(CITY)]), RAIN], TOOLS),
    "arguments as text": ([ASKED, CALLED, RAIN], TOOLS),
    "a call and no content": ([ASKED, says("assistant", None, tool_calls=[call(CITY)]), RAIN], TOOLS),
    "a call and words": (
        [ASKED, says("assistant", "I look.", tool_calls=[call(AS_TEXT)]), RAIN, says("assistant", "It rains."), GULLS],
        TOOLS,
    ),
    "two calls": (
        [
            ASKED,
            says("assistant", "", tool_calls=[call(AS_TEXT), call('{"a": 1, "b": 2}', "add", "b1b2c3d4e")]),
            RAIN,
            result("3.14159", "add", "b1b2c3d4e"),
        ],
        BOTH,
    ),
    "a result in parts": ([ASKED, CALLED, result(parts("Rain, 12 degrees"))], TOOLS),
    "a result in JSON": ([ASKED, CALLED, result('{"sky": "rain", "t": [12, 13]}')], TOOLS),
    "calls without tools": ([ASKED, CALLED, RAIN], {}),
    "reasoning in a field": ([HERONS, says("assistant", "In trees.", reasoning_content="Large birds."), GULLS], {}),
    "reasoning in the text": (
        [HERONS, says("assistant", "<think>\nLarge birds.\n</think>\n\nIn tall trees."), GULLS],
        {},
    ),
    "an empty question": ([says("user", "")], {}),
    "an empty answer": ([HERONS, says("assistant", ""), GULLS], {}),
    "an empty system": ([says("system", ""), HERONS], {}),
    "continued": (
        [HERONS, says("assistant", "In tall")],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "continued thoughts": (
        [HERONS, says("assistant", "<think>\nLet me")],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "no generation prompt": ([HERONS, TREES], {"add_generation_prompt": False}),
    "white space and signs": ([says("user", "  Where\n\n\therons nest? 🐦‍⬛ <b>&amp;\n")], {}),
    "short words": ([says("system", "A"), says("user", "hi"), says("assistant", "ok"), says("user", "hi")], {}),
    "code": ([says("user", "d = {'type': 'text', \"x\": [1]}\nWhat is {{ d }}?")], {}),
    "a name": ([{**HERONS, "name": "Ada"}], {}),
}
