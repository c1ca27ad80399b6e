"""Calls as a list in Python, [f(a=1), g()]: Llama 3.2's and Llama 4's."""

import json
import re

from nanovllm.features.tool_calls.json_values import collected, value
from nanovllm.features.tool_calls.source import Event, Malformed, Reading, Source

NAME = re.compile(r"[A-Za-z_][\w.]*")
START, END = "<|python_start|>", "<|python_end|>"


def pythonic(source: Source) -> Reading[None]:
    """Lists at the answer's beginning, perhaps between two tags. What follows them, or no call, is text."""
    source.is_python = True
    beginnings: tuple[str, ...] = (START, "[")
    while (yield from source.call(_call(source, beginnings))):
        beginnings = (",",)
        yield from source.skip_brackets(")")
        yield from source.skip_spaces()
        if (yield from source.skip("]")):
            yield from source.skip_spaces()
            yield from source.skip(END)
            if not (yield from source.starts_with("[", after_spaces=0)):
                break
            beginnings = ("[",)
    yield from source.until()


def _call(source: Source, beginnings: tuple[str, ...]) -> Reading[None]:
    """A call begins where the first argument's value does, or where none follows.

    A value that is no literal, such as g(1), makes all of it text. If the call has begun by then, it is cut before that
    value, and the rest of the answer is dropped: arguments that are no JSON run nothing, and what has gone out cannot
    be taken back.
    """
    for text in beginnings:
        yield from source.skip_spaces()
        yield from source.expect(text) if text == "[" else source.skip(text)
    yield from source.skip_spaces()
    name = yield from source.match(NAME)
    yield from source.skip_spaces()
    yield from source.expect("(")
    separator = "{"
    while (following := (yield from source.skip_spaces(",")) or "") not in (")", "]", ""):
        argument = yield from source.match(NAME)
        yield from source.skip_spaces()
        if argument and (yield from source.skip("=")):
            yield from _argument(source, name, f"{separator}{json.dumps(argument)}: ")
            separator = ", "
        elif argument or not source.has_begun:
            raise Malformed
        else:  # a value without a name
            yield from collected(value(source, outer=")]"))
            yield from source.skip_spaces("}:=")
    if following == "":
        raise Malformed
    if not source.has_begun:
        yield source.begin(name, must_be_known=True)
    yield Event("arguments", "}" if separator == ", " else "{}")
    source.is_whole = True
    yield from source.skip(")")


def _argument(source: Source, name: str, key: str) -> Reading[None]:
    """Say a call's argument, and before it the call's name unless it has gone out. Both wait for the value's beginning.

    If that is no literal, nothing has been said of it.
    """
    reading = value(source, outer=")]")
    while (first := next(reading)) is None:
        yield None
    if not source.has_begun:
        yield source.begin(name, must_be_known=True)
    yield Event("arguments", key)
    yield first
    yield from reading
