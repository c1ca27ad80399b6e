"""Formats whose calls are JSON objects, {"name": "f", "arguments": {...}}: Hermes' and Qwen's, Llama 3's, Mistral's."""

import json
import re
from collections.abc import Callable
from typing import Any

from nanovllm.features.tool_calls.json_values import collected, loads, string, value
from nanovllm.features.tool_calls.source import Event, Malformed, Reading, Source

MISTRAL = "[TOOL_CALLS]"
OPENING, CLOSING = "<tool_call>", "</tool_call>"
NAME = re.compile(r"[^\s\[\]{}\"]+")
ARGUMENTS = ("arguments", "parameters")
KNOWN = {"name", "type", "id", *ARGUMENTS}


def in_tags(
    source: Source, beginnings: tuple[str, ...], call: Callable[[Source], Reading[None]], end: str = CLOSING
) -> Reading[None]:
    """Calls that begin with one of these texts and end with another, which may be missing.

    call: call(source) reads one, the first of these texts included, if it is there. A bracket too many after a call is
    nobody's; other text is the answer's.
    """
    closing: tuple[str, ...] = ()
    while marker := (yield from source.until(*beginnings, closing=closing)):
        if marker in closing:
            source.take(len(marker))
            closing = ()
            continue
        while (yield from source.call(call(source))):
            yield from source.skip_brackets("]}")
            yield from source.skip_spaces(",")
            closing = () if (yield from source.skip(end)) else (end,)
            if not closing or not (yield from source.starts_with("{")):
                break


def hermes(source: Source, opening: str = OPENING, closing: str = CLOSING) -> Reading[None]:
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>. Small models write several objects between two tags."""

    def call(source: Source) -> Reading[None]:
        yield from source.skip(opening)
        yield from source.skip_spaces("[,")
        yield from _object(source, (closing, opening))

    yield from in_tags(source, (opening,), call, closing)


def jamba(source: Source) -> Reading[None]:
    """<tool_calls>[{"name": "f", "arguments": {...}}, ...]</tool_calls>, as Apriel's models write it, too."""
    yield from hermes(source, "<tool_calls>", "</tool_calls>")


def nemotron_json(source: Source) -> Reading[None]:
    """<TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>"""
    yield from hermes(source, "<TOOLCALL>", "</TOOLCALL>")


def llama3_json(source: Source) -> Reading[None]:
    """{"name": "f", "parameters": {...}}, several with ";" or a line's end between them, perhaps after a tag."""

    def call() -> Reading[None]:
        yield from source.skip("<|python_tag|>")
        yield from _object(source, ("<|python_tag|>",), is_bare=True)

    while (yield from source.until("<|python_tag|>", "{")):
        if (yield from source.call(call())):
            yield from source.skip_brackets("}")


def json_list(source: Source) -> Reading[None]:
    """[{"name": "f", "arguments": {...}}, ...], and nothing else: what an answer is made to be where no other form is.

    What cannot be read on is text, and so is a list of other objects that have a name.
    """
    yield from _list(source, "", is_bare=True)
    yield from source.until()


def mistral(source: Source) -> Reading[None]:
    """[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or in later models [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}.

    Those of 2025 write [TOOL_CALLS]f[ARGS]{...}, some with [CALL_ID] and an id before [ARGS].
    """

    def call() -> Reading[None]:
        yield from source.expect(MISTRAL)
        yield from source.skip_spaces()
        function = yield from source.match(NAME)
        if (yield from source.skip("[CALL_ID]")):
            yield from source.match(NAME)
        yield from source.skip("[ARGS]")
        if (yield from source.skip_spaces()) != "{":
            raise Malformed
        yield source.begin(function)
        yield from value(source, (MISTRAL,))
        source.is_whole = True

    while (yield from source.until(MISTRAL)):
        if (yield from source.starts_with("[", after_spaces=len(MISTRAL))):
            yield from _list(source, MISTRAL)
        elif (yield from source.call(call())):
            yield from source.skip_brackets("}")


def _list(source: Source, marker: str, is_bare: bool = False) -> Reading[None]:
    """Calls in a list after a marker. It ends where no other item can be read."""

    def item(beginnings: tuple[str, ...]) -> Reading[None]:
        for text in beginnings:
            yield from source.skip_spaces()
            yield from source.skip(text) if text == "," else source.expect(text)
        yield from _object(source, (MISTRAL,), is_bare)

    beginnings = (marker, "[") if marker else ("[",)
    while (yield from source.call(item(beginnings))):
        beginnings = (",",)
        yield from source.skip_brackets("}")
        yield from source.skip_spaces()
        if (yield from source.skip("]")):
            break


def _object(source: Source, stops: tuple[str, ...], is_bare: bool = False, is_inner: bool = False) -> Reading[None]:
    """A call. Arguments after the name go out as they come; otherwise they wait for it.

    In {"type": "function", "function": {...}}, as OpenAI's API has it, the inner object is the call.

    is_bare: nothing else says that a call comes here. So an object without arguments is none, nor one that has other
    keys, or names a function that the source does not know. Raises Malformed.
    """
    yield from source.skip_spaces()
    yield from source.expect("{")
    fields: dict[str, Any] = {}
    while (following := (yield from source.skip_spaces(","))) != "}":
        if following not in ("'", '"'):
            break
        key = json.loads((yield from collected(string(source, ":,}]", stops))))
        yield from source.skip_spaces()
        yield from source.expect(":")
        is_object = (yield from source.skip_spaces()) == "{"
        if is_object and key == "function" and "name" not in fields and not (is_inner or source.has_begun):
            yield from _object(source, stops, is_bare, is_inner=True)
            continue
        if is_bare and key not in KNOWN and not source.has_begun:
            raise Malformed
        if is_object and key in ARGUMENTS and "name" in fields and not source.has_begun:
            yield source.begin(fields["name"], is_bare)
            yield from value(source, stops, "}")
            source.is_whole = True
        else:
            fields[key] = json.loads((yield from collected(value(source, stops, "}"))))
    if following == "}":
        source.take(1)
    elif not source.has_begun:
        raise Malformed
    if not source.has_begun:
        given = [fields[key] for key in ARGUMENTS if key in fields]
        if is_bare and not given:
            raise Malformed
        yield source.begin(fields.get("name"), is_bare)
        yield Event("arguments", _as_object(given[0] if given else {}))
        source.is_whole = True


def _as_object(arguments: Any) -> str:
    """As JSON text. Some models write the text of an object instead of the object."""
    if isinstance(arguments, str):
        try:
            found = loads(arguments)
        except ValueError:
            found = None
        arguments = found if isinstance(found, dict) else arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
