"""JSON as models write it, said as JSON while it comes.

Small models write a real line break inside a string, Python's quotes and words, backslashes that escape nothing, a
comma or a bracket too many or too few. Each of these has one meaning here; so arguments can be sent before their end
has come, and are JSON all the same.
"""

import json
import math
import re
from typing import Any

from nanovllm.features.tool_calls.source import MAX_MATCH, Event, Malformed, Reading, Source, changed

CLOSING = {"{": "}", "[": "]", "(": ")"}
SAID = {"{": "{}", "[": "[]", "(": "[]"}  # Python's tuples are lists
MAX_NESTING = 64
PIECE = re.compile(r"[^\"'\\]+")
WORD = re.compile(r"<?[^,:{}\[\]()\"'\n<]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
CUT = re.compile(r"\\u[0-9a-fA-F]{0,3}")  # what an answer may end with
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "undefined": "null"}


def value(source: Source, stops: tuple[str, ...] = (), outer: str = "") -> Reading[None]:
    """Say a value. stops: texts that end it where no string is open. outer: brackets that close what it is in.

    Raises Malformed where the text ends.
    """
    following = yield from source.skip_spaces()
    if following in CLOSING:
        if len(outer) < MAX_NESTING:
            yield from _container(source, stops, outer)
        else:
            source.take(1)
            yield _say("null")
    elif following == "":
        raise Malformed
    elif following in ",:}])" or (yield from source.starts_with(*stops)):
        yield _say("null")  # there is none
    elif following in ("'", '"'):
        yield from string(source, f",}}]{outer}", stops)
    else:
        yield from _word(source)


def _container(source: Source, stops: tuple[str, ...], outer: str) -> Reading[None]:
    """A list or an object. A bracket that closes what it is in closes it, too; one that closes nothing is left out."""
    opening = source.take(1)
    closing, separator = CLOSING[opening], ""
    yield _say(SAID[opening][0])
    while True:
        following = yield from source.skip_spaces(",")
        if following == "":
            raise Malformed
        if following == closing:
            source.take(1)
            break
        if following in outer or (yield from source.starts_with(*stops)):
            break
        if following in "]}):":
            source.take(1)
            continue
        if opening == "{":
            key = yield from _key(source, stops, outer + closing)
            if key is None:
                continue
            separator += f"{key}: "
        if separator:
            yield _say(separator)
        if opening == "{" and (yield from source.skip_spaces()) in (",", "}", "]"):
            yield _say("null")
        else:
            yield from value(source, stops, outer + closing)
        separator = ", "
    yield _say(SAID[opening][1])


def _key(source: Source, stops: tuple[str, ...], outer: str) -> Reading[str | None]:
    """As JSON; its colon is read, too. None for what is no key: no colon follows."""
    is_quoted = source.rest[0] in "'\""
    key = yield from collected(string(source, ":,}]", stops) if is_quoted else value(source, stops, outer))
    if (yield from source.skip_spaces()) != ":":
        return None
    source.take(1)
    return key if key.startswith('"') else json.dumps(key)


def string(source: Source, ends: str, stops: tuple[str, ...]) -> Reading[None]:
    """Say a string. A quote within it is one that is followed by none of `ends`. Python's may begin with three."""
    quote = source.take(1)
    yield _say('"')
    if (yield from source.starts_with(quote * 2)):
        quote += source.take(2)
    while following := (yield from source.peek()):
        if following == "\\":
            yield _say((yield from _escape(source)))
        elif following == quote[0] and (yield from _is_end(source, quote, ends, stops)):
            source.take(len(quote))
            yield _say('"')
            return
        else:
            piece = PIECE.match(source.rest)
            yield _say(_quoted(source.take(piece.end() if piece else 1)))
    raise Malformed


def _is_end(source: Source, quote: str, ends: str, stops: tuple[str, ...]) -> Reading[bool]:
    if not (yield from source.starts_with(quote)):
        return False
    while not (after := source.rest[len(quote) :].lstrip()) and not source.ended:
        yield None
    return not after or after[0] in ends or bool((yield from source.starts_with(*stops, after_spaces=len(quote))))


def _escape(source: Source) -> Reading[str]:
    """What a backslash and the next characters mean. One that escapes nothing is a backslash."""
    following = (yield from source.peek(2))[1:]
    if following == "":
        raise Malformed
    if following in '"\\/bfnrt':
        return source.take(2)
    if following == "'":
        return source.take(2)[1:]
    escape = (yield from source.peek(6)) if following == "u" else ""
    if CUT.fullmatch(escape):
        raise Malformed
    if first := ESCAPED.fullmatch(escape):
        source.take(6)
        unit = int(first[1], 16)
        if unit // 0x400 == 0xD800 // 0x400:  # the first half of a character
            second = ESCAPED.fullmatch((yield from source.peek(6)))
            if second and int(second[1], 16) // 0x400 == 0xDC00 // 0x400:
                source.take(6)
                return first[0] + second[0]
        return "\ufffd" if unit // 0x800 == 0xD800 // 0x800 else first[0]  # half a character can't be encoded
    source.take(1)
    return "\\\\"


def _word(source: Source) -> Reading[None]:
    """A number, true, false or null, also as Python writes them; NaN and the infinities are null. Else a string."""
    while (found := WORD.match(source.rest, 0, MAX_MATCH)) and found.end() == len(source.rest) and not source.ended:
        yield None
    word = source.take(found.end() if found else 0)
    if not source.rest:
        raise Malformed
    yield _say(_as_json(word.strip()))


def _as_json(word: str) -> str:
    try:
        number = float(word)
    except ValueError:
        return WORDS.get(word.lower()) or json.dumps(word, ensure_ascii=False)
    if NUMBER.fullmatch(word) and math.isfinite(number):
        return word
    return json.dumps(number) if math.isfinite(number) else "null"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _say(text: str) -> Event:
    return Event("arguments", text)


def collected(reading: Reading[Any]) -> Reading[str]:
    """All that a reading says, and nothing of it goes out."""
    pieces: list[str] = []
    yield from changed(reading, pieces.append)
    return "".join(pieces)


def loads(text: str) -> Any:
    """A value that is all of a text. Raises ValueError."""
    source = Source()
    try:
        said = source.feed(value(source), f"{text.strip()}\n", has_ended=True)  # a word ends where something follows it
    except Malformed:
        raise ValueError("this is not JSON") from None
    if source.rest.strip():
        raise ValueError("something follows the value")
    return json.loads("".join(event.text for event in said))
