"""What a JSON schema says of a value and of the values inside it: the shapes for which schema_rules.py writes rules.

A value may have to fit several schemas at once (allOf, beside $ref). They are not merged into one. A property has to
fit what each of them says of it, and llguidance puts together what they say of numbers and strings.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

from nanovllm.checks.values import check_number, shorten
from nanovllm.features.grammar.oracle import Oracle
from nanovllm.features.grammar.parts import (
    COMBINES,
    MEANS_IN_TEXTS,
    OF_ARRAYS,
    OF_OBJECTS,
    OF_SCALARS,
    Parts,
    References,
    Schema,
    alternatives,
    changed,
    items_of,
    list_in,
    map_in,
    type_of,
    types_in,
    words_in,
)
from nanovllm.features.grammar.patterns import fits_of, whole

NUMERIC = ("integer", "number")
SCALARS = ("null", "boolean", *NUMERIC, "string")
SAYS_SOMETHING = {"type"} | OF_SCALARS | OF_OBJECTS | OF_ARRAYS
NOT_A_TEXT: Schema = {"type": ["null", "boolean", "number", "array", "object"]}
MAX_VALUES = 20_000  # different ones in a schema
MINIMA, MAXIMA = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
OF_NUMBERS = {"multipleOf", *MINIMA, *MAXIMA}
EXACT = 2**53  # a float of 64 bits holds all whole numbers up to it
# llguidance's room for whole numbers. A bound that it rounds to -(2**63) may overflow its stack: the process ends.
MIN_INT64, MAX_INT64 = -(2**63 - 1024), 2**63 - 1
MAX_OPEN = 10**18 - 128  # llguidance refuses whole numbers beyond that on one side and without a bound on the other

Value = int  # its number


@dataclass(frozen=True)
class Leaf:
    """What llguidance compiles."""

    schema: Schema


@dataclass(frozen=True)
class Object:
    """An object.

    form        "json", or "parameters" of a call in Qwen3-Coder's form
    members     values of the declared keys, in their order
    required    some of these keys
    patterns    regular expressions for whole names that are not declared, with their values
    additional  the value of any other key; None: there are no others
    least, most numbers of keys; None: no bound
    """

    form: str
    members: dict[str, Value]
    required: list[str]
    patterns: list[tuple[str, Value]]
    additional: Value | None
    least: int
    most: int | None


@dataclass(frozen=True)
class Array:
    """An array. first: the values of its first items; more: that of each other one. least, most: numbers of items."""

    first: list[Value]
    more: Value
    least: int
    most: int | None


@dataclass(frozen=True)
class Text:
    """In Qwen3-Coder's form, a string. fits: regular expressions for all of it."""

    fits: tuple[str, ...]


@dataclass(frozen=True)
class Word:
    """In Qwen3-Coder's form, a string that is given."""

    text: str


@dataclass(frozen=True)
class AsJson:
    """In Qwen3-Coder's form, a value that is no string."""

    value: Value


@dataclass(frozen=True)
class Numbers:
    """One of some numbers that are given."""

    texts: tuple[str, ...]  # as JSON


Shape = Leaf | Object | Array | Text | Word | AsJson | Numbers


