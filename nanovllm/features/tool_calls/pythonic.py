"""Calls as a list in Python, [f(a=1), g()]: Llama 3.2's and Llama 4's."""

import ast
import json
import re
from typing import Any

from nanovllm.features.tool_calls.source import Event, Malformed, Reading, Source

NAME = re.compile(r"[A-Za-z_][\w.]*")
SIGNIFICANT = re.compile(r"[\\'\"()\[\]{}]")
START, END = "<|python_start|>", "<|python_end|>"


def pythonic(source: Source) -> Reading[None]:
    """A list at the answer's beginning, perhaps between two tags. What is behind it, or no call, is text."""
    begins: tuple[str, ...] = (START, "[")
    while (yield from source.call(_call(source, begins))):
        begins = (",",)
        yield from source.skip_spaces()
        if (yield from source.skip("]")):
            yield from source.skip_spaces()
            yield from source.skip(END)
            break
    yield from source.until()


def _call(source: Source, begins: tuple[str, ...]) -> Reading[None]:
    """A call, whole: only then is it known whether its arguments are values."""
    yield from source.skip_spaces()
    for text in begins:
        yield from source.skip(text) if text == START else source.expect(text)
        yield from source.skip_spaces()
    if (found := (yield from source.match(NAME))) is None:
        raise Malformed
    name = source.take(found.end())
    if (yield from source.skip_spaces()) != "(":
        raise Malformed
    text = yield from _to_last_bracket(source)
    try:
        call: Any = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise Malformed
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise Malformed from None
    yield source.begin(name, must_be_known=True)
    yield Event("arguments", written)


def _to_last_bracket(source: Source) -> Reading[str]:
    """Text from a bracket to the one that closes it."""
    depth, quote, at = 0, "", 0
    while True:
        while found := SIGNIFICANT.search(source.rest, at):
            sign, at = found[0], found.end()
            if sign == "\\":
                at += 1
            elif sign in "'\"":
                quote = "" if quote == sign else quote or sign
            elif not quote:
                depth += 1 if sign in "([{" else -1
                if depth <= 0:
                    return source.take(at)
        if source.ended:
            raise Malformed
        at = max(at, len(source.rest))  # the rest has been looked through; an escaped character may not be there
        yield None
