"""Formats whose calls are JSON objects: Hermes' and Qwen's, Llama 3's, Mistral's, and a plain list."""

import re

from nanovllm.features.tool_calls.json_object import call_object, value
from nanovllm.features.tool_calls.source import Malformed, Reading, Source

MISTRAL = "[TOOL_CALLS]"
NAME = re.compile(r"[^\s\[\]{}\"]+")


def hermes(source: Source) -> Reading[None]:
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>. The last tag may be missing."""

    def call() -> Reading[None]:
        yield from source.expect("<tool_call>")
        yield from source.skip_spaces()
        yield from call_object(source)
        yield from source.skip_spaces()
        yield from source.skip("</tool_call>")

    while (yield from source.until("<tool_call>")):
        yield from source.call(call())


def llama3_json(source: Source) -> Reading[None]:
    """{"name": "f", "parameters": {...}}, several with ";" or a line's end between them, perhaps behind a tag."""

    def call() -> Reading[None]:
        yield from source.skip("<|python_tag|>")
        yield from source.skip_spaces()
        yield from call_object(source, is_bare=True)

    while (yield from source.until("<|python_tag|>", "{")):
        yield from source.call(call())


def json_list(source: Source) -> Reading[None]:
    """[{"name": "f", "arguments": {...}}, ...], and nothing else: what an answer is made to be where no other form is.

    What cannot be read on is text.
    """

    def call() -> Reading[None]:
        yield from source.skip_spaces()
        yield from call_object(source)

    def item(begins: str) -> Reading[None]:
        yield from source.skip_spaces()
        yield from source.expect(begins)
        yield from call()

    begins = "["
    while (yield from source.call(item(begins))):
        begins = ","
        yield from source.skip_spaces()
        if (yield from source.skip("]")):
            break
    yield from source.until()


def mistral(source: Source) -> Reading[None]:
    """[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or in later models [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}.

    Those of 2025 write [TOOL_CALLS]f[ARGS]{...}, some with [CALL_ID] and an id before [ARGS].
    """

    def call() -> Reading[None]:
        yield from source.expect(MISTRAL)
        yield from source.skip_spaces()
        if (name := (yield from source.match(NAME))) is None:
            raise Malformed
        function = source.take(name.end())
        if (yield from source.skip("[CALL_ID]")) and (own_id := (yield from source.match(NAME))):
            source.take(own_id.end())
        yield from source.skip("[ARGS]")
        if (yield from source.skip_spaces()) != "{":
            raise Malformed
        yield source.begin(function)
        yield from value(source, is_sent=True)

    def of_list(begins: tuple[str, ...]) -> Reading[None]:
        for text in begins:
            yield from source.expect(text)
            yield from source.skip_spaces()
        yield from call_object(source)

    while (yield from source.until(MISTRAL)):
        if not (yield from _is_list(source)):
            yield from source.call(call())
            continue
        begins: tuple[str, ...] = (MISTRAL, "[")
        while (yield from source.call(of_list(begins))):
            begins = (",",)
            yield from source.skip_spaces()
            if (yield from source.skip("]")):
                break


def _is_list(source: Source) -> Reading[bool]:
    """Does a list stand behind the marker?"""
    while not (behind := source.rest[len(MISTRAL) :].lstrip()) and not source.ended:
        yield None
    return behind.startswith("[")