class Values:
    """All values that occur in a schema. Value 0 is the whole.

    shapes: for each value, the shapes that it may have; none if no finite text fits it.
    """

    def __init__(
        self, root: Schema, form: str, is_closed: bool, oracle: Oracle, in_our_words: Callable[[Schema], Schema]
    ) -> None:
        """form, is_closed: as lark_of_schema() has them. Raises ValueError for a schema that nothing fits.

        in_our_words: has changed each part of root, and changes those that only a $ref leads to.

        In Qwen3-Coder's form the whole are the "parameters" of a call, and each of these is a "text".
        """
        self.root, self.is_closed, self.oracle, self._in_our_words = root, is_closed, oracle, in_our_words
        self._references = References(root)
        self._targets: dict[str, Any] = {}  # what each $ref means, in our words
        self.shapes: list[list[Shape]] = []
        self._schemas: list[tuple[str, list[Any]]] = []  # of each value: its form, and all that it has to fit
        self._numbers: dict[tuple[str, tuple[int, ...]], Value] = {}  # by the form and these schemas' ids
        self._bare: dict[int, Schema] = {}  # parts without enum and const, by the parts' ids
        ways = {"json": self._as_json, "text": self._as_text, "parameters": self._as_parameters}
        self._value([root], form)
        for value, (own_form, schemas) in enumerate(self._schemas):  # which grows
            self.shapes[value] = ways[own_form](schemas)
        self._drop_endless()
        if not self.shapes[0]:
            raise ValueError("no finite text fits it: what it requires cannot be, or contains itself without an end")

    def _value(self, schemas: Iterable[Any], form: str) -> Value:
        """The value that has to fit all of these schemas."""
        met: dict[int, Any] = {}
        for schema in schemas:
            around: set[int] = set()
            while _is_reference(schema) and id(schema) not in around:
                around.add(id(schema))
                schema = self._target(schema["$ref"])
            if schema is not True:
                met[id(schema)] = schema
        key = form, tuple(met)
        if key not in self._numbers:
            if len(self.shapes) == MAX_VALUES:
                raise ValueError(f"it has more than {MAX_VALUES} different values in it")
            self._numbers[key] = len(self.shapes)
            self.shapes.append([])
            self._schemas.append((form, list(met.values())))
        return self._numbers[key]

    def _target(self, name: Any) -> Any:
        if (found := self._references.follow(name)) is None:
            raise ValueError(f"$ref {shorten(name)} leads nowhere here: '#/...' and '#anchor' in the schema itself do")
        if name not in self._targets:
            self._targets[name] = changed(found, self._in_our_words)
        return self._targets[name]

    # -- as JSON ----------------------------------------------------------------------------------------------------

    def _as_json(self, schemas: list[Any]) -> list[Shape]:
        shapes: list[Shape] = []
        scalars: list[Schema] = []
        for parts in alternatives(schemas, self._target):
            types = types_in(parts)
            if types is None or "object" in types:
                shapes += self._objects(parts, "json")
            if types is None or "array" in types:
                shapes += self._arrays(parts)
            names = [name for name in SCALARS if types is None or name in types]
            if "number" in names and "integer" in names:
                names.remove("integer")  # these are numbers, too
            if numeric := [name for name in names if name in NUMERIC]:
                if words_in(parts) is not None:  # llguidance would round some of them
                    names = [name for name in names if name not in NUMERIC]
                    shapes += _given_numbers(parts, numeric)
                else:
                    parts = _held(parts, is_whole="number" not in numeric)
            if names:
                scalars.append(_scalar(parts, names))
        leaf = scalars[0] if len(scalars) == 1 else {"anyOf": scalars}
        if scalars and self.oracle.is_possible(leaf):
            shapes.append(Leaf(leaf))
        return shapes

    def _objects(self, parts: Parts, form: str) -> list[Object]:
        return [self._object(each, form) for each in self._with_words(parts, dict)]

    def _arrays(self, parts: Parts) -> list[Array]:
        return [self._array(each) for each in self._with_words(parts, list)]

    def _with_words(self, parts: Parts, kind: type) -> list[Parts]:
        """Parts that have no enum or const: those that have stand for several, one for each word of this kind."""
        words = words_in(parts)
        if words is None:
            return [parts]
        bare = []
        for part in parts:
            rest = {name: value for name, value in part.items() if name not in ("enum", "const")}
            bare.append(self._bare.setdefault(id(part), rest))
        return [(_schema_of(word), *bare) for word in words if isinstance(word, kind)]

    def _object(self, parts: Parts, form: str) -> Object:
        inside = "json" if form == "json" else "text"
        parts = tuple(part for part in parts if part.keys() & OF_OBJECTS)
        required = [name for part in parts for name in list_in(part, "required") if isinstance(name, str)]
        names = dict.fromkeys([*(name for part in parts for name in map_in(part, "properties")), *required])
        others = [part.get("additionalProperties", True) for part in parts]
        is_open = True
        if self.is_closed:
            others, is_open = self._closed(parts, set(required))
        patterns: dict[str, Value] = {}
        for pattern in dict.fromkeys(name for part in parts for name in map_in(part, "patternProperties")):
            maps = [map_in(part, "patternProperties") for part in parts]
            said = [own.get(pattern, other) for own, other in zip(maps, others, strict=True)]
            if (regex := whole(pattern)) is None:
                is_open = False  # a name that does not fit it cannot be told from one that does
            else:
                patterns[regex] = self._value(said, inside)
        return Object(
            form=form,
            members={name: self._value(self._said_of(name, parts, others), inside) for name in names},
            required=[name for name in names if name in required],
            patterns=list(patterns.items()),
            additional=self._value(others, inside) if is_open else None,
            least=max(_bounds(parts, "minProperties"), default=0),
            most=min(_bounds(parts, "maxProperties"), default=None),
        )

    def _closed(self, parts: Parts, required: set[str]) -> tuple[list[Any], bool]:
        """What each part says of keys that it does not name; may there be any that no part names?

        Clients close each part of an object by itself. Where a part forbids what another requires, they mean the whole.
        """
        others = [part.get("additionalProperties", True) for part in parts]
        is_open = any(part.get("additionalProperties", False) is not False for part in parts)
        plain = [
            part for part in parts if part.get("additionalProperties") is False and "patternProperties" not in part
        ]
        if len(parts) > 1 and any(required - map_in(part, "properties").keys() for part in plain):
            others = [other is False or other for other in others]
        says_which = any(part.keys() & {"properties", "patternProperties"} for part in parts)
        return others, is_open or not says_which

    def _said_of(self, name: str, parts: Parts, others: list[Any]) -> list[Any]:
        """The schemas of a key: of each part, those of its name and of the patterns that it fits, or that of others."""
        schemas: list[Any] = []
        for part, other in zip(parts, others, strict=True):
            properties = map_in(part, "properties")
            own = [properties[name]] if name in properties else []
            given = map_in(part, "patternProperties")
            own += [schema for pattern, schema in given.items() if self.oracle.fits(pattern, name)]
            schemas += own or [other]
        return schemas

    def _array(self, parts: Parts) -> Array:
        split = [items_of(part) for part in parts]
        first = []
        for place in range(max((len(own) for own, _ in split), default=0)):
            said = [own[place] if place < len(own) else more for own, more in split]
            first.append(self._value(said, "json"))
        return Array(
            first=first,
            more=self._value([more for _, more in split], "json"),
            least=max(_bounds(parts, "minItems"), default=0),
            most=min(_bounds(parts, "maxItems"), default=None),
        )

    # -- as the parameters of a call of Qwen3-Coder's -----------------------------------------------------------------

    def _as_parameters(self, schemas: list[Any]) -> list[Shape]:
        found: list[Shape] = []
        for parts in alternatives(schemas, self._target):
            types = types_in(parts)
            if types is None or "object" in types:
                found += self._objects(parts, "parameters")
        return found

    def _as_text(self, schemas: list[Any]) -> list[Shape]:
        """What says nothing of its type is a text: so calls are read."""
        shapes: list[Shape] = []
        has_others = False
        for parts in alternatives(schemas, self._target):
            types = types_in(parts, MEANS_IN_TEXTS)
            has_others = has_others or any(name != "string" for name in types or ())
            if types is not None and "string" not in types:
                continue
            fits = tuple(regex for part in parts for regex in fits_of(part)[0])
            words = words_in(parts)
            if words is not None:
                given = [word for word in words if isinstance(word, str)]
                shapes += [Word(word) for word in given if self._is_possible((*parts, {"const": word}))]
            elif not fits:
                return [Text(())]  # all other values are texts, too
            elif self._is_possible(parts):
                shapes.append(Text(fits))
        if has_others:
            shapes.append(AsJson(self._value([*schemas, NOT_A_TEXT], "json")))
        return shapes

    def _is_possible(self, parts: Parts) -> bool:
        """Is there a text that fits them?"""
        return self.oracle.is_possible(_scalar(parts, ["string"]))

    # -- what has an end ----------------------------------------------------------------------------------------------

    def _drop_endless(self) -> None:
        """As the symbols of a grammar that derive no word: what can end for certain is collected until that is all."""
        ends: set[Value] = set()
        num_known = -1
        while len(ends) > num_known:
            num_known = len(ends)
            for value in reversed(range(len(self.shapes))):  # what is inside a value mostly comes after it
                if value not in ends and any(_can_end(shape, ends) for shape in self.shapes[value]):
                    ends.add(value)
        self.shapes = [[shape for shape in shapes if _can_end(shape, ends)] for shapes in self.shapes]


