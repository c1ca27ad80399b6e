"""What a JSON schema says of a value's type, and a text as a value of that type.

Programs that write schemas say one thing in many ways: pydantic writes Optional[int] as anyOf with null, OpenAPI as
nullable, a parent class as allOf, a class of its own as $ref. Here nothing is refused: what a schema does not say, or
says in a way that is not understood, is not known.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

from nanovllm.features.grammar.parts import (
    MEANS_IN_TEXTS,
    Parts,
    References,
    Schema,
    alternatives,
    changed,
    items_of,
    map_in,
    type_of,
    types_in,
    words_in,
)
from nanovllm.features.grammar.trial import LIMITS
from nanovllm.features.tool_calls.json_values import loads

if TYPE_CHECKING:
    from nanovllm.features.grammar.oracle import Oracle

ALIASES = {  # what people write for a type -> its name in JSON Schema
    **dict.fromkeys(("str", "text", "char", "varchar"), "string"),
    **dict.fromkeys(("int", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "decimal", "num"), "number"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "arr", "tuple"), "array"),
    **dict.fromkeys(("none", "nonetype", "nil"), "null"),
    "bool": "boolean",
}
WORDS = {"None": None, "True": True, "False": False}  # Qwen's templates write str(value), and JSON only for containers
MAX_STEPS = 2000  # for the alternatives of one value
MAX_PLACES = 100  # inside one value, in which numbers are made what the schema says
MAX_PATTERN, MAX_COUNT = 200, 1000  # characters of a pattern, and its counts multiplied: what is looked at
MAX_PATTERNS = 100  # of a request; llguidance takes up to 10 ms for each
MAX_CHARS, TRY = 50_000, 20  # of names that patterns are tried at: a quarter of a second; to begin costs so many more
NAMES = ("string", "integer", "number", "boolean", "null", "array", "object")


def in_standard_words(schema: Any) -> Any:
    """A copy in which each type has its name in JSON Schema, and nullable is a type, as grammars know them."""
    return changed(schema, _in_standard_words)


def _in_standard_words(part: Schema) -> Schema:
    if "type" in part:
        kinds = part["type"]
        part["type"] = [_named(kind) for kind in kinds] if isinstance(kinds, list) else _named(kinds)
    return {"anyOf": [part, {"type": "null"}]} if part.pop("nullable", None) is True else part


def _named(kind: Any) -> Any:
    """The name in JSON Schema of what somebody wrote for a type; what we do not know stays."""
    name = kind.lower() if isinstance(kind, str) else ""
    found = ALIASES.get(name, name)
    return found if found in NAMES else kind


class Patterns:
    """Do the patterns of a request match its names? Only some are tried; those that are not may match."""

    def __init__(self) -> None:
        self._oracles: dict[str, Oracle | None] = {}  # None: it is no pattern, or takes too much
        self._num_chars = 0

    def fits(self, pattern: str, name: str) -> bool:
        """Does it match? llguidance needs no more than a step for each character. True where that is not found out."""
        if len(pattern) > MAX_PATTERN or find_spec("llguidance") is None:
            return True
        found = re.findall(r"\{[0-9,]*[0-9][0-9,]*\}", pattern)
        if prod(max(map(int, re.findall("[0-9]+", each))) for each in found) > MAX_COUNT:
            return True
        self._num_chars += TRY + len(name)
        if self._num_chars > MAX_CHARS:
            return True
        if pattern not in self._oracles:
            if len(self._oracles) == MAX_PATTERNS:
                return True
            self._oracles[pattern] = _oracle_of(pattern)
        oracle = self._oracles[pattern]
        try:
            return oracle is not None and oracle.fits(pattern, name)
        except ValueError:
            self._oracles[pattern] = None
            return False


@lru_cache(maxsize=MAX_PATTERNS)
def _oracle_of(pattern: str) -> "Oracle":
    """One for each pattern, which it compiles once. Tools come again with each request."""
    from nanovllm.features.grammar.oracle import Oracle

    return Oracle(LIMITS)


class Root:
    """A whole schema, in which references are looked up, and what was found of its parts."""

    def __init__(self, schema: Any, patterns: Patterns | None = None) -> None:
        """patterns: shared by the schemas of one request."""
        self.schema = schema
        self.patterns = Patterns() if patterns is None else patterns
        self._references = References(schema if isinstance(schema, dict) else {})
        self._options: dict[int, tuple[Any, list[Parts]]] = {}  # by the schema's id, which is its own while it is here
        self._members: dict[str, Schema] = {}

    def new_options(self, schema: Any) -> list[Parts]:
        """The alternatives of a schema (features/grammar/parts.py), not kept."""
        try:
            return alternatives([schema], self._references.follow, MAX_STEPS)
        except ValueError:  # it has too many
            return [()]

    def options(self, schema: Any) -> list[Parts]:
        if id(schema) not in self._options:
            self._options[id(schema)] = schema, self.new_options(schema)
        return self._options[id(schema)][1]

    def member(self, name: str) -> Schema:
        """What is said of the value under a key."""
        if name not in self._members:
            self._members[name] = _member_of(self.options(self.schema), name, self.patterns)
        return self._members[name]


def root_of(schema: Any, root: Any = None) -> Root:
    """root: a schema or its Root; None: the schema is its own."""
    root = schema if root is None else root
    return root if isinstance(root, Root) else Root(root)


def options(schema: Any, root: Any = None) -> list[Parts]:
    """The alternatives of a schema. root: as root_of() has it."""
    return root_of(schema, root).options(schema)


def types_of(schema: Any, root: Any = None) -> set[str]:
    """Names of the types that a value may have. Empty where nothing is said of them."""
    return _types_of(options(schema, root))


def _types_of(ways: list[Parts]) -> set[str]:
    found = [_types(parts) for parts in ways]
    return {name for types in found for name in types} if all(found) else set()


def _types(parts: Parts) -> list[str]:
    return [name for name in types_in(parts, MEANS_IN_TEXTS) or () if name in NAMES]


def names_of(schema: Any) -> list[str]:
    """Keys that any of an object's alternatives declares."""
    root = root_of(schema)
    ways = root.options(root.schema)
    return list(dict.fromkeys(name for parts in ways for part in parts for name in map_in(part, "properties")))


