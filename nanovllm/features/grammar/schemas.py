"""JSON schemas as people write them, checked and turned into grammars in Lark's notation.

They are checked before they reach llguidance's stack, and compiled in a sandbox (schema_rules.py): both take what a
schema asks them to. Blanks between tokens have a bound.
"""

import json
import math
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

from nanovllm.checks.values import shorten
from nanovllm.features.grammar.lark import NO_FORCING, nested
from nanovllm.features.grammar.parts import children, containers, pointed
from nanovllm.features.grammar.trial import tried

MAX_NESTING = 64  # of a schema, as in vLLM: what it is compiled to grows with it
MAX_DEPTH = 1000  # llguidance follows references by recursion, and a full stack would end the process: half of it
# At one place between two tokens. A model that has lost its way writes blanks as long as it may.
BLANKS = r"[ \t\r\n]{1,40}"

REPEATS = re.compile(r"[*+?{]")  # in a pattern, of blanks or of a separator
# In Lark: where a schema begins, or what may hold the same signs: a comment, a string, a regular expression. One that
# does not end is an error, and found all the same: or each quote in it would be tried as the beginning of one more.
SCHEMA_OR_OTHER = re.compile(
    r"""(?P<schema>%json\s*(?={)) | (?://|\#)[^\n]* | "[^"\\\n]*(?:\\.[^"\\\n]*)*"? | /[^/\\]*(?:\\.[^/\\]*)*/?""",
    re.VERBOSE,
)


def checked_schema(given: Any) -> Any:
    """A copy of a schema. Raises ValueError for what is not JSON, or too deep, and for a number that no float holds."""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        schema = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}; found {shorten(given)}") from error
    inside = containers(schema)
    depths = _depths(inside)
    if not isinstance(schema, dict) or (depth := depths[id(schema)]) > MAX_NESTING:
        raise ValueError(f"a JSON schema is an object of at most {MAX_NESTING} levels, found {shorten(given)}")
    names = {part["$ref"] for part in inside if isinstance(part, dict) and isinstance(part.get("$ref"), str)}
    below = (depths.get(id(pointed(schema, name)), depth) for name in names)
    if len(names) > MAX_DEPTH or depth + sum(below) > MAX_DEPTH:
        raise ValueError(f"the definitions that it refers to have more than {MAX_DEPTH} levels, taken together")
    return schema


def _number(digits: str) -> int | float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{shorten(digits)} is not a number that a float holds")
    return int(digits) if digits.lstrip("-").isdigit() else number


def lark_of_json(given: Any, is_closed: bool = False, options: dict[str, Any] | None = None, form: str = "json") -> str:
    """A grammar of the texts that fit a schema. Raises ValueError for one that is none, or that no finite text fits.

    is_closed: objects have only the properties that their schemas name. options: of llguidance (its "x-guidance"),
    unless the schema brings its own. form: "json", or "parameters" of a call of Qwen3-Coder's.
    """
    schema = checked_schema(given)
    own = schema.pop("x-guidance", {})
    if not isinstance(own, dict):
        raise ValueError(f"x-guidance must be an object, found {shorten(own)}")
    guidance = {"whitespace_flexible": True} | (options or {}) | own
    if guidance["whitespace_flexible"] and guidance.get("whitespace_pattern") is None:
        guidance["whitespace_pattern"] = BLANKS
    may_swallow = any(map(REPEATS.search, map(str, own.values())))
    return _compiled(json.dumps([schema, form, is_closed, guidance])) + NO_FORCING * may_swallow


@lru_cache(maxsize=64)
def _compiled(question: str) -> str:
    return tried("schema", question)


def with_compiled_schemas(lark: str) -> str:
    """A grammar in Lark's notation, its schemas (%json {...}) compiled as others are. Raises ValueError."""
    made, position = "", 0
    while found := SCHEMA_OR_OTHER.search(lark, position):
        before, position = position, found.end()
        if found["schema"]:
            with suppress(json.JSONDecodeError, RecursionError):  # what is wrong with it is said by llguidance
                schema, position = json.JSONDecoder().raw_decode(lark, position)
                made += lark[before : found.start()] + nested(lark_of_json(schema))
                continue
        made += lark[before:position]
    return made + lark[position:]


def _depths(parts: list[Any]) -> dict[int, int]:
    """Levels of objects and lists in each of a value's parts, by its id. Once for all: references may be many."""
    depths: dict[int, int] = {}
    for part in reversed(parts):  # children come after their parents
        depths[id(part)] = 1 + max((depths[id(child)] for child in children(part)), default=0)
    return depths
