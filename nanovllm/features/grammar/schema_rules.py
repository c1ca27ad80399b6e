r"""A JSON schema as a grammar in Lark's notation, as llguidance extends it.

llguidance can compile schemas itself, and it still compiles strings and numbers here. Numbers that are given (enum,
const) are written out, since it would round some. And its objects take their keys in one order. A model cannot write a
key whose turn has passed: in a closed object the key is lost, and in an open one the model drifts to a name that was
never declared ("age_2"). In the rules written here

- required keys come in the schema's order, as OpenAI's API promises;
- optional keys come anywhere among them;
- keys that the schema does not declare come after the required ones, and a declared key may come again among them.

Only in a closed object does it matter which optional keys have come already. Writing down every order would take n!
rules. Instead the rules carry a number of 64 bits that llguidance keeps for them (its parametric grammars). These are
the rules of a closed object with a required key "b" and an optional one "a":

    first: "b" more::1 | "a" more::2  # the lowest bit counts required keys; the next is set once "a" has come
    more::_: "" %if eq([0:1], 1) | "," next::_ %if or(lt([0:1], 1), bit_count_lt([1:2], 1))
    next::_: "b" more::incr([0:1]) %if eq([0:1], 0) | "a" more::set_bit(1) %if bit_clear(1)
"""

import json
import re
from dataclasses import dataclass
from itertools import accumulate

from llguidance import regex_to_lark

from nanovllm.features.grammar.lark import quoted
from nanovllm.features.grammar.oracle import Oracle
from nanovllm.features.grammar.parts import Schema, changed
from nanovllm.features.grammar.schema_values import (
    MAXIMA,
    MIN_INT64,
    MINIMA,
    OF_NUMBERS,
    Array,
    AsJson,
    Leaf,
    Numbers,
    Object,
    Shape,
    Value,
    Values,
    Word,
    large_bounds,
)

NUM_BITS = 64  # of a rule's number
MAX_COUNT = 1_000_000  # items; a larger maxItems is no bound
MAX_LEVELS = 1000  # llguidance compiles rules by recursion; its stack, which would end the process, holds twice as many
OF_BLANKS = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/|\b[A-Za-z_]+\d*\b|[()]')  # strings, regexes, names, brackets


@dataclass(frozen=True)
class Form:
    """How an object is written: opening, then members with commas between them, then closing.

    A member is `before`, its name, `after`, a colon and the value. any_name is a regular expression for names that are
    not declared. These have no escapes, so each has a single spelling, and none of them spells a declared name.
    """

    opening: str
    closing: str
    comma: str
    colon: str
    before: str
    after: str
    any_name: str


JSON = Form(
    opening="OPEN_OBJECT",
    closing="CLOSE_OBJECT",
    comma="COMMA",
    colon="COLON",
    before='"',
    after='"',
    any_name=r"/[^\"\\\x00-\x1F\x7F]*/",
)
# The parameters of a call in Qwen3-Coder's form. Its reader (tool_calls/qwen3_coder.py) strips names, and a text ends
# there at the first of these tags.
XML_NAME = r"/[^<>\s\x00-\x1F]([^<>\x00-\x1F]{0,200}[^<>\s\x00-\x1F])?/"
XML = Form(opening="", closing="", comma="", colon="", before="<parameter=", after=">\n", any_name=XML_NAME)
XML_END = "\n</parameter>\n"
XML_TAGS = r"/(?s:.*)(<\/parameter>|<\/function>|<parameter=)(?s:.*)/"


def lark_of_schema(schema: Schema, form: str, is_closed: bool, guidance: Schema, oracle: Oracle) -> str:
    """The grammar. ValueError for a schema that is invalid, that llguidance does not support, or that nothing fits.

    form: "json", or "parameters" of a call in Qwen3-Coder's form. is_closed: objects have only the properties that
    their schemas name, unless these say otherwise. guidance: llguidance's options ("x-guidance").
    """

    def in_our_words(part: Schema) -> Schema:
        return _in_todays_words(_without_unknown_format(part, oracle))

    schema = changed(schema, in_our_words)
    by_the_letter = _within_reach(changed(schema, lambda part: _loosened(part, is_closed)))
    try:
        oracle.schema_matcher(json.dumps(by_the_letter | {"x-guidance": guidance}))
    except ValueError as error:  # it names an unsupported keyword
        hint = 'Put "x-guidance": {"coerce_one_of": true} at the top of the schema'
        raise ValueError(str(error).replace("Enable 'coerce_one_of' option", hint)) from None
    return Rules(Values(schema, form, is_closed, oracle, in_our_words), guidance, oracle).lark()


