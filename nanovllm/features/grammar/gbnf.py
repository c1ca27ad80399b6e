"""GBNF, llama.cpp's notation of grammars, becomes Lark's notation, as llguidance extends it (chapter 8).

Here it is read; gbnf_terminals.py decides which of its parts are terminals, on which everything depends.

llguidance's own gbnf_to_lark does not look whether a terminal swallows what has to follow: `root ::= a b`,
`a ::= [a-z]+`, `b ::= "x"` can never end. It also leaves out zeros ("\\u00e9ab" means another character) and takes
classes for Rust's regular expressions ([a&&b], [a--b]).
"""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from nanovllm.checks.values import shorten
from nanovllm.features.grammar.lark import quoted

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


def read_gbnf(text: str) -> Rules:
    """Each group in brackets is a rule, too. Line breaks may stand between any two signs, as in XGrammar's notation.

    Raises ValueError.
    """
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
            is_text = last.what.startswith('"') and not is_character(last.what)
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
        return quoted("".join(_character(each, line) for each in re.findall(CHARACTER, inside, re.DOTALL)))
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


def is_character(what: str) -> bool:
    """Or a class of characters; not a longer string, an empty one, or the name of a rule."""
    return what.startswith("/") or (what.startswith('"') and len(json.loads(what)) == 1)