def _can_end(shape: Shape, ends: set[Value]) -> bool:
    if isinstance(shape, AsJson):
        return shape.value in ends
    if isinstance(shape, Array):
        needed = shape.first[: shape.least] + [shape.more] * (shape.least > len(shape.first))
        return all(value in ends for value in needed) and (shape.most is None or shape.least <= shape.most)
    if isinstance(shape, Object):
        others = [value for _, value in shape.patterns] + ([] if shape.additional is None else [shape.additional])
        num_possible = sum(value in ends for value in shape.members.values())
        is_possible = num_possible >= shape.least or any(value in ends for value in others)
        has_room = shape.most is None or shape.most >= max(shape.least, len(shape.required))
        return is_possible and has_room and all(shape.members[name] in ends for name in shape.required)
    return True


def _is_reference(schema: Any) -> bool:
    """Does it say nothing but what its $ref says?"""
    return isinstance(schema, dict) and "$ref" in schema and not schema.keys() & (SAYS_SOMETHING | COMBINES) - {"$ref"}


def _scalar(parts: Parts, types: list[str]) -> Schema:
    """What all parts say of a value of these types, none of which is an array or an object."""
    said = [{name: part[name] for name in OF_SCALARS if name in part} for part in parts]
    said = [each for each in said if each]
    return {"type": types} | ({"allOf": said} if said else {})


