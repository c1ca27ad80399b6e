"""Formats by their names, and an answer's text read in one of them: whole, or as it comes.

parse_tool_calls('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
"""

import json
import logging
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from nanovllm.checks.values import check_choice
from nanovllm.features.chat_template.reads import written_call
from nanovllm.features.tool_calls.json_formats import hermes, jamba, json_list, llama3_json, mistral, nemotron_json
from nanovllm.features.tool_calls.pythonic import pythonic
from nanovllm.features.tool_calls.qwen3_coder import qwen3_coder
from nanovllm.features.tool_calls.schema_types import in_standard_words
from nanovllm.features.tool_calls.source import Event, Reading, Source

logger = logging.getLogger("nanovllm")

# vLLM's names, and those of ours that stand for no family.
FORMATS: dict[str, Callable[[Source], Reading[None]]] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "qwen3_xml": qwen3_coder,
    "llama3_json": llama3_json,
    "llama4_json": llama3_json,
    "pythonic": pythonic,
    "llama4_pythonic": pythonic,
    "mistral": mistral,
    "jamba": jamba,
    "nemotron_json": nemotron_json,
}
FORCED_LIST = "json_list"  # what an answer is made to be where a format's own form cannot be (forced.py)
READERS = FORMATS | {FORCED_LIST: json_list}
# Texts of a chat template, and the format of a model that has such a one; the first that is found counts.
SIGNS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<tool_calls>", "jamba"),
    ("<TOOLCALL>", "nemotron_json"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4_pythonic"),
    ("func_name1(params_name1=", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
)
# What a format's calls are told by. Where a tokenizer has these as special tokens, a text must show them.
MARKERS = {
    **dict.fromkeys(("hermes", "qwen3_coder", "qwen3_xml"), ("<tool_call>", "</tool_call>")),
    **dict.fromkeys(("llama3_json", "llama4_json"), ("<|python_tag|>",)),
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
}
EXAMPLE: dict[str, Any] = {"name": "get_time", "arguments": {"place": "Oslo"}}
IN_TAGS = re.compile(r"<(\w+)>[\s\[]*\{.*\}[\s\]]*</\1>", re.DOTALL)  # a call, or a list of them
IDS = string.ascii_letters + string.digits


class ToolCall(NamedTuple):
    """arguments: JSON, or its beginning where the answer ends within the call."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """content: what is not a call's, None if there is nothing else."""

    content: str | None
    tool_calls: list[ToolCall]


def format_of(template: Any, special: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The format of the model that this chat template belongs to: the one in which the template itself writes a call.

    special: the tokenizer's special tokens, by their names. Without calls in the template, SIGNS have to do. The log
    names the format once, and says so if there is none.
    """
    return _format_of(str(template), json.dumps(dict(special), default=str))


@lru_cache(maxsize=64)
def _format_of(template: str, special: str) -> str:
    try:
        written = written_call(template, json.loads(special), EXAMPLE)
    except ValueError:  # it takes too much
        written = None
    signs = [name for sign, name in SIGNS if sign in template]
    found = signs if written is None else [name for name in (*signs, *FORMATS) if _reads(name, written)]
    if found:
        logger.info("calls of tools are read in the format %r, which is the chat template's", found[0])
        if found[0] == "llama3_json" and (tags := IN_TAGS.search(written or "")):
            logger.warning("the chat template writes them between tags, which no format here has: %r", tags[0])
        return found[0]
    how = "says nothing of how calls are written" if written is None else f"writes calls as no format here: {written!r}"
    logger.warning("the chat template %s; they are read in the format 'hermes' (or say which: --tool-call-parser)", how)
    return "hermes"


def _reads(format_name: str, written: str) -> bool:
    """Does a format's reader find the example in what a template has made of it?

    Calls in Python are read at an answer's beginning, which here follows white space or a special token. Some
    templates write a text in them without its quotes, or with a letter too many ('%sr'), so the function's name has to
    do.
    """
    if FORMATS[format_name] is pythonic:
        return re.search(rf"(^|\s|\|>)\[{EXAMPLE['name']}\(", written) is not None
    calls = parse_tool_calls(written, format_name).tool_calls
    return [call.name for call in calls] == [EXAMPLE["name"]] and json.loads(calls[0].arguments) == EXAMPLE["arguments"]


def parse_tool_calls(text: str, format_name: str = "hermes", tools: Iterable[Any] = ()) -> Parsed:
    """A whole answer's calls, as a stream of one piece has them; what is no call is content.

    format_name: one of FORMATS. tools: as OpenAI's API describes them; where a format has no types, their schemas say
    what is a number and what a text.
    """
    stream = ToolCallStream(format_name, schemas_of(tools))
    return parsed([*stream.feed(text), *stream.end()])


def parsed(events: Iterable[Event]) -> Parsed:
    """What events add up to. A call within which the answer ends has the beginning of its arguments."""
    content, calls = "", []
    for event in events:
        if event.kind == "text":
            content += event.text
        elif event.kind == "begin":
            calls.append(ToolCall(event.text, ""))
        elif event.kind == "arguments":
            name, arguments = calls.pop()
            calls.append(ToolCall(name, arguments + event.text))
    return Parsed(content or (None if calls else ""), calls)


class ToolCallStream:
    """An answer's events (source.py) as its text comes. White space, ";", "," and list brackets alone beside calls are
    nobody's. functions: schemas_of() the tools; those who read the samples of a request share them."""

    def __init__(self, format_name: str, functions: dict[str, dict[str, Any]]) -> None:
        check_choice("the format of tool calls", format_name, READERS)
        self._source = Source(functions)
        self._events = READERS[format_name](self._source)
        self._blank: list[Event] = []  # text since the last call, as long as it is nobody's content
        self._is_blank, self._has_called = True, False

    def feed(self, text: str, has_ended: bool = False) -> list[Event]:
        events: list[Event] = []
        for event in self._source.feed(self._events, text, has_ended):
            if event.kind == "text":
                self._blank.append(event)
                self._is_blank = self._is_blank and not event.text.strip(" \t\r\n;,[]")
                if not self._is_blank:
                    events += self._blank
                    self._blank = []
                continue
            if event.kind == "begin":
                self._blank, self._is_blank, self._has_called = [], True, True
            events.append(event)
        return events

    def end(self) -> list[Event]:
        """The last events: nothing more will come."""
        events = self.feed("", has_ended=True)
        return events if self._has_called else events + self._blank


def schemas_of(tools: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Name -> JSON schema of the arguments. Of what is no function there is nothing to say."""
    functions = (tool.get("function") for tool in tools if isinstance(tool, dict))
    named = (given for given in functions if isinstance(given, dict) and isinstance(given.get("name"), str))
    return {given["name"]: in_standard_words(given.get("parameters") or {}) for given in named}


def call_id(format_name: str) -> str:
    """A new one. Mistral's templates take nine letters and digits, and nothing else."""
    is_short = format_name == "mistral"
    return "".join(secrets.choice(IDS) for _ in range(9)) if is_short else f"call_{secrets.token_hex(12)}"
