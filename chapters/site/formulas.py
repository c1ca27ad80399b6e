"""Formulas as MathML: what a text has between ```text formula and ```, and powers and roots inside a sentence.

A formula is written as one would type it: a * b, a / b, a^k, √r, parentheses, words. So it can be read in a terminal
and on GitHub, where LaTeX in such a block could not. A browser that does not know MathML shows its letters. Two spaces
or more, where a line has them after a formula, begin a remark on it.
"""

import re
from html import escape

TOKEN = re.compile(r"\s*(\d[\d,.]*\d|\d|\.\.\.|>=|<=|//|[A-Za-zλτρΣ][A-Za-z0-9_]*(?:\[[^\]]*\])?|²|.)")
RELATIONS = {"=": "=", ">=": "≥", "<=": "≤"}
# In a sentence: a^k, a^(k+1), (1 - 8/128)^n, 2^24, √12
INLINE = re.compile(r"√\w+|(?:\([^()]*\)|\b\w+)\^(?:\([^()]*\)|\w+)")
LONG_NAME = 2  # letters: a longer one is a word of the language


class Group(str):
    """What is drawn of parentheses; inside: the same without them."""

    inside: str

    def __new__(cls, drawn: str, inside: str) -> "Group":
        group = super().__new__(cls, drawn)
        group.inside = inside
        return group


class Parser:
    def __init__(self, text: str) -> None:
        self.tokens, self.at = [token for token in TOKEN.findall(text.strip()) if token], 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    @property
    def before(self) -> str:
        return self.tokens[self.at - 2] if self.at > 1 else ""

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def relation(self) -> str:
        drawn = self.sum()
        while self.next in RELATIONS:
            drawn += f"<mo>{RELATIONS[self.take()]}</mo>{self.sum()}"
        return drawn

    def sum(self) -> str:
        drawn = ""
        if self.next == "-":
            drawn = f"<mo>{operator(self.take())}</mo>"
        drawn += self.product()
        while self.next in ("+", "-"):
            drawn += f"<mo>{operator(self.take())}</mo>{self.product()}"
        return drawn

    def product(self) -> str:
        drawn, last = "", self.power()
        while self.next and self.next not in {*RELATIONS, "+", "-", ")", ","}:
            if self.next == "/":
                self.take()
                last = f"<mfrac>{row(bare(last))}{row(bare(self.power()))}</mfrac>"
                continue
            if self.next in ("*", "×"):
                self.take()
                drawn, last = f"{drawn}{last}<mo>·</mo>", self.power()
            else:  # words stand side by side
                drawn, last = f'{drawn}{last}<mspace width="0.3em"/>', self.power()
        return drawn + last

    def power(self) -> str:
        base = self.atom()
        while self.next in ("^", "²"):
            exponent = "<mn>2</mn>" if self.take() == "²" else row(bare(self.atom()))
            base = f"<msup>{row(base)}{exponent}</msup>"
        return base

    def atom(self) -> str:
        token = self.take()
        if token == "(":
            inside = self.relation()
            if self.next == ")":
                self.take()
            grows = "" if re.search("<mfrac|<msup", inside) else ' stretchy="false"'
            return Group(f"<mrow><mo{grows}>(</mo>{inside}<mo{grows}>)</mo></mrow>", inside)
        if token == "√":
            return f"<msqrt>{self.atom()}</msqrt>"
        if found := re.fullmatch(r"(\w+)\[(.*)\]", token):
            inside = Parser(found[2]).relation()
            return f"{name(found[1])}<mo>[</mo>{inside}<mo>]</mo>"
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token == "a" and is_word(self.before) and is_word(self.next):
            return f"<mtext>{token}</mtext>"  # the article: "tokens a second"
        return name(token) if token[0].isalpha() else f"<mo>{escape(token)}</mo>"


def is_word(token: str) -> bool:
    return len(token) >= LONG_NAME and token.isalpha()


def name(token: str) -> str:
    return f"<mi>{token}</mi>" if len(token) < LONG_NAME else f"<mtext>{escape(token)}</mtext>"


def operator(sign: str) -> str:
    return "−" if sign == "-" else sign


def row(drawn: str) -> str:
    return f"<mrow>{drawn}</mrow>"


def bare(drawn: str) -> str:
    """Without the parentheses that a fraction or an exponent makes needless."""
    return drawn.inside if isinstance(drawn, Group) else drawn


def math(text: str, is_block: bool = False) -> str:
    kind = ' display="block"' if is_block else ""
    return f"<math{kind}>{row(Parser(text).relation())}</math>"


def figure(text: str) -> str:
    """The lines of a block, each a formula with what is said of it."""
    rows = ""
    for line in text.strip("\n").split("\n"):
        before, formula, remark = split(line)
        cells = [f"<td>{escape(before)}</td>" if before else "", f"<td>{math(formula, is_block=not before)}</td>"]
        rows += f"<tr>{''.join(cells)}<td>{escape(remark)}</td></tr>" if remark else f"<tr>{''.join(cells)}</tr>"
    return f'<div class="formula scroll" tabindex="0" role="group" aria-label="{escape(text.strip())}">' + (
        f'<table role="presentation">{rows}</table></div>\n'
    )


def split(line: str) -> tuple[str, str, str]:
    """A word before the formula, the formula, and a remark after it. Around an = there may be several spaces."""
    pieces = [piece.strip() for piece in re.split(r" {3,}", line.strip())]
    at = next((at for at, piece in enumerate(pieces) if "=" in piece), 0)
    if len(pieces) == 1 or at > 1 or "=" not in line:
        return "", " ".join(pieces), ""
    return pieces[0] if at else "", pieces[at], " ".join(pieces[at + 1 :])


def in_sentence(text: str) -> str:
    """HTML of a text with its powers and roots set."""
    drawn, end = "", 0
    for found in INLINE.finditer(text):
        drawn += escape(text[end : found.start()]) + math(found[0])
        end = found.end()
    return drawn + escape(text[end:])
