"""Which parts of a grammar in GBNF become terminals, as Lark's notation has them (chapter 8).

GBNF speaks of characters alone. Lark's rules are made of terminals, which are regular expressions. Inside a terminal
masks are fast, but it takes all that it can, even where that leaves nothing for what has to follow. So a grammar that
is regular becomes one terminal, and in others all neighbors that are regular become one, unless one of these could
swallow what follows another: then it is a rule, and the same is asked of its parts, down to single characters.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import groupby

from nanovllm.features.grammar.gbnf import EMPTY, START, Item, Rules, is_character, read_gbnf
from nanovllm.features.grammar.lark import NO_FORCING, quoted
from nanovllm.features.grammar.oracle import Oracle

MAX_ASKED = 1_000_000  # characters of questions to llguidance: half a second. What is not asked becomes a terminal


def lark_of_gbnf(text: str, oracle: Oracle) -> str:
    """The grammar in Lark's notation. Raises ValueError."""
    grammar = _Grammar(read_gbnf(text))
    while greedy := grammar.greedy_parts(oracle):
        grammar.opened |= greedy
    return grammar.lark() + NO_FORCING * (grammar.asked > MAX_ASKED)


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
        if item == Item(item.what) and is_character(item.what):
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
        if item.what in self.opened and item.what.startswith('"') and not is_character(item.what):
            return [Item(quoted(character)) for character in json.loads(item.what)]
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
        longer = [item for item in following if item.most != 1 or not is_character(item.what)]
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


def _first_character(what: str) -> set[str]:
    """Of a string or a class. Beyond ASCII, characters have bytes in common, and terminals are told apart by bytes."""
    if what.startswith('"'):
        what = quoted(json.loads(what)[:1])
    codes = [int(code, 16) for code in re.findall(r"\\U(.{8})", what)]
    is_ascii = what.isascii() and max(codes, default=0) < 128 and not what.startswith(("/[^", "/./"))
    return {what} - {EMPTY} if is_ascii else {what, r"/[^\x00-\x7F]/"}
