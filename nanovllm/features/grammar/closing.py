"""Objects that are closed: they have the properties that their schemas name, and no others.

A schema may name the properties of one object in several places: in allOf, beside $ref or anyOf. If each place were
closed alone, each would forbid what the others name. So the names of all places come together first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.features.grammar.parts import (
    ALTERNATIVES,
    LISTS_OF_VALUES,
    MAPS_OF_VALUES,
    OF_VALUES,
    Parts,
    alternatives_of,
    is_reference,
    list_in,
    map_in,
    values_of,
)

NAMING = ("properties", "patternProperties")
ANYTHING: dict[str, Any] = {}
MAX_OPEN = 2000  # definitions that are added, at most


@dataclass(frozen=True)
class Named:
    """Properties of an object that are named, and patterns of names: dicts, as sets that keep their order.

    says_which   whether somebody names the properties at all; they may be none
    """

    names: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    says_which: bool = False

    def __or__(self, other: "Named") -> "Named":
        names, patterns = self.names | other.names, self.patterns | other.patterns
        return Named(names, patterns, self.says_which or other.says_which)

    @classmethod
    def by(cls, parts: list[dict[str, Any]]) -> "Named":
        """What is required may be there, too."""
        says_which = any(isinstance(part.get(name), dict) for part in parts for name in NAMING)
        names = [name for part in parts for name in map_in(part, "properties")]
        names += [name for part in parts for name in list_in(part, "required") if isinstance(name, str)]
        patterns = [pattern for part in parts for pattern in map_in(part, "patternProperties")]
        return cls(dict.fromkeys(names, True), dict.fromkeys(patterns, True), says_which)


def close(schema: dict[str, Any]) -> None:
    """Let objects that name their properties have no others, unless they say so. Changes the whole schema.

    Raises ValueError for one that would become too large.
    """
    _merge_closed_parts(schema)
    closing = Closing(schema)
    closed = closing.closed(schema)
    if opened := closing.opened():
        closed["$defs"] = map_in(closed, "$defs") | opened
    schema.clear()
    schema.update(closed)


def _merge_closed_parts(schema: dict[str, Any]) -> None:
    """Let parts of one object that forbid what another part requires forbid it no more: the whole is closed instead.

    Clients close each part by itself; taken by the letter, nothing would fit.
    """
    parts = Parts(schema)
    contradicted: list[dict[str, Any]] = []
    for value in values_of(schema):
        several = parts.parts_of(value)
        required = {name for part in several for name in list_in(part, "required") if isinstance(name, str)}
        closed = [part for part in several if part.get("additionalProperties") is False]
        plain = [part for part in closed if "patternProperties" not in part]
        if len(several) > 1 and any(required - map_in(part, "properties").keys() for part in plain):
            contradicted += closed
    for part in contradicted:
        part.pop("additionalProperties", None)


class Closing:
    """root is left as it is.

    A definition stands for a closed object where nothing is said beside its $ref. Elsewhere a copy stands for it that
    is open, for the object that it is part of is closed.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root, self.parts = root, Parts(root)
        self._names: dict[Any, str] = {}  # of copies
        self._todo: list[tuple[str, dict[str, Any], Named | None]] = []

    def closed(self, schema: Any, outside: Named = Named()) -> Any:
        """The schema of one value, closed. outside: what is named elsewhere of the same object."""
        if schema is True and outside.says_which:
            schema = ANYTHING
        if not isinstance(schema, dict):
            return schema
        if is_reference(schema) and not (outside.names or outside.patterns):
            return self._inside(schema)
        named = Named.by(self.parts.everything(schema)) | outside
        parts = self.parts.parts_of(schema)
        is_open = any(map(_is_open, parts))
        closed = self._combined(schema, None if is_open else outside)
        if named.says_which and not is_open and not alternatives_of(parts):  # alternatives are closed one by one
            closed["properties"] = _with(map_in(closed, "properties"), named.names)
            if named.patterns:
                closed["patternProperties"] = _with(map_in(closed, "patternProperties"), named.patterns)
            closed["additionalProperties"] = False
        return closed

    def opened(self) -> dict[str, Any]:
        """The definitions that what was closed refers to, beside root's own."""
        made = {}
        for name, target, outside in self._todo:  # which grows
            made[name] = self._combined(target, outside)
        return made

    def _inside(self, part: dict[str, Any]) -> dict[str, Any]:
        """A copy in which the values inside, and definitions, are closed."""
        made = dict(part)
        for name, found in part.items():
            if name in MAPS_OF_VALUES and isinstance(found, dict):
                made[name] = {key: self.closed(each) for key, each in found.items()}
            elif name in LISTS_OF_VALUES and isinstance(found, list):
                made[name] = [self.closed(each) for each in found]
            elif name in OF_VALUES:
                made[name] = self.closed(found)
        return made

    def _combined(self, part: dict[str, Any], outside: Named | None) -> dict[str, Any]:
        """One of an object's parts; only the alternatives in it are closed, unless outside is None."""
        made = self._inside(part)
        groups = {name: part[name] for name in ALTERNATIVES if list_in(part, name)}
        members = list_in(part, "allOf")
        target = self.parts.target_of(part)
        elements = [*groups.values(), *([member] for member in members), [target]]
        named = [sum_of(Named.by(self.parts.everything(each)) for each in element) for element in elements]

        def beside(number: int) -> Named | None:
            others = named[:number] + named[number + 1 :]
            return None if outside is None else sum_of([outside, Named.by([part]), *others])

        for number, name in enumerate(groups):
            made[name] = [self._alternative(branch, beside(number)) for branch in groups[name]]
        for number, member in enumerate(members):
            if isinstance(member, dict):
                around = beside(len(groups) + number)
                made["allOf"] = [*made["allOf"][:number], self._combined(member, around), *members[number + 1 :]]
        if isinstance(target, dict):
            made["$ref"] = self._open(part["$ref"], target, beside(len(elements) - 1))
        return made

    def _alternative(self, schema: Any, outside: Named | None) -> Any:
        if outside is not None:
            return self.closed(schema, outside)
        return self._combined(schema, None) if isinstance(schema, dict) else schema

    def _open(self, reference: str, target: dict[str, Any], outside: Named | None) -> str:
        """A reference to a copy of what it means, whose alternatives alone are closed."""
        if not alternatives_of(self.parts.parts_of(target)):
            outside = None  # nothing in it asks for that
        key = reference, None if outside is None else (*outside.names, None, *outside.patterns)
        if key not in self._names:
            if len(self._names) == MAX_OPEN:
                raise ValueError(f"to close its objects it would need more than {MAX_OPEN} further definitions")
            taken = map_in(self.root, "$defs").keys() | set(self._names.values())
            number = len(self._names)
            while (name := f"open_{number}") in taken:
                number += 1
            self._names[key] = name
            self._todo.append((name, target, outside))
        return f"#/$defs/{self._names[key]}"


def sum_of(several: Iterable[Named]) -> Named:
    total = Named()
    for each in several:
        total = total | each
    return total


def _with(own: dict[str, Any], others: dict[str, bool]) -> dict[str, Any]:
    return own | {name: allowed for name, allowed in others.items() if name not in own}


def _is_open(part: dict[str, Any]) -> bool:
    return any(part.get(name, False) is not False for name in ("additionalProperties", "unevaluatedProperties"))