def _without_unknown_format(part: Schema, oracle: Oracle) -> Schema:
    """An unknown format is an annotation (JSON Schema Validation 2020-12, section 7.2.1)."""
    name = part.get("format")
    is_unknown = isinstance(name, str) and not oracle.knows(name)
    return {key: value for key, value in part.items() if key != "format" or not is_unknown}


def _in_todays_words(part: Schema) -> Schema:
    """Until draft 4, and in OpenAPI 3.0, true and false say whether a bound is itself excluded."""
    made = dict(part)
    for inclusive, exclusive in (MINIMA, MAXIMA):
        if isinstance(made.get(exclusive), bool):
            is_exclusive = made.pop(exclusive)
            if is_exclusive and inclusive in made:
                made[exclusive] = made.pop(inclusive)
    return made


def _within_reach(schema: Schema) -> Schema:
    """A schema for llguidance to check, without large bounds and numbers below MIN_INT64, which the rules here hold.

    Some of them would end the process. They may be anywhere: a $ref leads to any place of a schema.
    """

    def number(digits: str) -> int | float:
        found: int | float = json.loads(digits)
        return max(found, MIN_INT64)

    def without_large_bounds(part: Schema) -> Schema:
        part = _in_todays_words(part)
        large = large_bounds(part)
        return {name: value for name, value in part.items() if name not in large}

    made: Schema = json.loads(
        json.dumps(schema), parse_int=number, parse_float=number, object_hook=without_large_bounds
    )
    return made


def _loosened(part: Schema, is_closed: bool) -> Schema:
    """A part of the schema for llguidance to check, without what only the rules here hold.

    That is how many keys an object has, if some of them are optional, and which of the numbers that are given are
    within bounds. If objects are closed as a whole, what forbids other keys is left out, too: llguidance would take it
    by the letter, for each part of an object by itself.
    """
    held_here = {"minProperties", "maxProperties"}
    if part.keys() & {"enum", "const"}:
        held_here |= OF_NUMBERS
    if is_closed and part.get("additionalProperties") is False:
        held_here.add("additionalProperties")
    return {key: value for key, value in part.items() if key not in held_here}


