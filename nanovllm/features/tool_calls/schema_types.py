"""What a JSON schema says of a value's type, and a text as a value of that type.

Programs that write schemas say one thing in many ways: pydantic writes Optional[int] as anyOf with null, OpenAPI as
nullable, a parent class as allOf, a class of its own as $ref. alternatives() is the one place that sees through them.
"""

from itertools import product
from typing import Any

from nanovllm.features.grammar.parts import MAPS_OF_SCHEMAS, SUBSCHEMAS, follow
from nanovllm.features.tool_calls.json_values import loads

Schema = dict[str, Any]
ALIASES = {  # what people write for a type -> its name in JSON Schema
    **dict.fromkeys(("str", "text", "char", "varchar"), "string"),
    **dict.fromkeys(("int", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "decimal", "num"), "number"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "arr", "tuple"), "array"),
    **dict.fromkeys(("none", "nonetype", "nil"), "null"),
    "bool": "boolean",
}
NAMES = ("string", "integer", "number", "boolean", "null", "array", "object")
IMPLIED = {  # keywords that say something of one type only -> that type, where none is named
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string"),
}
RESOLVED = {"$ref", "allOf", "anyOf", "oneOf", "nullable"}  # keywords that alternatives() sees through
MAX_ALTERNATIVES, MAX_DEPTH = 1024, 100  # of one schema; what has more is not looked into


def alternatives(schema: Any, root: Any = None) -> list[Schema]:
    """Schemas of which a value fits one: without $ref, allOf, anyOf, oneOf and nullable, "type" a list of JSON's names.

    root: what references are looked up in. An empty list: nothing fits. [{}]: anything may.
    """
    return _alternatives(schema, schema if root is None else root, {}, 0)


def _alternatives(schema: Any, root: Any, seen: dict[int, list[Schema]], depth: int) -> list[Schema]:
    """seen: id of a schema -> its alternatives. A schema that refers to itself says nothing by that."""
    if schema is False:
        return []
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return [{}]
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = [{}]
    own = {name: value for name, value in schema.items() if name not in RESOLVED}
    own.pop("type", None)
    if types := _types(schema):
        own["type"] = types
    choices: list[list[Schema]] = [[own]]
    inside = [follow(root, str(schema["$ref"]))] if "$ref" in schema else []
    for part in inside + _list(schema.get("allOf")):
        choices.append(_alternatives(part, root, seen, depth + 1))
    for several in (_list(schema.get("anyOf")), _list(schema.get("oneOf"))):
        if several:
            choices.append([found for part in several for found in _alternatives(part, root, seen, depth + 1)])
    found: list[Schema] = [{}]
    for choice in choices:
        if len(found) * len(choice) > MAX_ALTERNATIVES:
            return [{}]
        found = [both for pair in product(found, choice) if (both := merge(*pair)) is not None]
    if schema.get("nullable") is True and not any("null" in part.get("type", NAMES) for part in found):
        found.append({"type": ["null"]})
    seen[id(schema)] = found
    return found


def in_standard_words(schema: Any) -> Any:
    """A copy in which each type has its name in JSON Schema, and nullable is a type, as grammars know them."""
    if isinstance(schema, list):
        return [in_standard_words(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: Schema = {}
    for name, value in schema.items():
        if name in SUBSCHEMAS:
            found[name] = in_standard_words(value)
        elif name in MAPS_OF_SCHEMAS and isinstance(value, dict):
            found[name] = {key: in_standard_words(part) for key, part in value.items()}
        elif name == "type":
            found[name] = [_named(kind) for kind in value] if isinstance(value, list) else _named(value)
        else:
            found[name] = value
    if found.pop("nullable", None) is True:
        found = {"anyOf": [found, {"type": "null"}]}
    return found


def merge(first: Schema, second: Schema) -> Schema | None:
    """Both at once. None where no value fits both."""
    merged = first | second
    if "type" in first and "type" in second:
        merged["type"] = _common(first["type"], second["type"])
    first_words, second_words = words(first), words(second)
    if first_words is not None and second_words is not None:
        merged.pop("const", None)
        merged["enum"] = [word for word in first_words if word in second_words]
    if merged.get("type") == [] or merged.get("enum") == []:
        return None
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(first.get(name), dict) and isinstance(second.get(name), dict):
            both = {key: {"allOf": [first[name][key], second[name][key]]} for key in first[name] if key in second[name]}
            merged[name] = first[name] | second[name] | both
    required = [*_list(first.get("required")), *_list(second.get("required"))]
    if required:
        merged["required"] = list(dict.fromkeys(name for name in required if isinstance(name, str)))
    return merged


def words(schema: Schema) -> list[Any] | None:
    """The values that enum or const leave; None where there is neither."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def types_of(schema: Any, root: Any = None) -> set[str]:
    """Names of the types that a value may have. Empty where nothing is said of them."""
    found = alternatives(schema, root)
    return set() if any("type" not in part for part in found) else {name for part in found for name in part["type"]}


def properties_of(schema: Any) -> dict[str, Any]:
    """Of an object, what any of its alternatives says of its properties."""
    return _properties(alternatives(schema))


def typed(text: str, schema: Any, root: Any = None) -> Any:
    """The value that a text without quotes stands for: that text itself, unless the schema has another type for it."""
    options = [part | {"type": part.get("type", ["string"])} for part in alternatives(schema, root)]
    types = {name for part in options for name in part["type"]}
    known = [word for part in options for word in words(part) or ()]
    if text in known or types <= {"string"}:
        return text
    try:
        value = fit(loads(text), schema, root)
    except ValueError:
        return text
    kinds = {type_of(value), "number" if type_of(value) == "integer" else ""}
    return value if kinds & types or "string" not in types else text


def fit(value: Any, schema: Any, root: Any = None) -> Any:
    """The value, 140.0 an integer where the schema says integer; likewise inside it."""
    root = schema if root is None else root
    options = alternatives(schema, root)
    if isinstance(value, float) and value.is_integer():
        types = {name for part in options for name in part.get("type", NAMES)}
        return int(value) if "integer" in types and "number" not in types else value
    if isinstance(value, list):
        items = next((part["items"] for part in options if "items" in part), True)
        return [fit(item, items, root) for item in value]
    if isinstance(value, dict):
        properties = _properties(options)
        return {key: fit(item, properties.get(key, True), root) for key, item in value.items()}
    return value


def type_of(value: Any) -> str:
    """Its name in JSON Schema."""
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (dict, "object"))
    name = next((name for kind, name in kinds if isinstance(value, kind)), "array")
    return "null" if value is None else name


def _properties(options: list[Schema]) -> dict[str, Any]:
    parts = (part.get("properties") for part in reversed(options))
    return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}


def _types(schema: Schema) -> list[str]:
    """The types that a schema names or implies, without those that its parts have."""
    given = schema.get("type")
    named = [_named(name) for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]
    if named:
        return [name for name in named if name in NAMES]
    found = words(schema)
    if found is not None:
        return list(dict.fromkeys(map(type_of, found)))
    return next(([IMPLIED[name]] for name in IMPLIED if name in schema), [])


def _named(kind: Any) -> Any:
    """The name in JSON Schema of what somebody wrote for a type; what we do not know stays."""
    name = kind.lower() if isinstance(kind, str) else ""
    found = ALIASES.get(name, name)
    return found if found in NAMES else kind


def _common(first: list[str], second: list[str]) -> list[str]:
    common = [name for name in first if name in second or (name == "integer" and "number" in second)]
    return common + [name for name in second if name == "integer" and name not in first and "number" in first]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
