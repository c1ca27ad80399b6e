"""Calls in Qwen3-Coder's form that fit their functions' schemas, as structural tags (features/grammar/tags.py).

A text stands in it as it is: so of a text's schema enum and const hold, and pattern or a length does not.
"""

from typing import Any

from nanovllm.features.grammar.schemas import checked_schema, close
from nanovllm.features.tool_calls.qwen3_coder import properties_of, types_of

DEFINITIONS = ("$defs", "definitions")


def xml_tags(schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """schemas: name -> schema. With the outer tags, which some answers leave out, and without."""
    calls = [(name, _parameters(schema)) for name, schema in schemas.items()]
    frames = (("<tool_call>\n", "\n</tool_call>"), ("", ""))
    return [
        {"type": "tag", "begin": f"{before}<function={name}>\n", "content": content, "end": f"</function>{behind}"}
        for before, behind in frames
        for name, content in calls
    ]


def _parameters(given: Any) -> dict[str, Any]:
    """In the schema's order, those that are not required perhaps. Any, where it names none."""
    if given and "properties" not in given:
        return {"type": "any_text"}
    schema = checked_schema(given or {"type": "object"})
    close(schema)
    shared = {name: schema[name] for name in DEFINITIONS if name in schema}
    elements: list[dict[str, Any]] = [{"type": "const_string", "value": ""}]
    required = schema.get("required")
    for name, value in properties_of(schema).items():
        tag = {"type": "tag", "begin": f"<parameter={name}>\n", **_value(value, shared)}
        is_required = isinstance(required, list) and name in required
        elements.append(
            {"type": "tags_with_separator", "tags": [tag], "at_least_one": is_required, "stop_after_first": True}
        )
    return {"type": "sequence", "elements": elements}


def _value(schema: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Content and end of a parameter."""
    end = "\n</parameter>\n"
    schema = schema if isinstance(schema, dict) else {}
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        options = [{"type": "const_string", "value": word} for word in words]
        return {"content": {"type": "or", "elements": options}, "end": end}
    if types_of(schema) <= {"string", "null"}:
        return {"content": {"type": "any_text"}, "end": end}
    return {"content": {"type": "json_schema", "json_schema": schema | shared}, "end": end}