class Rules:
    """The rules of a schema's values."""

    def __init__(self, values: Values, guidance: Schema, oracle: Oracle) -> None:
        self.values, self.oracle = values, oracle
        self._of_leaves = {name: value for name, value in guidance.items() if name not in OF_BLANKS}
        self._of_leaves["whitespace_flexible"] = False
        pattern = guidance.get("whitespace_pattern")
        blanks = f"(?:{pattern})?" if pattern else ""
        comma, colon = guidance.get("item_separator", ","), guidance.get("key_separator", ":")
        tokens = {
            "OPEN_OBJECT": r"\{" + blanks,
            "CLOSE_OBJECT": blanks + r"\}",
            "OPEN_LIST": r"\[" + blanks,
            "CLOSE_LIST": blanks + r"\]",
            "COMMA": f"{blanks}(?:{comma}){blanks}",
            "COLON": f"{blanks}(?:{colon}){blanks}",
        }
        self.lines = [f"{name}: {_regex(text)}" for name, text in tokens.items()]
        self._names: dict[str, str] = {}  # of rules and terminals, by their text

    def lark(self) -> str:
        for value, shapes in enumerate(self.values.shapes):
            if shapes:
                self.lines.append(f"v{value}: {' | '.join(map(self._expression, shapes))}")
        _check_levels(self.lines)
        return "\n".join(["start: v0", *self.lines])

    def _expression(self, shape: Shape) -> str:
        if isinstance(shape, Leaf):
            schema = shape.schema | {"x-guidance": self._of_leaves}
            return self._rule("leaf", f"%json {json.dumps(schema, ensure_ascii=False)}")
        if isinstance(shape, Object):
            return self._object(shape)
        if isinstance(shape, Array):
            return self._array(shape)
        if isinstance(shape, AsJson):
            return f"v{shape.value} {quoted(XML_END)}"
        if isinstance(shape, Numbers):
            return self._rule("NUMBER", " | ".join(map(quoted, shape.texts)))
        if isinstance(shape, Word):
            return quoted(shape.text + XML_END)
        fits = [_regex(fit) for fit in shape.fits] or ["/(?s:.*)/"]
        terminal = self._rule("TEXT", f"({' & '.join(fits)} & ~{XML_TAGS}) {quoted(XML_END)}")
        return self._rule("text", terminal, "[lazy]")

    def _rule(self, kind: str, text: str, attributes: str = "") -> str:
        """The name of a rule, or of a terminal (in capitals). The same text has the same name."""
        key = f"{kind}: {text}"
        if key not in self._names:
            self._names[key] = name = f"{kind}{len(self.lines)}"
            self.lines.append(f"{name}{attributes}: {text}")
        return self._names[key]

    def _can_be(self, value: Value) -> bool:
        return bool(self.values.shapes[value])

    def _array(self, array: Array) -> str:
        first, most = array.first, array.most
        impossible = [place for place, value in enumerate(first) if not self._can_be(value)]
        if impossible:
            most = impossible[0] if most is None else min(impossible[0], most)
        first = first if most is None else first[:most]
        text = ""
        if self._can_be(array.more):
            item, num = f"v{array.more}", len(first)
            least, left = max(0, array.least - num), None if most is None else most - num
            text = _repeated(f"COMMA {item}", least, left) if first else _in_a_row(item, "COMMA", least, left)
        for place, value in reversed([*enumerate(first)]):
            text = f"{'COMMA ' if place else ''}v{value} {text}"
            text = text if place < array.least else f"({text})?"
        return f"OPEN_LIST {text} CLOSE_LIST"

    # -- objects ------------------------------------------------------------------------------------------------------

    def _object(self, shape: Object) -> str:
        form = XML if shape.form == "parameters" else JSON
        members = {}
        for name, value in shape.members.items():
            if self._can_be(value):
                written = json.dumps(name, ensure_ascii=False)[1:-1] if form is JSON else name
                members[name] = f"{quoted(form.before + written + form.after)} {form.colon} v{value}"
        required = [members[name] for name in shape.required]
        least = max(0, shape.least - len(required))  # of the members that are not required
        most = None if shape.most is None else shape.most - len(required)
        optional = [text for name, text in members.items() if name not in shape.required and most != 0]
        others = self._others(shape, form) if most != 0 else []
        if optional and not others:
            inside = self._each_once(required, optional, form.comma, least, most)
        elif not others:
            inside = f" {form.comma} ".join(required) or '""'
        elif least == 0 and most is None:
            inside = self._with_others(required, optional, [*others, *members.values()], form.comma)
        elif not optional:
            inside = self._with_others(required, [], others, form.comma, least, most)
        else:
            raise ValueError(
                "minProperties and maxProperties beside optional properties need additionalProperties: false"
            )
        return f"{form.opening} {inside} {form.closing}"

    def _with_others(
        self,
        required: list[str],
        optional: list[str],
        others: list[str],
        comma: str,
        least: int = 0,
        most: int | None = None,
    ) -> str:
        """Required members with optional ones among them, then the others. least, most: of the others."""
        other = self._rule("other", " | ".join(others))
        if not required:
            return _in_a_row(other, comma, least, most)
        among = f"({self._rule('optional', ' | '.join(optional))} {comma})* " if optional else ""
        text = f" {comma} ".join(among + member for member in required)
        return f"{text} {_repeated(f'{comma} {other}', least, most)}"

    def _each_once(self, required: list[str], optional: list[str], comma: str, least: int, most: int | None) -> str:
        """Required members, and optional ones anywhere among them. least, most: of the optional ones.

        The number's lowest bits count the required members that have come; then each optional one has a bit, as long as
        there are any. Those without a bit may come twice.
        """
        num_required, num_bits = len(required), len(required).bit_length()
        bits = range(num_bits, min(num_bits + len(optional), NUM_BITS))
        have_bits = len(bits) == len(optional)
        if not have_bits and (least or most is not None):
            raise ValueError(f"an object with minProperties or maxProperties may have {len(bits)} optional properties")
        come, beside = f"[0:{num_bits}]", f"[{bits.start}:{bits.stop}]"
        all_have_come = f"eq({come}, {num_required})" if required else ""
        some_are_missing = f"lt({come}, {num_required})" if required else ""
        enough = f"bit_count_ge({beside}, {least})" if least else ""
        room = f"bit_count_lt({beside}, {len(bits) if most is None else min(most, len(bits))})" if have_bits else ""
        more, following = f"more{len(self.lines)}", f"next{len(self.lines)}"
        first = [f"{member} {more}::1" for member in required[:1]]
        ways = [f"{member} {more}::incr({come}) {_if(f'eq({come}, {place})')}" for place, member in enumerate(required)]
        for bit, member in zip(bits, optional, strict=False):
            first.append(f"{member} {more}::{1 << bit}")
            ways.append(f"{member} {more}::set_bit({bit}) {_if(f'bit_clear({bit})', room)}")
        for member in optional[len(bits) :]:
            first.append(f"{member} {more}::0")
            ways.append(f"{member} {more}::_")
        goes_on = _if(some_are_missing, room, joined_by="or") if have_bits else ""
        self.lines.append(f'{more}::_: "" {_if(all_have_come, enough)} | {comma} {following}::_ {goes_on}')
        self.lines.append(f"{following}::_: {' | '.join(ways)}")
        return f"({' | '.join(first)}){'' if required or least else '?'}"

    def _others(self, shape: Object, form: Form) -> list[str]:
        """Members whose names are not declared: those that fit each pattern, and any others."""
        if shape.additional is not None and form is JSON and not shape.members and not shape.patterns:
            key = self._expression(Leaf({"type": "string"}))  # no name can be meant for another: escapes do no harm
            return [f"{key} COLON v{shape.additional}"] if self._can_be(shape.additional) else []
        declared = " | ".join(map(quoted, shape.members))
        undeclared = [f"~({declared})"] if declared else []
        kinds = [([_regex(pattern), *undeclared], value) for pattern, value in shape.patterns]
        if shape.additional is not None:
            fit_none = [f"~{_regex(pattern)}" for pattern, _ in shape.patterns]
            kinds.append(([*fit_none, *undeclared], shape.additional))
        found = []
        for conditions, value in kinds:
            name = " & ".join([form.any_name, *conditions])
            key = f"{quoted(form.before)} ({name}) {quoted(form.after)}"
            if self._can_be(value) and self.oracle.has_text(f"start: KEY\nKEY: {key}"):
                found.append(f"{self._rule('KEY', key)} {form.colon} v{value}")
        return found


