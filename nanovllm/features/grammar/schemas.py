"""JSON schemas as other people write them, as llguidance may have them.

They are checked before they reach llguidance's stack, and rewritten where it would take them for something else:
objects without a type, patterns of a few names, values that cannot end. Blanks between tokens have a bound.
"""

import json
import re
from contextlib import suppress
from typing import Any

from nanovllm.checks.values import shorten
from nanovllm.features.grammar.closing import close
from nanovllm.features.grammar.endless import without_endless
from nanovllm.features.grammar.name_patterns import name_finite_patterns
from nanovllm.features.grammar.parts import Parts, alternatives_of, follow, is_reference, values_of

MAX_NESTING = 64  # of a schema, as in vLLM: what it is compiled to grows with it
MAX_DEPTH = 1000  # llguidance follows references by recursion, and a full stack would end the process: half of it
# At one place between two tokens. A model that has lost its way writes blanks as long as it may.
BLANKS = r"[ \t\r\n]{1,40}"
SAYS_TYPE = {"type", "enum", "const"}


def checked_schema(given: Any) -> Any:
    """A copy of a schema. Raises ValueError for what is not JSON, or too deep."""
    try:
        schema = json.loads(given if isinstance(given, str) else json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}; found {shorten(given)}") from error
    parts = _all_parts(schema)
    depths = _depths(parts)
    if not isinstance(schema, dict) or (depth := depths[id(schema)]) > MAX_NESTING:
        raise ValueError(f"a JSON schema is an object of at most {MAX_NESTING} levels, found {shorten(given)}")
    targets = {part["$ref"] for part in parts if isinstance(part, dict) and isinstance(part.get("$ref"), str)}
    below = (depths.get(id(_target(schema, name)), 1) for name in targets)
    if len(targets) > MAX_DEPTH or depth + sum(below) > MAX_DEPTH:
        raise ValueError(f"the definitions that it refers to have more than {MAX_DEPTH} levels, taken together")
    return schema


def prepared_schema(given: Any, is_closed: bool = False, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A schema as it is compiled. Raises ValueError for one that is none, or that only an endless text could fit.

    is_closed: objects have only the properties that their schemas name. options: of llguidance (its "x-guidance"),
    unless the schema brings its own.
    """
    schema = checked_schema(given)
    own = schema.pop("x-guidance", {})
    if not isinstance(own, dict):
        raise ValueError(f"x-guidance must be an object, found {shorten(own)}")
    parts = Parts(schema)
    for value in values_of(schema):
        _give_type(value, parts)
    name_finite_patterns(schema)
    if is_closed:
        close(schema)
    schema = without_endless(schema)
    guidance = {"whitespace_flexible": True} | (options or {}) | own
    if guidance["whitespace_flexible"] and guidance.get("whitespace_pattern") is None:
        guidance["whitespace_pattern"] = BLANKS
    return schema | {"x-guidance": guidance}


def with_prepared_schemas(lark: str) -> str:
    """A grammar in Lark's notation, its schemas (%json {...}) prepared as others are. Raises ValueError."""
    pieces = re.split(r"(%json\s*)(?={)", lark)
    for number in range(2, len(pieces), 2):
        with suppress(json.JSONDecodeError, RecursionError):  # what is wrong with it is said by llguidance
            schema, end = json.JSONDecoder().raw_decode(pieces[number])
            prepared = json.dumps(prepared_schema(schema), ensure_ascii=False)
            pieces[number] = prepared + pieces[number][end:]
    return "".join(pieces)


def _give_type(schema: Any, parts: Parts) -> None:
    """What names properties and says nothing of its type is an object, what has items an array."""
    if not isinstance(schema, dict) or any(SAYS_TYPE & part.keys() for part in parts.parts_of(schema)):
        return
    possible = parts.everything(schema)
    if any(SAYS_TYPE & part.keys() for part in possible):  # an alternative does
        for branch in (branch for group in alternatives_of([schema]) for branch in group if not is_reference(branch)):
            _give_type(branch, parts)
        return
    keys = {key for part in possible for key in part}
    kinds = {"object"} if keys & {"properties", "patternProperties"} else set()
    kinds |= {"array"} if keys & {"items", "prefixItems"} else set()
    if len(kinds) == 1 and not is_reference(schema):
        schema["type"] = kinds.pop()


def _all_parts(value: Any) -> list[Any]:
    """All objects and lists in it, itself among them."""
    parts = [value]
    for part in parts:
        parts.extend(_children(part))
    return parts


def _depths(parts: list[Any]) -> dict[int, int]:
    """Levels of objects and lists in each of a value's parts, by its id. Once for all: references may be many."""
    depths: dict[int, int] = {}
    for part in reversed(parts):  # children come after their parents
        depths[id(part)] = 1 + max((depths[id(child)] for child in _children(part)), default=0)
    return depths


def _target(schema: Any, name: str) -> Any:
    """What "#/$defs/name" means; the whole schema for what we cannot follow."""
    found = follow(schema, name)
    return schema if found is None else found


def _children(value: Any) -> list[Any]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]
