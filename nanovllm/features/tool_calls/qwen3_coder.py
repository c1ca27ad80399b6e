"""Qwen3-Coder's and Qwen3.5's calls: <function=f><parameter=x>a value</parameter></function> in <tool_call> tags."""

import json
import re
from typing import Any

from nanovllm.features.tool_calls.json_formats import CLOSING, OPENING, in_tags
from nanovllm.features.tool_calls.schema_types import Patterns, Root, member_of, typed, types_of
from nanovllm.features.tool_calls.source import Event, Malformed, Reading, Source, changed

NAME = re.compile(r"[^<>\n]+")
FUNCTION, PARAMETER, END = "<function=", "<parameter=", "</function>"
VALUE_ENDS = tuple(f"{line}{tag}" for tag in ("</parameter>", END, PARAMETER) for line in ("\n", ""))
IN_CALL = (PARAMETER, END, CLOSING, OPENING, FUNCTION)  # what may follow a parameter


def qwen3_coder(source: Source) -> Reading[None]:
    """The outer tags may be missing. A value is text unless the function's schema says otherwise."""
    patterns = Patterns()
    roots: dict[str, Root] = {}  # of the functions that have been called: they may be large, and called again
    yield from in_tags(source, (OPENING, FUNCTION), lambda source: _call(source, roots, patterns))


def _call(source: Source, roots: dict[str, Root], patterns: Patterns) -> Reading[None]:
    """Text between parameters is nobody's. The call ends at </function>, or at a tag that cannot stand in a call.

    Of a parameter that is written twice the first counts: it has gone out.
    """
    yield from source.skip(OPENING)
    yield from source.skip_spaces()
    yield from source.expect(FUNCTION)
    name = yield from source.match(NAME)
    yield from source.expect(">")
    yield from source.skip_spaces()
    if not (yield from source.starts_with(*IN_CALL)) and not any(tag.startswith(source.rest) for tag in IN_CALL):
        raise Malformed
    name = name.strip()
    yield source.begin(name)
    if name not in roots:
        roots[name] = Root(source.functions.get(name), patterns)
    said = set[str]()
    separator = "{"
    while (tag := (yield from changed(source.until(*IN_CALL), lambda _: None))) == PARAMETER:
        source.take(len(PARAMETER))
        parameter = (yield from source.match(NAME)).strip()
        if parameter and (yield from source.skip(">")):
            reading = _value(source, member_of(roots[name], parameter), roots[name])
            if parameter in said:
                yield from changed(reading, lambda _: None)
                continue
            yield Event("arguments", f"{separator}{json.dumps(parameter, ensure_ascii=False)}: ")
            yield from reading
            said.add(parameter)
            separator = ", "
    if not tag:
        raise Malformed
    yield Event("arguments", "}" if separator == ", " else "{}")
    source.is_whole = True
    source.take(len(END) if tag == END else 0)


def _value(source: Source, schema: Any, root: Root) -> Reading[None]:
    """A value as JSON. A text's goes out as it comes: it may be a file of many pages."""
    yield from source.skip("\n")
    pieces = source.until(closing=VALUE_ENDS)
    if types_of(schema, root) <= {"string"}:
        yield Event("arguments", '"')
        marker = yield from changed(pieces, lambda text: Event("arguments", json.dumps(text, ensure_ascii=False)[1:-1]))
        end = '"'
    else:
        texts: list[str] = []
        marker = yield from changed(pieces, texts.append)
        end = json.dumps(typed("".join(texts), schema, root), ensure_ascii=False)
    if not marker:
        raise Malformed
    yield Event("arguments", end)
    yield from source.skip("\n")
    yield from source.skip("</parameter>")