def _regex(pattern: str) -> str:
    """A pattern as JSON Schema has it, in Lark's notation."""
    return f"/{regex_to_lark(pattern, 'dw')}/"


def _if(*conditions: str, joined_by: str = "and") -> str:
    """conditions: "" is none."""
    joined = ""
    for condition in filter(None, conditions):
        joined = f"{joined_by}({joined}, {condition})" if joined else condition
    return f"%if {joined}" if joined else ""


def _repeated(text: str, least: int, most: int | None) -> str:
    if most is not None and most <= 0:
        return '""'
    return f"({text}){{{least},{'' if most is None or most > MAX_COUNT else most}}}"


def _in_a_row(item: str, comma: str, least: int, most: int | None) -> str:
    """From least to most items with commas between them."""
    if most == 0:
        return '""'
    text = f"{item} {_repeated(f'{comma} {item}', max(0, least - 1), None if most is None else most - 1)}"
    return text if least else f"({text})?"


def _check_levels(lines: list[str]) -> None:
    """Raise ValueError where llguidance, which compiles a rule when it is first named, would go too deep."""
    tokens_of: dict[str, list[str]] = {}
    levels_of: dict[str, int] = {}
    for line in lines:
        name, *tokens = TOKENS.findall(line)
        brackets = accumulate({"(": 1, ")": -1}.get(token, 0) for token in tokens)
        tokens_of[name], levels_of[name] = tokens, 1 + max(brackets, default=0)
    path = [(iter(["v0"]), 0)]
    levels = 0
    known: set[str] = set()
    while path:
        names, own_levels = path[-1]
        name = next(names, "")
        if not name:
            path.pop()
            levels -= own_levels
        elif name in tokens_of and name not in known:
            known.add(name)
            path.append((iter(tokens_of[name]), levels_of[name]))
            levels += levels_of[name]
            if levels > MAX_LEVELS:
                raise ValueError(f"its values lie more than {MAX_LEVELS} rules deep in each other")
