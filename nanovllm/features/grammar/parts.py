"""All that a JSON schema says of one value: in the schema itself, in allOf, behind $ref, in alternatives.

What it says of the values inside (properties, items) belongs to these. Schemas may be true or false; parts are objects.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urljoin

Schema = dict[str, Any]
Parts = tuple[Schema, ...]  # all of them hold; of each, what it says itself, without what COMBINES say

ALTERNATIVES = ("anyOf", "oneOf")
COMBINES = {"$ref", "allOf", *ALTERNATIVES}
OF_VALUES = {"items", "prefixItems", "additionalItems", "contains", "additionalProperties", "unevaluatedProperties"}
SUBSCHEMAS = {"not", "if", "then", "else", "propertyNames", "allOf", *ALTERNATIVES, *OF_VALUES}  # schemas, or lists
MAPS_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
OF_SCALARS = {"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
OF_SCALARS |= {"minLength", "maxLength", "pattern", "format"}
OF_OBJECTS = {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}
OF_ARRAYS = {"items", "prefixItems", "additionalItems", "minItems", "maxItems"}
# Keywords about one type only. Where no type is named, their author means that type.
MEANS = dict.fromkeys(("properties", "patternProperties"), "object") | dict.fromkeys(("items", "prefixItems"), "array")
MEANS_IN_TEXTS = MEANS | {  # where a value has no quotes, and would else be a text
    **dict.fromkeys(("required", "additionalProperties"), "object"),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string"),
}
MAX_STEPS = 100_000  # looked at for the alternatives of one value: some tenths of a second


class References:
    """What the $refs of a schema mean. It must not change any more."""

    def __init__(self, root: Schema) -> None:
        self.root = root

    @cached_property
    def _anchors(self) -> Schema:
        """The parts that have one. To find them means to look at the whole schema."""
        found: Schema = {}
        for part in containers(self.root):
            if isinstance(part, dict) and isinstance(anchor := part.get("$anchor"), str):
                found.setdefault(anchor, part)
        return found

    def follow(self, name: Any) -> Any:
        """What a $ref means: "#", "#/$defs/name" or "#anchor", perhaps after the root's own $id. None for others."""
        if not isinstance(name, str):
            return None
        url, _, inside = name.partition("#")
        own_url = str(self.root.get("$id", "")).partition("#")[0]
        if url and urljoin(own_url, url) != own_url:
            return None
        if inside and not inside.startswith("/"):
            return self._anchors.get(inside)
        return pointed(self.root, f"#{inside}")


def pointed(root: Any, name: str) -> Any:
    """What "#/$defs/name" means; None for what is not there."""
    found = root
    for key in unquote(name.removeprefix("#")).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found if name.startswith("#") else None


def containers(value: Any) -> list[Any]:
    """All objects and lists in it, data included; itself first."""
    found = [value]
    for each in found:
        found.extend(children(each))
    return found


def children(value: Any) -> list[Any]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]


def changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """A copy of a schema, or of a list of schemas, with each replaced by change(its copy), the innermost first."""
    if isinstance(schema, list):
        return [changed(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    for name, value in schema.items():
        if name in SUBSCHEMAS:
            made[name] = changed(value, change)
        elif name in MAPS_OF_SCHEMAS and isinstance(value, dict):
            made[name] = {key: changed(each, change) for key, each in value.items()}
        else:
            made[name] = value
    return change(made)


def alternatives(schemas: Iterable[Any], target_of: Callable[[Any], Any], max_steps: int = MAX_STEPS) -> list[Parts]:
    """What may hold of a value that fits all of these schemas: for each way to choose from anyOf and oneOf, all parts.

    target_of: what a $ref means. [()]: nothing is said. []: nothing fits; a schema that refers to itself, and not from
    inside a value, is no way. The parts stand in the order of the keywords: those of a $ref before properties are
    before the schema's own. Raises ValueError where the ways are far too many.
    """
    found: list[Parts] = []
    todo: Any = None  # what is still to be chosen, a linked list: (schemas of which one holds, those around them), rest
    for schema in reversed(list(schemas)):
        todo = ([schema], ()), todo
    states: list[Any] = [(todo, (), frozenset())]
    for _ in range(max_steps):
        if not states:
            return found
        todo, parts, seen = states.pop()
        if todo is None:
            found.append(parts)
            continue
        (choices, around), rest = todo
        if isinstance(choices, dict):  # a schema's place among what it combines
            states.append((rest, (*parts, choices), seen))
            continue
        for schema in reversed(choices):
            if schema is False or id(schema) in around:
                continue
            following = rest
            if isinstance(schema, dict) and id(schema) not in seen:
                inside = {id(schema), *around}
                for choice in reversed(_steps(schema, target_of)):
                    following = (choice, inside), following
            states.append((following, parts, seen | {id(schema)}))
    raise ValueError("its anyOf, allOf and $ref have far too many combinations")


def _steps(schema: Schema, target_of: Callable[[Any], Any]) -> list[Any]:
    """In the order of its keywords: lists of schemas of which one holds, and the schema itself."""
    own = next((name for name in ("properties", "required") if name in schema), None)
    steps: list[Any] = []
    for name, value in schema.items():
        if name == "$ref":
            steps.append([target_of(value)])
        elif name == "allOf":
            steps += [[member] for member in list_in(schema, name)]
        elif name in ALTERNATIVES and list_in(schema, name):
            steps.append(value)
        elif name == own:
            steps.append(schema)
    return steps if own else [*steps, schema]


def list_in(part: Schema, name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


def map_in(part: Schema, name: str) -> Schema:
    found = part.get(name)
    return found if isinstance(found, dict) else {}


def items_of(part: Schema) -> tuple[list[Any], Any]:
    """Schemas of the first items, and of the others. Until 2019 a list of the first was called items."""
    if isinstance(part.get("items"), list):
        return part["items"], part.get("additionalItems", True)
    return list_in(part, "prefixItems"), part.get("items", True)


def words_in(parts: Parts) -> list[Any] | None:
    """The values that enum and const leave; None where there is neither."""
    found: list[Any] | None = None
    for part in parts:
        words = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(words, list):
            found = words if found is None else [word for word in found if any(same(word, other) for other in words)]
    return found


def same(one: Any, other: Any) -> bool:
    """As JSON: 1 and 1.0 are the same, 1 and true are not."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def type_of(value: Any) -> str:
    """Its name in JSON Schema."""
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (dict, "object"))
    name = next((name for kind, name in kinds if isinstance(value, kind)), "array")
    return "null" if value is None else name


def types_in(parts: Parts, means: Mapping[str, str] = MEANS) -> list[str] | None:
    """Names of the types that a value may have; None where nothing is said of them."""
    found: list[str] | None = None
    for part in parts:
        given = part.get("type")
        named = [given] if isinstance(given, str) else given
        if isinstance(named, list):
            named = [name for name in named if isinstance(name, str)]
            found = named if found is None else _common(found, named)
    if (words := words_in(parts)) is not None:
        word_types = list(dict.fromkeys(map(type_of, words)))
        return word_types if found is None else _common(found, word_types)
    if found is None:
        meant = {means[name] for part in parts for name in part if name in means}
        return [*meant] if len(meant) == 1 else None
    return found


def _common(first: list[str], second: list[str]) -> list[str]:
    common = [name for name in first if name in second or (name == "integer" and "number" in second)]
    return common + [name for name in second if name == "integer" and name not in first and "number" in first]
