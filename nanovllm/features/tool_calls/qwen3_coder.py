"""Qwen3-Coder's and Qwen3.5's calls: <function=f><parameter=x>a value</parameter></function> in <tool_call> tags."""

import json
import re
from ast import literal_eval
from typing import Any

from nanovllm.features.tool_calls.source import Event, Malformed, Reading, Source

NAME = re.compile(r"[^<>\n]+")
ENDS = ("</parameter>", "</function>", "<parameter=")  # a tag may have been forgotten
SAYS_TYPE = {"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"}


def qwen3_coder(source: Source) -> Reading[None]:
    """The outer tags may be missing. A value is text unless the function's schema says otherwise."""
    while (yield from source.until("<tool_call>", "<function=")):
        yield from source.call(_call(source))


def _call(source: Source) -> Reading[None]:
    yield from source.skip("<tool_call>")
    yield from source.skip_spaces()
    yield from source.expect("<function=")
    name = yield from _name(source)
    yield source.begin(name)
    properties = properties_of(source.functions.get(name))
    begins = "{"
    yield from source.skip_spaces()
    while (yield from source.skip("<parameter=")):
        name = yield from _name(source)
        yield Event("arguments", f"{begins}{json.dumps(name, ensure_ascii=False)}: ")
        yield from _value(source, properties.get(name))
        begins = ", "
        yield from source.skip_spaces()
    if not (yield from source.skip("</function>")) and not source.ended:
        raise Malformed
    yield Event("arguments", "}" if begins == ", " else "{}")
    yield from source.skip_spaces()
    yield from source.skip("</tool_call>")


def _name(source: Source) -> Reading[str]:
    if (found := (yield from source.match(NAME))) is None:
        raise Malformed
    name = source.take(found.end())
    yield from source.expect(">")
    return name.strip()


def _value(source: Source, schema: Any) -> Reading[None]:
    """A value as JSON. A text's goes out as it comes: it may be a file of many pages."""
    yield from source.skip("\n")
    pieces, types = source.until(*(f"\n{end}" for end in ENDS), *ENDS), types_of(schema)
    is_text = types == {"string"}
    if is_text:
        yield Event("arguments", '"')
    text, marker = "", ""
    while not marker:
        try:
            event = next(pieces)
        except StopIteration as end:
            if not (marker := end.value):
                raise Malformed from None
            break
        if event is None:
            yield None
        elif is_text:
            yield Event("arguments", json.dumps(event.text, ensure_ascii=False)[1:-1])
        else:
            text += event.text
    yield Event("arguments", '"' if is_text else json.dumps(_converted(text, types), ensure_ascii=False))
    yield from source.skip("\n")
    yield from source.skip("</parameter>")


def properties_of(schema: Any) -> dict[str, Any]:
    """What a function's schema says of its parameters."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def types_of(schema: Any) -> set[str]:
    """What a value may be. Text, where nothing is said; "any" stands for what is not looked into."""
    if not isinstance(schema, dict) or not schema.keys() & SAYS_TYPE:
        return {"string"}
    given = schema.get("type")
    types = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
    for parts in (schema.get("anyOf"), schema.get("oneOf")):
        for part in parts if isinstance(parts, list) else ():
            types |= types_of(part)
    return types or {"any"}


def _converted(text: str, types: set[str]) -> Any:
    if types == {"string", "null"}:
        return None if text.strip() == "null" else text
    for read in (json.loads, literal_eval):
        try:
            found = read(text.strip())
            json.dumps(found, allow_nan=False)
            return found
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return text
