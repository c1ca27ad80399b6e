"""What a schema says of a value's type, in the many ways in which people and programs say it."""

import json

import pytest

from nanovllm.features.grammar import parts
from nanovllm.features.tool_calls import schema_types
from nanovllm.features.tool_calls.parse import parse_tool_calls
from nanovllm.features.tool_calls.schema_types import in_standard_words, member_of, names_of, typed, types_of

DEFINITIONS = {
    "Text": {"type": "string"},
    "Count": {"allOf": [{"type": "integer"}]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"properties": {"left": {"$ref": "#/$defs/Tree"}, "size": {"type": "integer"}}},
}
TEXT, NULL = {"type": "string"}, {"type": "null"}
INTEGER = {"type": "integer"}


MANY_TEXTS = dict.fromkeys(map(str, range(200)), "a")  # more places than are looked up


@pytest.mark.parametrize(
    "schema, text, value",
    [
        ({"enum": ["123", "456"]}, "123", "123"),
        ({"const": "123"}, "123", "123"),
        ({"$ref": "#/$defs/Text"}, "123", "123"),
        ({"allOf": [{"$ref": "#/$defs/Text"}, {"maxLength": 5}]}, "123", "123"),
        ({"anyOf": [TEXT, NULL]}, "123", "123"),
        ({"anyOf": [{"$ref": "#/$defs/Text"}, NULL], "default": None}, "null", None),
        ({"type": ["string", "null"]}, "[1]", "[1]"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "str"}, "123", "123"),
        ({"type": "STRING"}, "true", "true"),
        ({"type": "date"}, "2026", "2026"),
        ({"pattern": "^[0-9]+$"}, "123", "123"),
        ({}, "123", "123"),
        ({"description": "a number, they say"}, "123", "123"),
        (INTEGER, "140.0", 140),
        (INTEGER, "1e3", 1000),
        (INTEGER, "3.5", 3.5),  # the caller's own check says what is wrong with it
        (INTEGER, "many", "many"),
        ({"type": "number"}, "140.0", 140.0),
        ({"type": "number"}, "NaN", None),  # JSON has none, and null in its place
        ({"type": "number"}, "-Infinity", None),
        ({"type": "number"}, "1e999", None),
        ({"type": "int"}, "7", 7),
        ({"minimum": 0}, "7", 7),
        ({"$ref": "#/$defs/Count"}, "7.0", 7),
        ({"anyOf": [INTEGER, NULL]}, "None", None),
        ({"anyOf": [INTEGER, TEXT]}, "12", 12),
        ({"anyOf": [INTEGER, TEXT]}, "1.5", "1.5"),
        *(({"anyOf": [INTEGER, TEXT]}, text, text) for text in ("01234", "+49151", "1_000", "\uff11", "1.0", '"a"')),
        *(({"anyOf": [TEXT, NULL]}, text, text) for text in ("none", "undefined", "NaN", "-inf", "1e999")),
        ({"anyOf": [TEXT, NULL]}, "None", None),  # as Qwen's own templates write it
        ({"type": ["string", "boolean"]}, "False", False),
        ({"type": ["string", "number"]}, "1e3", 1000.0),
        *(({"type": ["string", "object"]}, text, text) for text in ("{ user { name, age } }", "{name}", "{'a': 1}")),
        *(({"type": ["string", "array"]}, text, text) for text in ("(see the notes)", "[TODO]", "[" * 9**5, "[1e999]")),
        ({"type": ["string", "array"]}, "[1, null]", [1, None]),
        ({"oneOf": [{"const": 1}, {"const": "2"}]}, "2", "2"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["a", 1, None]}, "null", None),
        ({"type": "boolean"}, "True", True),
        ({"properties": {"a": INTEGER}}, '{"a": 2.0}', {"a": 2}),
        ({"items": INTEGER}, "['a', 1.0]", ["a", 1]),
        ({"prefixItems": [INTEGER], "items": {"type": "number"}}, "[1.0, 2.0, 3.0]", [1, 2.0, 3.0]),
        ({"anyOf": [{"items": INTEGER}] * 300}, str([1.0] * 10000), [1] * 10000),
        ({"properties": {"n": INTEGER}}, json.dumps(MANY_TEXTS | {"n": 2.0}), MANY_TEXTS | {"n": 2}),
        ({"$ref": "#/$defs/Tree"}, '{"left": {"left": {"size": 1.0}}}', {"left": {"left": {"size": 1}}}),
        ({"allOf": [{"properties": {"a": TEXT}}, {"properties": {"b": INTEGER}}]}, '{"b": 2.0}', {"b": 2}),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"$ref": "https://example.com/schema"}, "5", "5"),
    ],
)
def test_a_text_has_the_type_that_its_schema_says(schema, text, value):
    found = typed(text, in_standard_words(schema), {"$defs": DEFINITIONS})
    assert found == value and repr(found) == repr(value), "2 is not 2.0, also inside a list"


