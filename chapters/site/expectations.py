"""A question before a surprising table: the reader types what they expect, and then sees the answer beside it.

In a text it is a quotation, directly before the table or what a lab has printed:

    > **What do you expect?** How many of the sixteen answers are right?
"""

import hashlib
from collections.abc import Callable

from markdown_it.token import Token

from chapters.words import ENGLISH, Words

ASKS = ENGLISH("expect.asks")

ENDS = ("heading_open", "blockquote_open")  # what no longer belongs to the answer, nor does what is printed next

FORM = """<form class="expect" data-name="{name}">
<p><strong>{asks}</strong> {question}</p>
<div class="typed-in" hidden><label>{expect} <input name="expected" maxlength="200" autocomplete="off"></label>
<button>{show}</button></div>
<p class="expected" role="status" hidden></p>
</form>
<div class="answer">
"""


def asks(tokens: list[Token], at: int, words: Words = ENGLISH) -> bool:
    """Does a question begin at this token?"""
    return tokens[at].type == "blockquote_open" and tokens[at + 2].content.startswith(f"**{words('expect.asks')}**")


def cover(tokens: list[Token], inline_html: Callable[[str], str], words: Words) -> list[Token]:
    """The same tokens, with each question as a form, and what answers it in an element that a script can hide.

    That is the block behind the question and the paragraphs about it. Raises ValueError where there is none.
    """
    covered: list[Token] = []
    at = 0
    while at < len(tokens):
        if not asks(tokens, at, words):
            covered.append(tokens[at])
            at += 1
            continue
        question = tokens[at + 2].content.removeprefix(f"**{words('expect.asks')}**").strip()
        at, end = at + 5, end_of_answer(tokens, at + 5)
        if at == end:
            raise ValueError(f"behind the question {question!r} stands nothing that answers it")
        name = hashlib.sha256(question.encode()).hexdigest()[:8]
        said = {name: words(f"expect.{name}") for name in ("asks", "expect", "show")}
        form = FORM.format(name=name, question=inline_html(question), **said)
        covered += [raw(form), *tokens[at:end], raw("</div>\n")]
        at = end
    return covered


def end_of_answer(tokens: list[Token], at: int) -> int:
    """Behind one block of any kind, and the paragraphs, lists and pictures that follow it."""
    number = 0
    while at < len(tokens) and tokens[at].type not in ENDS:
        if number and tokens[at].type in ("fence", "table_open"):
            break
        depth = int(tokens[at].nesting)
        at, number = at + 1, number + 1
        while depth:
            depth += tokens[at].nesting
            at += 1
    return at


def raw(content: str) -> Token:
    return Token("html_block", "", 0, content=content)
