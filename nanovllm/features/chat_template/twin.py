"""What a template leaves out of a conversation: nothing of a user's words is dropped without a word.

A conversation is rendered together with its twin, in which every text, every tool and every call has a mark. What has
lost its mark in the twin's prompt is not in the prompt, either, however short and common its own words are.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nanovllm.features.chat_template.messages import Message

# Texts around reasoning. What comes before a closing one, in a message of the assistant's, may be left out.
NAME = r"[\w:]{0,32}think\w{0,32}"  # of a tag; without bounds, a long run of "think" would take time by its square
CLOSING = re.compile(rf"</{NAME}>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>|◁/think▷")
TAG = re.compile(rf"<{NAME}>|\[THINK\]|<\|channel>|<\|START_THINKING\|>|◁think▷|{CLOSING.pattern}")
SWITCH = re.compile(r"/\w+")  # such as Qwen's /no_think, which some templates read and take out
BEGIN = f"qz{secrets.token_hex(4)}"  # of all marks of this process: nobody can write one into a message
WHOLE = f"{BEGIN}partzq"  # a key that the twin's parts have: no template asks for it
MESSAGE, WORDS, TOOL, CALL = "message", "words beside calls", "tool", "call"
MARK = re.compile(rf"{BEGIN}-[0-9]+(?=zq)")  # see Twin.new_mark
# How a template may write a text: as it is, or as JSON.
WRITINGS: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
NEAR = 1000  # characters that a template writes between two messages, mostly
BLANK = "blank message"  # of a user, or a tool's result: it has a place in the prompt, and nothing that may be left out


@dataclass(slots=True)
class Twin:
    """messages, tools: those of the twin. marks: (kind, index of the message or tool, mark)."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    marks: list[tuple[str, int, str]] = field(default_factory=list)

    def new_mark(self, kind: str, index: int) -> str:
        mark = f"{BEGIN}-{len(self.marks)}zq"
        self.marks.append((kind, index, mark))
        return mark

    def left_out(self, conversation: list[Message], prompt: str, twins_prompt: str | None) -> Iterator[tuple[str, int]]:
        """(kind, index) of what the prompt does not show. twins_prompt: None if the template did not take the twin."""
        if twins_prompt is not None:
            places = _places_of_marks(twins_prompt)
            for kind, index, mark in self.marks:
                if kind != BLANK and mark not in places:
                    yield kind, index
            if WHOLE in twins_prompt:  # a list of parts, as Python or JSON writes it
                yield MESSAGE, next(i for i, given in enumerate(conversation) if isinstance(given["content"], list))
        shown, words_are_out = _Shown(prompt), False
        for index, message in enumerate(conversation):
            if words_are_out and kind_of(message) == WORDS:
                continue  # it was said once; to look for the next ones in a long prompt takes time
            content = message["content"]
            texts = [content or ""]
            if isinstance(content, list):
                texts = [part["text"] for part in content if part["type"] == "text"]
            if not all(shown.has(told(text, message["role"])) for text in texts):
                words_are_out = kind_of(message) == WORDS
                yield kind_of(message), index

    def begun(self, twins_prompt: str, is_continued: bool) -> str:
        """The part of a prompt that belongs to the answer's message: what the model goes on with."""
        last = len(self.messages) - is_continued
        places = _places_of_marks(twins_prompt)
        ends = [
            places[mark] + len(mark)
            for kind, index, mark in self.marks
            if kind != TOOL and index < last and mark in places
        ]
        return twins_prompt[max(ends, default=0) :]


def twin_of(conversation: list[Message], tools: list[dict[str, Any]] | None) -> Twin:
    """conversation: in the form in which the template gets it."""
    twin = Twin()
    if tools:
        twin.tools = [_marked_tool(tool, twin, index) for index, tool in enumerate(tools)]
    for index, message in enumerate(conversation):
        content = message["content"]
        if isinstance(content, list):
            content = [
                part if part["type"] == "image" else _marked_part(part, message, twin, index) for part in content
            ]
        elif content is not None:
            content = _marked(content, message, twin, index)
        calls = [_marked_call(call, twin, index) for call in message.get("tool_calls", ())]
        twin.messages.append(message | {"content": content} | ({"tool_calls": calls} if calls else {}))
    return twin