def test_what_is_said_of_a_member():
    assert types_of({"allOf": [{"type": ["integer", "null"]}, {"type": "number"}]}) == {"integer"}
    assert (
        types_of({"anyOf": [TEXT, NULL]}) == {"string", "null"} and types_of({}) == types_of({"type": "date"}) == set()
    )
    parent = {"properties": {"id": INTEGER}, "patternProperties": {"^n_": INTEGER, "^b_": {"type": "boolean"}}}
    child = {"$defs": {"parent": parent}, "allOf": [{"$ref": "#/$defs/parent"}], "properties": {"name": TEXT}}
    assert names_of(child) == ["id", "name"]
    either = {"anyOf": [{"properties": {"x": INTEGER}}, {"additionalProperties": NULL}]}
    for schema, types in (
        (child, {"id": {"integer"}, "name": {"string"}, "n_1": {"integer"}, "b_1": {"boolean"}, "other": set()}),
        ({"additionalProperties": INTEGER}, {"any": {"integer"}}),
        ({"additionalProperties": False}, {"any": set()}),
        (parent | {"additionalProperties": NULL}, {"id": {"integer"}, "n_1": {"integer"}, "a n_": {"null"}}),
        (either, {"x": {"integer", "null"}, "y": {"null"}}),
        ({"patternProperties": {"(": INTEGER}}, {"(": set()}),
        ({"patternProperties": {"{" + "1" * 200_000: INTEGER}}, {"a": {"integer"}}),  # too long to be looked at
        ({"patternProperties": {"(a+)+$": INTEGER}}, {"a" * 400 + "b": set(), "a": {"integer"}}),
    ):
        assert {name: types_of(member_of(schema, name), schema) for name in types} == types
    for odd in (5, None, [], {"type": 5}, {"anyOf": 5}, {"$ref": 5}, {"properties": 5}, {"required": [[]]}):
        assert (
            names_of(odd) == [] and member_of(odd, "a") == {} and typed('{"a": [1]}', odd) in ('{"a": [1]}', {"a": [1]})
        )


def test_a_schema_is_looked_through_once(monkeypatch):
    """Its anchors, for all references; what it says of a parameter, for all values."""
    asked = {"containers": [], "alternatives": []}
    for module, name in ((parts, "containers"), (schema_types, "alternatives")):
        function, calls = getattr(module, name), asked[name]
        monkeypatch.setattr(module, name, lambda *args, f=function, calls=calls: calls.append(args) or f(*args))
    schema = {"properties": {"a": {"anyOf": [{"$ref": "#x"}] * 50}}, "$defs": {"x": INTEGER | {"$anchor": "x"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    assert parse_tool_calls(call * 5, "qwen3_coder", tools).tool_calls == [("f", '{"a": 1}')] * 5
    assert len(asked["containers"]) == 1 and len(asked["alternatives"]) == 2


def test_a_schema_that_refers_to_itself_many_times_comes_to_an_end():
    """Its paths are 20^300, and without an end."""
    definitions = {f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{i + 1}"}] * 20} for i in range(300)}
    definitions |= {"B": {"anyOf": [{"$ref": "#/$defs/B"}] * 20}}
    for name in ("A0", "B"):
        assert typed("5", {"$ref": f"#/$defs/{name}"}, {"$defs": definitions}) == "5"
