"""What a template leaves out of a conversation: nothing of a user's words is dropped without a word.

A conversation is rendered together with its twin, in which every text, every tool and every call has a mark. What has
lost its mark in the twin's prompt is not in the prompt, either, however short and common its own words are.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nanovllm.features.chat_template.messages import Message

# Texts around reasoning. What comes before a closing one, in a message of the assistant's, may be left out.
CLOSING = re.compile(r"</[\w:]*think\w*>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>|◁/think▷")
TAG = re.compile(rf"<[\w:]*think\w*>|\[THINK\]|<\|channel>|<\|START_THINKING\|>|◁think▷|{CLOSING.pattern}")
SWITCH = re.compile(r"/\w+")  # such as Qwen's /no_think, which some templates read and take out
WHOLE = "qzpartzq"  # a key that the twin's parts have: no template asks for it
MESSAGE, WORDS, TOOL, CALL = "message", "words beside calls", "tool", "call"
BLANK = "blank message"  # of a user, or a tool's result: it has a place in the prompt, and nothing that may be left out


@dataclass(slots=True)
class Twin:
    """messages, tools: those of the twin. marks: (kind, index of the message or tool, mark)."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    marks: list[tuple[str, int, str]] = field(default_factory=list)

    def new_mark(self, kind: str, index: int) -> str:
        mark = f"qz{len(self.marks)}zq"
        self.marks.append((kind, index, mark))
        return mark

    def left_out(self, conversation: list[Message], prompt: str, twins_prompt: str | None) -> Iterator[tuple[str, int]]:
        """(kind, index) of what the prompt does not show. twins_prompt: None if the template did not take the twin."""
        if twins_prompt is not None:
            for kind, index, mark in self.marks:
                if kind != BLANK and mark not in twins_prompt:
                    yield kind, index
            if WHOLE in twins_prompt:  # a list of parts, as Python or JSON writes it
                yield MESSAGE, next(i for i, given in enumerate(conversation) if isinstance(given["content"], list))
        for index, message in enumerate(conversation):
            content = message["content"]
            texts = [content or ""]
            if isinstance(content, list):
                texts = [part["text"] for part in content if part["type"] == "text"]
            if not all(_is_shown(told(text, message["role"]), prompt) for text in texts):
                yield kind_of(message), index

    def begun(self, twins_prompt: str, is_continued: bool) -> str:
        """The part of a prompt that belongs to the answer's message: what the model goes on with."""
        last = len(self.messages) - is_continued
        ends = [
            found + len(mark)
            for kind, index, mark in self.marks
            if kind != TOOL and index < last and (found := twins_prompt.rfind(mark)) >= 0
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
    """With a mark in the middle of what is told: its beginning and its end stay, for a template that looks at them."""
    if message["role"] != "assistant":
        text = TAG.sub("", text)  # in the twin's prompt, those that are left are the model's own
    *_, after = TAG.split(text)
    if not after.strip():
        return text if message["role"] == "assistant" else text + twin.new_mark(BLANK, index)
    start = len(text) - len(after.lstrip())
    middle = start + len(after.strip()) // 2
    return text[:middle] + twin.new_mark(kind_of(message), index) + text[middle:]


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


def _is_shown(text: str, prompt: str) -> bool:
    """White space may change, and JSON may escape a word."""
    if (text := text.strip()) in prompt:
        return True
    return all(
        word in prompt or _escaped(word, True) in prompt or _escaped(word, False) in prompt
        for word in text.split()
        if not SWITCH.fullmatch(word)
    )


def _escaped(word: str, ensure_ascii: bool) -> str:
    return json.dumps(word, ensure_ascii=ensure_ascii)[1:-1]