def told(text: str, role: str) -> str:
    """What a message tells: an assistant's without its reasoning."""
    if role != "assistant":
        return text
    *_, after = CLOSING.split(text)
    return after


def kind_of(message: Message) -> str:
    """Some templates, Llama 3's for one, show only the calls of a message with calls. Its words are the model's own."""
    return WORDS if message.get("tool_calls") else MESSAGE


def _marked_part(part: dict[str, Any], message: Message, twin: Twin, index: int) -> dict[str, Any]:
    return part | {"text": _marked(part["text"], message, twin, index), WHOLE: ""}


def _marked(text: str, message: Message, twin: Twin, index: int) -> str:
    """With a mark between the words of what is told: its beginning and its end stay, for a template that looks at them.

    No word is cut in two: it may be a switch (/no_think). Where there is only one, the mark comes after it.
    """
    if message["role"] != "assistant":
        text = TAG.sub("", text)  # in the twin's prompt, those that are left are the model's own
    *_, after = TAG.split(text)
    words = after.strip()
    if not words:
        return text if message["role"] == "assistant" else text + twin.new_mark(BLANK, index)
    gaps = (found.start() for found in re.finditer(r"\s+", words))
    middle = min(gaps, key=lambda place: abs(place - len(words) // 2), default=len(words))
    place = len(text) - len(after.lstrip()) + middle
    return f"{text[:place]} {twin.new_mark(kind_of(message), index)}{text[place:]}"


def _marked_tool(tool: dict[str, Any], twin: Twin, index: int) -> dict[str, Any]:
    function = tool.get("function")
    named = function if isinstance(function, dict) else tool
    if not isinstance(named.get("name"), str):
        return tool
    marked = named | {"name": named["name"] + twin.new_mark(TOOL, index)}
    return tool | {"function": marked} if named is function else marked


def _marked_call(call: dict[str, Any], twin: Twin, index: int) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, dict):
        return call | {"function": function | {"arguments": arguments | {twin.new_mark(CALL, index): ""}}}
    try:
        known = json.loads(arguments)
    except (ValueError, RecursionError):
        known = None
    if not isinstance(known, dict):
        return call
    marked = json.dumps(known | {twin.new_mark(CALL, index): ""}, ensure_ascii=False)
    return call | {"function": function | {"arguments": marked}}


def _places_of_marks(prompt: str) -> dict[str, int]:
    """{mark: where it is in a twin's prompt, the last time}."""
    return {f"{found[0]}zq": found.start() for found in MARK.finditer(prompt)}


class _Shown:
    """Looks for the texts of a prompt, mostly in their order: each after the one before, as are the words of one.

    So most of a prompt is read once for all texts, not once for each.
    """

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt
        self.place = 0  # where the last text ends

    def has(self, text: str) -> bool:
        """White space may change, and JSON may escape a text."""
        text = text.strip()
        for write in WRITINGS:
            written = write(text)
            found = self.prompt.find(written, self.place, self.place + len(written) + NEAR)
            if found >= 0:
                self.place = found + len(written)
                return True
        words = [word for word in text.split() if not SWITCH.fullmatch(word)]
        for start in dict.fromkeys((self.place, 0)):
            for write in WRITINGS:
                end = self._end_of(map(write, words), start)
                if end is not None:
                    self.place = end
                    return True
        return False

    def _end_of(self, words: Iterable[str], start: int) -> int | None:
        """Where words end that come in this order; None: they do not."""
        for word in words:
            found = self.prompt.find(word, start)
            if found < 0:
                return None
            start = found + len(word)
        return start
