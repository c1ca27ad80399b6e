"""A call as a JSON object, {"name": "f", "arguments": {...}}: the part that several formats share."""

import json
import re
from typing import Any

from nanovllm.features.tool_calls.source import Event, Malformed, Reading, Source

ARGUMENTS = ("arguments", "parameters")
KNOWN = {"name", "type", "id", *ARGUMENTS}
SIGNIFICANT = re.compile(r'[\\"{}\[\]]')
PLAIN = re.compile(r"[^\s,:{}\[\]\"]+")  # a number, true, false or null


def call_object(source: Source, is_bare: bool = False) -> Reading[None]:
    """Read a call. Arguments behind the name go out as they come; otherwise they wait for it.

    is_bare: nothing else says that a call comes here. So an object without arguments is none, nor one that has other
    keys, or names a function that the source does not know. Raises Malformed.
    """
    yield from source.expect("{")
    fields: dict[str, Any] = {}
    while (following := (yield from source.skip_spaces())) != "}":
        if fields and following == ",":
            source.take(1)
            yield from source.skip_spaces()
        key = yield from value(source)
        if not isinstance(key, str) or (is_bare and key not in KNOWN):
            raise Malformed
        yield from source.skip_spaces()
        yield from source.expect(":")
        is_object = (yield from source.skip_spaces()) == "{"
        if is_object and key in ARGUMENTS and "name" in fields and not source.has_begun:
            yield source.begin(fields["name"], is_bare)
            yield from value(source, is_sent=True)
        else:
            fields[key] = yield from value(source)
    source.take(1)
    if not source.has_begun:
        given = [fields[key] for key in ARGUMENTS if key in fields]
        if is_bare and not given:
            raise Malformed
        yield source.begin(fields.get("name"), is_bare)
        yield Event("arguments", _as_object(given[0] if given else {}))


def value(source: Source, is_sent: bool = False) -> Reading[Any]:
    """Read a JSON value. is_sent: its text goes out as arguments while it comes. Raises Malformed."""
    if (yield from source.peek()) not in '{["' or (source.ended and not source.rest):
        if (found := (yield from source.match(PLAIN))) is None:
            raise Malformed
        return _parsed(source.take(found.end()))
    text, depth, in_string, at, is_whole = "", 0, False, 0, False
    while not is_whole:
        while not is_whole and (found := SIGNIFICANT.search(source.rest, at)):
            sign, at = found[0], found.end()
            if sign == "\\":
                at += 1  # what it escapes, which may not have come yet
            elif sign == '"':
                in_string = not in_string
            elif not in_string:
                depth += 1 if sign in "{[" else -1
            is_whole = depth == 0 and not in_string
        piece = source.take(at if is_whole else len(source.rest))
        at = max(0, at - len(piece))
        text += piece
        if is_sent and piece:
            yield Event("arguments", piece)
        if not is_whole and source.ended:
            raise Malformed
        if not is_whole:
            yield None
    return _parsed(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None


def _as_object(arguments: Any) -> str:
    """As JSON text. Some models write the text of an object instead of the object."""
    if isinstance(arguments, str):
        try:
            if isinstance(json.loads(arguments), dict):
                return arguments
        except (ValueError, RecursionError):
            pass
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
