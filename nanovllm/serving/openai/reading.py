"""How a chat's answer is read: reasoning, calls of tools and content, whole and as it comes."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nanovllm import CompletionOutput
from nanovllm.features.reasoning.think import Reasoning
from nanovllm.features.tool_calls.parse import ToolCallStream, call_id
from nanovllm.features.tool_calls.source import Event, Source

Delta = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parsers:
    """What a server says of its chats. Which formats its model writes; None: those of its chat template.

    exclude_tools_when_none: with tool_choice "none" the model is not shown the tools.
    template_kwargs: for the chat template, where a body's own chat_template_kwargs does not say otherwise.
    content_format: of messages, for the chat template ("auto", "string" or "openai").
    """

    tool_call: str | None = None
    reasoning: str | None = None
    exclude_tools_when_none: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    content_format: str = "auto"


@dataclass(frozen=True, slots=True)
class Reading:
    """Without arguments: all text is content.

    format             of calls (features/tool_calls); "": none are read
    ids                the model's own format, which says what a call's id looks like
    functions          that it may call, with the schemas of their arguments: schemas_of()
    reasoning          what stands around the model's; None: it has none
    shows_reasoning    or is it left out?
    several            calls; otherwise those after the first are left out
    are_forced         the answer is calls and nothing else: text is the beginning of one that has no name yet
    ends_with_calls    is "tool_calls" the reason for which an answer with calls ends?
    left_out           of what was asked for, as a warning names it
    """

    format: str = ""
    ids: str = ""
    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    reasoning: Reasoning | None = None
    shows_reasoning: bool = True
    several: bool = True
    are_forced: bool = False
    ends_with_calls: bool = True
    left_out: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        return not self.format and self.reasoning is None

    def message(self, text: str, has_nulls: bool = False) -> tuple[dict[str, Any], bool]:
        """What the deltas of a stream add up to: a message's fields beside its role; and has it a whole call?"""
        reader = Reader(self)
        content, thought, calls = "", "", []
        for delta, _, _ in reader.read(text, has_ended=True):
            content += delta.get("content", "")
            thought += delta.get("reasoning", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({name: value for name, value in call.items() if name != "index"})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        is_empty = not (reader.has_thought or calls)
        fields: dict[str, Any] = {"content": content or ("" if is_empty else None), "refusal": None}
        if calls:
            fields["tool_calls"] = calls
        if thought or has_nulls:
            fields |= {"reasoning": thought or None, "reasoning_content": thought or None}
        return fields, reader.has_called


PLAIN = Reading()


class Said(NamedTuple):
    """delta: of a chat; of a completion its text. start, end: where in the answer's text its content is."""

    delta: Any
    start: int
    end: int


class Reader:
    """An answer that comes in pieces, or in one.

    has_thought: there is reasoning, shown or not. has_called: there is a whole call.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading, self._source = reading, Source()
        reasoning = reading.reasoning
        self._parts = self._source.until() if reasoning is None else reasoning.read(self._source)
        self._calls = ToolCallStream(reading.format, reading.functions) if reading.format else None
        self._calls_at: int | None = None  # where the text begins that calls are looked for in
        self._text_end: int | None = None  # of the text that was the last to come
        self._num_calls = 0  # that have begun
        self.has_thought = self.has_called = False

    def read(self, text: str, has_ended: bool) -> list[Said]:
        """What is new, as OpenAI's chunks say it; after the last piece, what the end of the answer brings."""
        said = []
        for event in self.events(text, has_ended):
            if event.kind == "text" and self.reading.are_forced:
                continue
            if event.kind == "text":
                self._text_end = event.at + len(event.text)
                said.append(Said({"content": event.text}, event.at, self._text_end))
            elif delta := self._delta(event):
                self._text_end = None
                said.append(Said(delta, 0, 0))
        if has_ended and self._text_end is not None:  # with the tokens that have ended it
            said.append(Said({"content": ""}, self._text_end, self._text_end))
        return said

    def events(self, text: str, has_ended: bool) -> list[Event]:
        found = self._source.feed(self._parts, text, has_ended)
        if self._calls is None:
            return found
        events: list[Event] = []
        for event in found:
            if event.kind == "text":
                self._calls_at = event.at if self._calls_at is None else self._calls_at
                events += self._placed(self._calls.feed(event.text))
            else:
                events.append(event)
        return events + (self._placed(self._calls.end()) if has_ended else [])

    def _placed(self, events: list[Event]) -> list[Event]:
        return [replace(event, at=event.at + (self._calls_at or 0)) for event in events]

    def _delta(self, event: Event) -> Delta:
        if event.kind == "reasoning":
            self.has_thought = True
            return {"reasoning": event.text, "reasoning_content": event.text} if self.reading.shows_reasoning else {}
        self._num_calls += event.kind == "begin"
        if self._num_calls > 1 and not self.reading.several:
            return {}
        self.has_called |= event.kind == "end"
        call: dict[str, Any] = {"index": self._num_calls - 1}
        if event.kind == "begin":
            head = {"id": call_id(self.reading.ids), "type": "function"}
            return {"tool_calls": [call | head | {"function": {"name": event.text, "arguments": ""}}]}
        if event.kind == "arguments":
            return {"tool_calls": [call | {"function": {"arguments": event.text}}]}
        return {}


def finish_reason(reading: Reading, sample: CompletionOutput, has_calls: bool) -> str | None:
    """An answer that was cut short says so, calls or not."""
    is_calling = has_calls and reading.ends_with_calls and sample.finish_reason == "stop"
    return "tool_calls" if is_calling else sample.finish_reason
