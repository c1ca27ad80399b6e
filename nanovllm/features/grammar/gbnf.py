"""GBNF, llama.cpp's notation of grammars, becomes Lark's notation, as llguidance extends it (chapter 8).

GBNF speaks of characters alone. Lark's rules are made of terminals, which are regular expressions. Inside a terminal
masks are fast, but it takes all that it can, even where that leaves nothing for what has to follow. So a grammar that
is regular becomes one terminal, and in others all neighbors that are regular become one, unless one of these could
swallow what follows another: then it is a rule, and the same is asked of its parts, down to single characters.

llguidance's gbnf_to_lark asks nothing: `root ::= a b`, `a ::= [a-z]+`, `b ::= "x"` can never end. It also leaves out
zeros ("\\u00e9ab" means another character) and takes classes for Rust's regular expressions ([a&&b], [a--b]).
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from typing import NamedTuple

from nanovllm.checks.values import shorten
from nanovllm.features.grammar.oracle import Oracle

NAME = "[A-Za-z0-9_-]+"
SIGN = re.compile(
    rf"""
    (?P<blank> [ \t\r\n]+ | \#[^\r\n]* )
  | (?P<rule>  {NAME} (?= [ \t]* ::= ) ) [ \t]* ::=
  | (?P<name>  {NAME} )
  | (?P<text>  " (?: \\. | [^"\\] )* " )
  | (?P<class> \[ (?: \\. | [^\]\\] )* \] )
  | (?P<any>   \. )
  | (?P<times> [*+?] | \{{ \s* [0-9]{{1,9}} \s* (?: , \s* [0-9]{{0,9}} \s* )? \}} )
  | (?P<mark>  [()|] )
    """,
    re.VERBOSE | re.DOTALL,
)
CHARACTER = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\?."
RANGE = re.compile(rf"({CHARACTER})(?:-(?!\Z)({CHARACTER}))?", re.DOTALL)
ESCAPES = {r"\t": "\t", r"\r": "\r", r"\n": "\n", r"\\": "\\", r"\"": '"', r"\[": "[", r"\]": "]", r"\-": "-"}
MAX_RULES = 2000  # llguidance follows them by recursion; see MAX_SIGNS
MAX_ASKED = 1_000_000  # characters of questions to llguidance: half a second. What is not asked becomes a terminal
TIMES = {(1, 1): "", (0, 1): "?", (0, None): "*", (1, None): "+"}
START = ""  # the rule above root; GBNF has no such name, and none that begins with a bracket, as groups' names do
EMPTY = '""'


class Item(NamedTuple):
    """Of a sequence. what: the name of a rule, or a string or a class of characters in Lark's notation."""

    what: str
    least: int = 1
    most: int | None = 1

    def times(self) -> str:
        most = "" if self.most is None else self.most
        return TIMES.get((self.least, self.most), f"{{{self.least},{most}}}")


Rules = dict[str, list[list[Item]]]  # the alternatives of each, which are sequences


def lark_of_gbnf(text: str, oracle: Oracle) -> str:
    """Raises ValueError. Line breaks may stand between any two signs, as in XGrammar's notation."""
    grammar = _Grammar(_rules(text))
    while greedy := grammar.greedy_parts(oracle):
        grammar.opened |= greedy
    return grammar.lark()


