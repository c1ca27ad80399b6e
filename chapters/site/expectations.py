"""A question before a surprising table: the reader types what they expect, and then sees the answer beside it.

In a text it is a quotation, directly before the table or what a lab has printed:

    > **What do you expect?** How many of the sixteen answers are right?
"""

import hashlib
import re
from collections.abc import Callable

from markdown_it.token import Token

from chapters.words import ENGLISH, Words

NAMES_CODE = re.compile(r"\*\*\[`.*`\]\(.*\) · `.*`\*\*")  # above a quote of the engine's code
PRINTED = ("fence", "table_open")
PICTURE = ("html_block", "text")  # what text.py makes of a paragraph that is one: it shows what was printed
REMARK = 25  # words: a paragraph of fewer (a scene of the lab, "Look at two rows.") does not answer yet
LEADS_ON = 50  # words: a paragraph of fewer that ends with a colon says nothing of what follows it

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

    end_of_answer() says what answers it. Raises ValueError where nothing does.
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
            raise ValueError(f"nothing that answers it follows the question {question!r}")
        name = hashlib.sha256(question.encode()).hexdigest()[:8]
        said = {name: words(f"expect.{name}") for name in ("asks", "expect", "show")}
        form = FORM.format(name=name, question=inline_html(question), **said)
        covered += [raw(form), *tokens[at:end], raw("</div>\n")]
        at = end
    return covered


def end_of_answer(tokens: list[Token], at: int) -> int:
    """After what is printed below the question, and the first paragraph (or list) about it. The lesson goes on there.

    A picture of what was printed shows the answer, too. A short paragraph that ends with a colon leads to something
    else, and so does the heading of a quote of the engine's code.
    """
    is_printed = is_said = False
    while at < len(tokens) and not is_said:
        token = tokens[at]
        if token.type in PRINTED:
            if is_printed and not (token.type == "fence" and token.info.strip() == "text lab"):
                break  # code, or a diagram: no part of what the lab has printed
            is_printed = True
        elif token.type == "paragraph_open":
            text = tokens[at + 1].content
            num_words = len(text.split())
            if NAMES_CODE.fullmatch(text) or (text.endswith(":") and num_words < LEADS_ON):
                break
            is_said = num_words >= REMARK
        elif token.type in ("bullet_list_open", "ordered_list_open"):
            is_said = True
        elif token.type not in PICTURE:
            break
        at = end_of_block(tokens, at)
    return at


def end_of_block(tokens: list[Token], at: int) -> int:
    depth = int(tokens[at].nesting)
    at += 1
    while depth:
        depth += tokens[at].nesting
        at += 1
    return at


def raw(content: str) -> Token:
    return Token("html_block", "", 0, content=content)
