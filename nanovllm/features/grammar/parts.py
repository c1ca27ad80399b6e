"""All that a JSON schema says of one value: in the schema itself, in allOf, behind $ref, in alternatives.

What it says of the values inside (properties, items) belongs to these. A schema may be true or false; lists of parts
hold the objects only.
"""

from collections.abc import Callable
from typing import Any

ALTERNATIVES = ("anyOf", "oneOf")
OF_VALUES = ("items", "additionalItems", "contains", "additionalProperties", "unevaluatedProperties")  # or lists
LISTS_OF_VALUES = ("items", "prefixItems")
MAPS_OF_VALUES = ("properties", "patternProperties", "$defs", "definitions")
SUBSCHEMAS = {"not", "if", "then", "else", "propertyNames", "allOf", *ALTERNATIVES, *OF_VALUES, *LISTS_OF_VALUES}
MAPS_OF_SCHEMAS = {*MAPS_OF_VALUES, "dependentSchemas"}
COMBINES = {"$ref", "allOf", *ALTERNATIVES}
MAX_PARTS = 200_000  # that are looked at: a second's work
ABOUT_OBJECTS = {"properties", "patternProperties", "required", "additionalProperties"}


def follow(root: Any, name: str) -> Any:
    """What "#/$defs/name" means; None for what is not there."""
    found = root
    for key in name.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found if name.startswith("#") else None


def is_reference(schema: Any) -> bool:
    """Does it say nothing of an object but what its $ref says?"""
    return isinstance(schema, dict) and "$ref" in schema and not schema.keys() & (COMBINES | ABOUT_OBJECTS) - {"$ref"}


def list_in(part: dict[str, Any], name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


def map_in(part: dict[str, Any], name: str) -> dict[str, Any]:
    found = part.get(name)
    return found if isinstance(found, dict) else {}


class Parts:
    """Of the schemas in a root, which nobody changes meanwhile. Raises ValueError where they are far too many."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._targets: dict[str, Any] = {}
        self._known: dict[tuple[int, bool], list[dict[str, Any]]] = {}
        self._num = 0

    def target_of(self, part: dict[str, Any]) -> Any:
        """What its $ref means; None without one."""
        if not isinstance(name := part.get("$ref"), str):
            return None
        if name not in self._targets:
            self._targets[name] = follow(self.root, name)
        return self._targets[name]

    def parts_of(self, schema: Any) -> list[dict[str, Any]]:
        """What holds of the value in any case."""
        return self._gathered(schema, ("allOf",))

    def everything(self, schema: Any) -> list[dict[str, Any]]:
        """What may hold of it."""
        return self._gathered(schema, ("allOf", *ALTERNATIVES))

    def _gathered(self, schema: Any, lists: tuple[str, ...]) -> list[dict[str, Any]]:
        key = id(schema), len(lists) > 1
        if key not in self._known:
            self._known[key] = gathered(schema, lists, self.target_of)
            self._num += len(self._known[key])
            if self._num > MAX_PARTS:
                raise ValueError(f"its $ref, allOf and anyOf combine more than {MAX_PARTS} parts, taken together")
        return self._known[key]


def gathered(schema: Any, lists: tuple[str, ...], target_of: Callable[[Any], Any]) -> list[dict[str, Any]]:
    parts, seen = [schema] if isinstance(schema, dict) else [], {id(schema)}
    for part in parts:
        for other in (*(each for name in lists for each in list_in(part, name)), target_of(part)):
            if isinstance(other, dict) and id(other) not in seen:
                seen.add(id(other))
                parts.append(other)
    return parts


def alternatives_of(parts: list[dict[str, Any]]) -> list[list[Any]]:
    """One of each list holds, too."""
    return [part[name] for part in parts for name in ALTERNATIVES if list_in(part, name)]


def values_inside(part: dict[str, Any]) -> list[Any]:
    """Schemas of the values inside, and definitions."""
    single = [part[name] for name in OF_VALUES if isinstance(part.get(name), dict)]
    listed = [each for name in LISTS_OF_VALUES for each in list_in(part, name)]
    return single + listed + [each for name in MAPS_OF_VALUES for each in map_in(part, name).values()]


def values_of(root: Any) -> list[Any]:
    """Schemas of all values, the whole one and definitions among them."""
    values = [root]
    for value in values:
        values.extend(each for part in own_parts(value) for each in values_inside(part))
    return values


def own_parts(schema: Any) -> list[dict[str, Any]]:
    """Those of one value's schema that stand in it: no $ref is followed."""
    return gathered(schema, ("allOf", *ALTERNATIVES), lambda part: None)