class _Grammar:
    """opened: regular rules, strings and classes that are no terminals where they stand in rules; their parts are."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.opened: set[str] = set()
        self.asked = 0  # characters
        self.regular = _never_recursive(rules)
        self.joined: dict[tuple[Item, ...], str] = {}
        for name in [name for name in rules if name not in self.regular]:
            rules[name] = [self._joined(sequence) for sequence in rules[name]]
        self.numbers = {name: number for number, name in enumerate(rules)}
        self.first: dict[str, set[str]] = {name: set() for name in rules}  # what its texts begin with
        self.nullable = {EMPTY}
        known = -1
        while known != (known := len(self.nullable) + sum(map(len, self.first.values()))):
            for name in reversed(rules):
                for sequence in rules[name]:
                    self._begin(name, sequence)

    def _joined(self, sequence: list[Item]) -> list[Item]:
        """With one item in place of several neighbors that are regular."""
        made: list[Item] = []
        for is_terminal, neighbors in groupby(sequence, self._is_terminal):
            items = tuple(neighbors)
            if is_terminal and len(items) > 1:
                name = self.joined.setdefault(items, f"({len(self.rules)}")
                self.rules[name] = [list(items)]
                self.regular.add(name)
                items = (Item(name),)
            made += items
        return made

    def _begin(self, name: str, sequence: list[Item]) -> None:
        for item in sequence:
            self.first[name] |= self._first_of(item)
            if not self._is_nullable(item):
                return
        self.nullable.add(name)

    def _first_of(self, item: Item) -> set[str]:
        return self.first[item.what] if item.what in self.rules else _first_character(item.what)

    def _is_nullable(self, item: Item) -> bool:
        return item.least == 0 or item.what in self.nullable

    def _is_terminal(self, item: Item) -> bool:
        if item == Item(item.what) and _is_character(item.what):
            return True
        return item.what not in self.opened and (item.what in self.regular or item.what not in self.rules)

    def _forms(self) -> Rules:
        """The rules that are no terminals, of those that a text may need."""
        names = [START]
        forms: Rules = {}
        for name in names:
            forms[name] = [[part for item in sequence for part in self._parts(item)] for sequence in self.rules[name]]
            inside = {item.what for sequence in forms[name] for item in sequence if not self._is_terminal(item)}
            names += sorted((inside & self.rules.keys()) - set(names))
        return forms

    def _parts(self, item: Item) -> list[Item]:
        """A string that is opened is a sequence of its characters."""
        if item.what in self.opened and item.what.startswith('"') and not _is_character(item.what):
            return [Item(_quoted(character)) for character in json.loads(item.what)]
        return [item]

    def _following(self) -> dict[Item, set[str]]:
        """For each terminal, and each rule as Item(its name): the characters that may come next."""
        forms = self._forms()
        following: dict[Item, set[str]] = defaultdict(set)
        known = -1
        while known != (known := sum(map(len, following.values()))):
            for name, sequences in forms.items():
                for sequence in sequences:
                    after = following[Item(name)]
                    for item in reversed(sequence):
                        first = self._first_of(item)
                        if self._is_terminal(item):
                            following[item] |= after
                        else:
                            following[Item(item.what)] |= after if item.most == 1 else after | first
                        after = first | after if self._is_nullable(item) else first
        return following

    def greedy_parts(self, oracle: Oracle) -> set[str]:
        """Of terminals, those that could go on where another one has ended and something else may come."""
        following = {item: after for item, after in self._following().items() if self._is_terminal(item)}
        longer = [item for item in following if item.most != 1 or not _is_character(item.what)]
        ends = [f"({self._lark(item)} & SOME) ({' | '.join(after)})" for item, after in following.items() if after]

        def may_go_on(items: list[Item]) -> bool:
            """Is there a text of theirs that begins with another's text and a character that may follow that?"""
            those = " | ".join(map(self._lark, items))
            lines = ["start: TEXT", f"TEXT: END ANY & ({those})", f"END: {' | '.join(ends)}"]
            question = "\n".join([*lines, "SOME: /(?s:.+)/", "ANY: /(?s:.*)/", *self._terminals()])
            self.asked += len(question)
            try:
                return self.asked <= MAX_ASKED and oracle.has_text(question)
            except ValueError:  # too large to tell, or a panic of llguidance's: a rule is right in any case
                return True

        def those_that_may(items: list[Item]) -> set[str]:
            if not items or not ends or not may_go_on(items):
                return set()
            half = len(items) // 2
            return those_that_may(items[:half]) | those_that_may(items[half:]) if half else {items[0].what}

        return those_that_may(longer)

    def _terminals(self) -> list[str]:
        regular = (name for name in self.rules if name in self.regular)
        return [self._definition(self._lark(Item(name)), self.rules[name], self._lark) for name in regular]

    def _definition(self, name: str, sequences: list[list[Item]], written: Callable[[Item], str]) -> str:
        return f"{name}: {' | '.join(' '.join(map(written, sequence)) or EMPTY for sequence in sequences)}"

    def _lark(self, item: Item) -> str:
        """As it stands in a terminal."""
        what = f"RULE_{self.numbers[item.what]}" if item.what in self.rules else item.what
        return what + item.times()

    def lark(self) -> str:
        parts: dict[str, str] = {}  # terminals that have no names in GBNF

        def in_rule(item: Item) -> str:
            if not self._is_terminal(item):
                return self._lark(item).lower() if item.what in self.rules else self._lark(item)
            lark = self._lark(item)
            return lark if item.most == item.least == 1 else parts.setdefault(lark, f"PART_{len(parts)}")

        forms = self._forms().items()
        lines = [self._definition(self._lark(Item(name)).lower(), sequences, in_rule) for name, sequences in forms]
        lines += [f"{name}: {lark}" for lark, name in parts.items()]
        return "\n".join([f"start: rule_{self.numbers[START]}", *lines, *self._terminals()])


def _never_recursive(rules: Rules) -> set[str]:
    """Those from which no way leads to one that can be reached from itself."""
    inside = {
        name: {item.what for each in sequences for item in each} & rules.keys() for name, sequences in rules.items()
    }
    order = TopologicalSorter(inside)
    with suppress(CycleError):  # what comes before the cycles is found nevertheless
        order.prepare()
    found: set[str] = set()
    while ready := order.get_ready():
        order.done(*ready)
        found.update(ready)
    return found - {START}


