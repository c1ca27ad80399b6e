"""JSON schemas as llguidance may have them: checked before they reach its stack; objects that are closed."""

import json
from typing import Any

from nanovllm.checks.values import shorten

# Where a schema has schemas; what else it holds, a const for example, is data.
SUBSCHEMAS = set(
    "items prefixItems contains additionalProperties propertyNames allOf anyOf oneOf not if then else".split()
)
MAPS_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
MAX_NESTING = 64  # of a schema, as in vLLM: what it is compiled to grows with it
MAX_DEPTH = 1000  # llguidance follows references by recursion, and a full stack would end the process: half of it


def checked_schema(given: Any) -> Any:
    """A copy of a schema. Raises ValueError for what is not JSON, or too deep."""
    try:
        schema = json.loads(given if isinstance(given, str) else json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}; found {shorten(given)}") from error
    parts = _parts(schema)
    depths = _depths(parts)
    if not isinstance(schema, dict) or (depth := depths[id(schema)]) > MAX_NESTING:
        raise ValueError(f"a JSON schema is an object of at most {MAX_NESTING} levels, found {shorten(given)}")
    targets = {part["$ref"] for part in parts if isinstance(part, dict) and isinstance(part.get("$ref"), str)}
    below = (depths.get(id(_target(schema, name)), 1) for name in targets)
    if len(targets) > MAX_DEPTH or depth + sum(below) > MAX_DEPTH:
        raise ValueError(f"the definitions that it refers to have more than {MAX_DEPTH} levels, taken together")
    return schema


def _parts(value: Any) -> list[Any]:
    """All objects and lists in it, itself among them."""
    parts = [value]
    for part in parts:
        parts.extend(_children(part))
    return parts


def _depths(parts: list[Any]) -> dict[int, int]:
    """Levels of objects and lists in each of a value's parts, by its id. Once for all: references may be many."""
    depths: dict[int, int] = {}
    for part in reversed(parts):  # children come behind their parents
        depths[id(part)] = 1 + max((depths[id(child)] for child in _children(part)), default=0)
    return depths


def _target(schema: Any, name: str) -> Any:
    """What "#/$defs/name" means; the whole schema for what we cannot follow."""
    found = schema
    for key in name.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return schema if found is None else found


def _children(value: Any) -> list[Any]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]


def close(schema: Any) -> None:
    """Let objects that name their properties have no others, unless they say so."""
    for part in schema if isinstance(schema, list) else ():
        close(part)
    if isinstance(schema, dict):
        for name in SUBSCHEMAS & schema.keys():
            close(schema[name])
        maps = [schema[name] for name in MAPS_OF_SCHEMAS & schema.keys() if isinstance(schema[name], dict)]
        for part in (part for found in maps for part in found.values()):
            close(part)
        if isinstance(schema.get("properties"), dict) or isinstance(schema.get("patternProperties"), dict):
            schema.setdefault("additionalProperties", False)