def member_of(schema: Any, name: str) -> Schema:
    """What any of an object's alternatives says of the value under a key, whether that is declared or not."""
    return root_of(schema).member(name)


def _member_of(ways: list[Parts], name: str, patterns: Patterns) -> Schema:
    found = []
    for parts in ways:
        if said := [each for part in parts for each in _said_of(part, name, patterns)]:
            found.append({"allOf": said})
    return {"anyOf": found} if found else {}


def _said_of(part: Schema, name: str, patterns: Patterns) -> list[Any]:
    properties = map_in(part, "properties")
    own = [properties[name]] if name in properties else []
    own += [schema for pattern, schema in map_in(part, "patternProperties").items() if patterns.fits(pattern, name)]
    others = part.get("additionalProperties")
    return own or ([others] if isinstance(others, dict) else [])


def typed(text: str, schema: Any, root: Any = None) -> Any:
    """The value that a text without quotes stands for: that text itself, unless the schema has another type for it.

    Where the schema allows a text, only JSON is read as another type; elsewhere, also what is almost JSON.
    """
    found = options(schema, root)
    types = {name for parts in found for name in _types(parts) or ["string"]}
    known = [word for parts in found for word in words_in(parts) or ()]
    if text in known or types <= {"string"}:
        return text
    if "string" in types and not _is_json_of(text, types - {"string"}):
        return text
    try:
        return fit(loads(text), schema, root)
    except ValueError:
        return text


def _is_json_of(text: str, types: set[str]) -> bool:
    """Is it JSON, without numbers that no float holds, and a value of one of these types?"""
    try:
        value = WORDS[text] if text in WORDS else json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return False
    return type_of(value) in types or (type_of(value) == "integer" and "number" in types)


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError
    return number


def fit(value: Any, schema: Any, root: Any = None) -> Any:
    """The value, 140.0 an integer where the schema says integer; likewise inside it."""
    return Fitting(schema, root_of(schema, root), iter(range(MAX_PLACES))).of(value)


class Fitting:
    """What a schema says of a value and of those inside it. Each place is looked up once; a list's items share one.

    places: an entry for each that may still be looked up. Of others nothing is known.
    """

    def __init__(self, schema: Any, root: Root, places: Iterator[int]) -> None:
        self.schema, self.root, self.places = schema, root, places
        self.inside: dict[int | str, Fitting] = {}

    @cached_property
    def ways(self) -> list[Parts]:
        return self.root.new_options(self.schema)

    @cached_property
    def is_integer(self) -> bool:
        types = _types_of(self.ways)
        return "integer" in types and "number" not in types

    @cached_property
    def items(self) -> list[list[tuple[list[Any], Any]]]:
        """For each alternative of a list, (schemas of the first items, that of the rest) of its parts."""
        found = [[items_of(part) for part in parts if part.keys() & {"items", "prefixItems"}] for parts in self.ways]
        return [split for split in found if split]

    @cached_property
    def rest(self) -> int:
        """From this place on, all items of a list have one schema."""
        return max((len(first) for split in self.items for first, _ in split), default=0)

    def of(self, value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value) if self.is_integer else value
        if isinstance(value, list):
            return [self._fit_inside(item, min(place, self.rest), self._item_of) for place, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: self._fit_inside(item, key, self._member_of) for key, item in value.items()}
        return value

    def _fit_inside(self, value: Any, place: Any, look_up: Callable[[Any], Schema]) -> Any:
        if not isinstance(value, float | list | dict):
            return value  # nothing in it could change
        if place not in self.inside:
            found = {} if next(self.places, None) is None else look_up(place)
            self.inside[place] = Fitting(found, self.root, self.places)
        return self.inside[place].of(value)

    def _item_of(self, place: int) -> Schema:
        ways = [[first[place] if place < len(first) else rest for first, rest in split] for split in self.items]
        return {"anyOf": [{"allOf": said} for said in ways]} if ways else {}

    def _member_of(self, name: str) -> Schema:
        return _member_of(self.ways, name, self.root.patterns)