def _rules(text: str) -> Rules:
    rules: Rules = {START: [[Item("root")]]}
    used: dict[str, int] = {"root": 0}  # names, and a line
    inside: list[tuple[str, int]] = []  # a rule and its open groups: their names and lines

    def group(content: list[Item]) -> Item:
        name = f"({len(rules)}"
        rules[name] = [content]
        return Item(name)

    for kind, written, line in _signs(text):
        if kind == "rule":
            _check_closed(inside)
            rules[written] = [[]]
            inside = [(written, line)]
            continue
        if not inside:
            raise ValueError(f"line {line}: a rule begins with its name and ::=, found {shorten(written)}")
        alternatives = rules[inside[-1][0]]
        sequence = alternatives[-1]
        if written == "(":
            sequence.append(group([]))
            inside.append((sequence[-1].what, line))
        elif written == ")":
            inside.pop()
            if not inside:
                raise ValueError(f"line {line}: found a ) without its (")
        elif written == "|":
            alternatives.append([])
        elif kind == "times":
            if not sequence:
                raise ValueError(f"line {line}: there is nothing before {written} to repeat")
            last = sequence.pop()
            is_text = last.what.startswith('"') and not _is_character(last.what)
            whole = group([last]) if is_text or last != Item(last.what) else last
            least, most = _bounds(written, line)
            sequence.append(whole._replace(least=least, most=most) if most != 0 else Item(EMPTY))
        elif kind == "name":
            used.setdefault(written, line)
            sequence.append(Item(written))
        else:
            sequence.append(Item(_characters(kind, written, line)))
    _check_closed(inside)
    if len(rules) > MAX_RULES:
        raise ValueError(f"it has {len(rules)} rules and groups in brackets, and {MAX_RULES} are taken")
    for name, line in used.items():
        if name not in rules:
            raise ValueError(f"line {line}: there is no rule {shorten(name)}" if line else "there is no rule root")
    return rules


def _signs(text: str) -> Iterator[tuple[str, str, int]]:
    """Of each, its kind (a group of SIGN), how it is written, and its line."""
    line, position = 1, 0
    while position < len(text):
        found = SIGN.match(text, position)
        if found is None:
            raise ValueError(f"line {line}: this cannot be read: {shorten(text[position : position + 100])}")
        kind = str(found.lastgroup)
        if kind != "blank":
            yield kind, found[kind], line
        line += found[0].count("\n")
        position = found.end()


def _check_closed(inside: list[tuple[str, int]]) -> None:
    if len(inside) > 1:
        raise ValueError(f"line {inside[-1][1]}: found a ( without its )")


def _bounds(written: str, line: int) -> tuple[int, int | None]:
    """How often: at least, at most."""
    for bounds, sign in TIMES.items():
        if sign == written:
            return bounds
    least, *rest = map(int, re.findall("[0-9]+", written))
    most = rest[0] if rest else None if "," in written else least
    if most is not None and most < least:
        raise ValueError(f"line {line}: {written} ends before it begins")
    return least, most


def _characters(kind: str, written: str, line: int) -> str:
    """A string, a class or a dot, in Lark's notation."""
    if kind == "any":
        return "/./s"
    inside = written[1:-1]
    if kind == "text":
        return _quoted("".join(_character(each, line) for each in re.findall(CHARACTER, inside, re.DOTALL)))
    caret = "^" if inside.startswith("^") else ""
    if inside == caret:
        raise ValueError(f"line {line}: {written} has no characters")
    ranges = []
    for first, last in RANGE.findall(inside.removeprefix("^")):
        ends = [_character(each, line) for each in (first, last) if each]
        if ends[-1] < ends[0]:
            raise ValueError(f"line {line}: {first}-{last} ends before it begins")
        plain = (end if end.isascii() and end.isalnum() else f"\\U{ord(end):08X}" for end in ends)
        ranges.append("-".join(plain))
    return f"/[{caret}{''.join(ranges)}]/"


def _character(written: str, line: int) -> str:
    if written in ESCAPES:
        return ESCAPES[written]
    code = ord(written) if len(written) == 1 else int(f"0{written[2:]}", 16)
    if len(written) == 2 or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"line {line}: {written} is no character")
    return chr(code)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_character(what: str) -> bool:
    return what.startswith("/") or (what.startswith('"') and len(json.loads(what)) == 1)


def _first_character(what: str) -> set[str]:
    """Of a string or a class. Beyond ASCII, characters have bytes in common, and terminals are told apart by bytes."""
    if what.startswith('"'):
        what = _quoted(json.loads(what)[:1])
    codes = [int(code, 16) for code in re.findall(r"\\U(.{8})", what)]
    is_ascii = what.isascii() and max(codes, default=0) < 128 and not what.startswith(("/[^", "/./"))
    return {what} - {EMPTY} if is_ascii else {what, r"/[^\x00-\x7F]/"}