def _schema_of(word: Any) -> Schema:
    """The schema of one value: of an object or an array that is given, its own."""
    if isinstance(word, dict):
        properties = {name: {"const": value} for name, value in word.items()}
        closed = {"additionalProperties": False, "maxProperties": len(word)}
        return {"type": "object", "properties": properties, "required": [*word], **closed}
    first = [{"const": value} for value in word]
    return {"type": "array", "prefixItems": first, "minItems": len(first), "maxItems": len(first)}


def _given_numbers(parts: Parts, types: list[str]) -> list[Numbers]:
    """Those of enum and const that all parts allow. All is taken as its digits say: 0.3 is a multiple of 0.1."""
    limits = [_limits(part) for part in parts]
    texts = []
    for word in words_in(parts) or ():
        if type_of(word) not in NUMERIC:
            continue
        number = Fraction(str(word))
        is_whole = number.denominator == 1
        if (is_whole or "number" in types) and all(_is_within(number, said) for said in limits):
            texts.append(str(number.numerator) if is_whole else json.dumps(word))
    return [Numbers(tuple(texts))] if texts else []


def _limits(part: Schema) -> dict[str, Fraction]:
    """Raises ValueError."""
    said = {name: part[name] for name in OF_NUMBERS if name in part}
    for name, number in said.items():
        check_number(name, number, Real)
    return {name: Fraction(str(number)) for name, number in said.items()}


def _is_within(number: Fraction, said: dict[str, Fraction]) -> bool:
    step = said.get("multipleOf")
    return (
        said.get("minimum", number) <= number <= said.get("maximum", number)
        and ("exclusiveMinimum" not in said or said["exclusiveMinimum"] < number)
        and ("exclusiveMaximum" not in said or number < said["exclusiveMaximum"])
        and (step is None or (step != 0 and number % step == 0))
    )


def large_bounds(part: Schema) -> dict[str, int | float]:
    """Those that llguidance, which has them as floats, may round."""
    bounds = {name: part[name] for name in (*MINIMA, *MAXIMA) if isinstance(part.get(name), int | float)}
    return {name: bound for name, bound in bounds.items() if abs(bound) >= EXACT}


def _held(parts: Parts, is_whole: bool) -> Parts:
    """The parts with bounds that llguidance does not make looser, and that it has room for. Raises ValueError.

    is_whole: they are said of whole numbers alone.
    """
    held: list[Schema] = []
    is_near_int64 = False
    for part in parts:
        large = large_bounds(part)
        held.append({name: value for name, value in part.items() if name not in large})
        held += [_held_bound(name, bound, is_whole) for name, bound in large.items()]
        is_near_int64 = is_near_int64 or any(abs(bound) > MAX_OPEN for bound in large.values())
    if is_whole and is_near_int64:
        held.append({"minimum": MIN_INT64, "maximum": MAX_INT64})
    return tuple(held)


def _held_bound(name: str, bound: int | float, is_whole: bool) -> Schema:
    """This bound, or the next float that is tighter: only numbers that no float is lie between the two.

    Raises ValueError for a bound of whole numbers that none of 64 bits fits.
    """
    inclusive, exclusive = MINIMA if name in MINIMA else MAXIMA
    inwards = 1 if name in MINIMA else -1
    is_exclusive = name == exclusive
    if is_whole:
        last = int(bound) + (inwards if is_exclusive else 0)
        if last * inwards > (MAX_INT64 if inwards == 1 else -MIN_INT64):
            raise ValueError(
                f"{name} {bound} leaves no whole number that can be written here: from {MIN_INT64} to {MAX_INT64}"
            )
        bound, is_exclusive = min(max(last, MIN_INT64), MAX_INT64), False
        if bound == MAX_INT64:
            return {inclusive: bound}  # no float, but llguidance stops there
    limit = float(bound)
    if is_exclusive and Fraction(str(limit)) == Fraction(str(bound)):
        return {name: bound}
    is_looser = limit < bound if inwards == 1 else limit > bound
    if is_looser or (is_exclusive and limit == bound):
        limit = math.nextafter(limit, inwards * math.inf)
    return {inclusive: int(limit)}  # which is whole; llguidance reads the digits of some floats as the float beside it


def _bounds(parts: Parts, name: str) -> list[int]:
    """Raises ValueError."""
    found = [part[name] for part in parts if name in part]
    for number in found:
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"{name} must be a whole number from 0, found {shorten(number)}")
    return found
