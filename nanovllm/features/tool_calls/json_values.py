"""JSON as models write it, said as JSON while it comes.

Small models write a real line break inside a string, Python's quotes and words, backslashes that escape nothing, a
comma or a bracket too many or too few. Each of these has one meaning here; so arguments can be sent before their end
has come, and are JSON all the same.

Where calls are Python (source.is_python), escapes, a string's prefix, 0x1F, {1, 2} and (1) mean what they mean there.
Sets and tuples are lists; of f"..." and b"..." the text is taken. "two" "texts" are not joined: these are quotes within
a text, since small models forget to escape them.
"""

import ast
import json
import math
import re
from contextlib import suppress
from typing import Any

from nanovllm.features.tool_calls.source import MAX_MATCH, Event, Malformed, Reading, Source, changed

CLOSING = {"{": "}", "[": "]", "(": ")"}
SAID = {"{": "{}", "[": "[]", "(": "[]"}  # Python's tuples are lists
MAX_NESTING = 64
QUOTES = "\"'"
PIECE = re.compile(r"[^\"'\\]+")
GOES_ON = tuple("([.:+-*/%|&^@<>=!")
WORD = re.compile(r"<?[^,:{}\[\]()\"'\n<]*")
WHOLE = re.compile(r"-?(0|[1-9][0-9]*)")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
CUT = re.compile(r"\\u[0-9a-fA-F]{0,3}")  # what an answer may end with
# Escapes that JSON does not have, or their beginnings; and what may stand before a string.
OF_PYTHON = re.compile(r"\\([av\n]|[0-7]{1,3}|x[0-9a-fA-F]{0,2}|U[0-9a-fA-F]{0,8}|N(\{[A-Za-z0-9 -]*\}?)?)")
PREFIX = re.compile(r"[bru]|f|br|rb|fr|rf", re.IGNORECASE)
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "undefined": "null"}


def value(source: Source, stops: tuple[str, ...] = (), outer: str = "") -> Reading[None]:
    """Say a value. stops: texts that end it where no string is open. outer: brackets that close what it is in.

    Raises Malformed where the text ends.
    """
    following = yield from source.skip_spaces()
    if following in CLOSING:
        if len(outer) < MAX_NESTING:
            yield from _container(source, stops, outer)
            yield from _check_end(source, f":,}}]{outer}")
        else:
            source.take(1)
            yield _say("null")
    elif following == "":
        raise Malformed
    elif following in ",:}])" or (yield from source.starts_with(*stops)):
        yield _say("null")  # there is none
    elif following in QUOTES:
        yield from string(source, f",}}]{outer}", stops)
    else:
        yield from _word(source, f",}}]{outer}", stops)


def _container(source: Source, stops: tuple[str, ...], outer: str) -> Reading[None]:
    """A list or an object. A bracket that closes what it is in closes it, too; one that closes nothing is left out."""
    opening = source.take(1)
    closing, separator = CLOSING[opening], ""
    is_clear = not source.is_python or opening == "["  # else it may be a dict or a set, a tuple or brackets
    if is_clear:
        yield _say(SAID[opening][0])
    items: list[str] = []  # of a set, unless a key follows: then each is a key whose value is missing
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
        if opening == "(" and not is_clear:
            item = yield from collected(value(source, stops, outer + closing))
            if (yield from source.skip_spaces()) == closing:
                source.take(1)
                yield _say(item)
                return
            yield _say(f"[{item}")
            separator, is_clear = ", ", True
            continue
        if opening == "{":
            item = yield from collected(_key(source, stops, outer + closing))
            if (yield from source.skip_spaces()) != ":":
                items.append(item)
                continue
            source.take(1)
            separator += "" if is_clear else "{"
            separator += (item if item.startswith('"') else json.dumps(item)) + ": "
            is_clear = True
        if separator:
            yield _say(separator)
        if opening == "{" and (yield from source.skip_spaces()) in (",", "}", "]"):
            yield _say("null")
        else:
            yield from value(source, stops, outer + closing)
        separator = ", "
    if is_clear:
        yield _say(SAID[opening][1])
    else:
        yield _say(f"[{', '.join(items)}]" if items else SAID[opening])


def _key(source: Source, stops: tuple[str, ...], outer: str) -> Reading[None]:
    """Or what stands in its place."""
    if source.rest[0] in QUOTES:
        yield from string(source, ":,}]", stops)
    elif source.rest[0] in CLOSING:
        yield from value(source, stops, outer)
    else:
        yield from _word(source, f":,}}]{outer}", stops)


def string(source: Source, ends: str, stops: tuple[str, ...], is_raw: bool = False) -> Reading[None]:
    """Say a string. A quote within it is one that is followed by none of `ends`. Python's may begin with three."""
    quote = source.take(1)
    yield _say('"')
    if (yield from source.starts_with(quote * 2)):
        quote += source.take(2)
    while following := (yield from source.peek()):
        if following == "\\":
            yield _say((yield from _raw_escape(source) if is_raw else _escape(source)))
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
    at = yield from source.after_spaces(len(quote))
    after = source.rest[at : at + 1]
    return not after or after in ends or bool((yield from source.starts_with(*stops, after_spaces=len(quote))))


def _raw_escape(source: Source) -> Reading[str]:
    """A backslash and the next character, which ends nothing."""
    if len((yield from source.peek(2))) < 2:
        raise Malformed
    return _quoted(source.take(2))


def _escape(source: Source) -> Reading[str]:
    """What a backslash and the next characters mean. One that escapes nothing is a backslash."""
    following = (yield from source.peek(2))[1:]
    if following == "":
        raise Malformed
    if source.is_python and OF_PYTHON.match(source.rest):
        return _quoted(_of_python((yield from source.match(OF_PYTHON))))
    if following in '"\\bfnrt' or (following == "/" and not source.is_python):
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


def _of_python(escape: str) -> str:
    """What one of OF_PYTHON means; itself, if it is only the beginning of one, or of a character that there is not."""
    if not escape:
        raise Malformed  # the answer ends with it
    if escape[1].isdigit():
        return chr(int(escape[1:], 8))
    with suppress(SyntaxError):
        escape = ast.literal_eval(f'"{escape}"')
    return "\ufffd" if "\ud800" <= escape <= "\udfff" else escape


def _word(source: Source, ends: str, stops: tuple[str, ...]) -> Reading[None]:
    """A number, true, false or null, also as Python writes them; NaN and the infinities are null. Else a string."""
    while (found := WORD.match(source.rest, 0, MAX_MATCH)) and found.end() == len(source.rest) and not source.ended:
        yield None
    word = source.take(found.end() if found else 0)
    if not source.rest:
        raise Malformed
    if source.is_python and source.rest[0] in QUOTES and PREFIX.fullmatch(word):
        yield from string(source, ends, stops, is_raw="r" in word.lower())
    else:
        yield from _check_end(source, ends)
        yield _say(_as_json(word.strip(), source.is_python))


def _check_end(source: Source, ends: str) -> Reading[None]:
    """Raise Malformed where a value in Python goes on, as f(1), x[0] and [1] + [2] do: it is no literal.

    ends: what may follow a value. For anything else a comma is missing.
    """
    if source.is_python and (following := (yield from source.skip_spaces())) in GOES_ON and following not in ends:
        raise Malformed


def _as_json(word: str, is_python: bool) -> str:
    if WHOLE.fullmatch(word):
        return word  # it may have any number of digits
    for base in (0, 10) if is_python else (10,):  # 0: as it says itself, 0x1F
        with suppress(ValueError):
            return str(int(word, base))
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
