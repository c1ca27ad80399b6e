"""How a chat's answer is read: reasoning, calls of tools and content, whole and as it comes."""

from dataclasses import dataclass, field
from typing import Any

from nanovllm import CompletionOutput
from nanovllm.features.reasoning.think import Reasoning
from nanovllm.features.tool_calls.parse import ToolCallStream, call_id, parsed
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
    tools              those of the request
    reasoning          what stands around the model's; None: it has none
    shows_reasoning    or is it left out?
    several            calls; otherwise those after the first are left out
    ends_with_calls    is "tool_calls" the reason for which an answer with calls ends?
    """

    format: str = ""
    ids: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    reasoning: Reasoning | None = None
    shows_reasoning: bool = True
    several: bool = True
    ends_with_calls: bool = True

    @property
    def is_plain(self) -> bool:
        return not self.format and self.reasoning is None

    def message(self, text: str, has_nulls: bool = False) -> tuple[dict[str, Any], bool]:
        """The fields of a whole answer's message beside its role, and whether it has a whole call.

        A call within which the answer ends is there as far as it goes, as in a stream, which has sent it by then.
        """
        reader = Reader(self)
        events = reader.events(text, has_ended=True)
        thought = "".join(event.text for event in events if event.kind == "reasoning") or None
        answer = parsed((event for event in events if event.kind != "reasoning"), keep_cut=True)
        content = answer.content or (None if thought or answer.tool_calls else "")
        fields: dict[str, Any] = {"content": content, "refusal": None}
        if answer.tool_calls:
            calls = answer.tool_calls if self.several else answer.tool_calls[:1]
            fields["tool_calls"] = [
                {"id": call_id(self.ids), "type": "function", "function": call._asdict()} for call in calls
            ]
        thought = thought if self.shows_reasoning else None
        if thought or has_nulls:
            fields |= {"reasoning": thought, "reasoning_content": thought}
        return fields, any(event.kind == "end" for event in events)


PLAIN = Reading()


class Reader:
    """An answer that comes in pieces.

    num_calls: that have begun. num_whole: that have ended.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading, self._source = reading, Source()
        self._reasoning = None if reading.reasoning is None else reading.reasoning.read(self._source)
        self._calls = ToolCallStream(reading.format, reading.tools) if reading.format else None
        self.num_calls = self.num_whole = 0

    def events(self, text: str, has_ended: bool) -> list[Event]:
        found = self._split(text, has_ended)
        if self._calls is None:
            return found
        events: list[Event] = []
        for event in found:
            events += self._calls.feed(event.text) if event.kind == "text" else [event]
        return events + (self._calls.end() if has_ended else [])

    def _split(self, text: str, has_ended: bool) -> list[Event]:
        if self._reasoning is None:
            return [Event("text", text)] if text else []
        self._source.rest += text
        self._source.ended = has_ended
        events = []
        while (event := next(self._reasoning, None)) is not None:
            events.append(event)
        return events

    def deltas(self, text: str, has_ended: bool) -> list[Delta]:
        """What is new, as OpenAI's chunks say it."""
        deltas = (self._delta(event) for event in self.events(text, has_ended))
        return [delta for delta in deltas if delta]

    def _delta(self, event: Event) -> Delta:
        if event.kind == "text":
            return {"content": event.text}
        if event.kind == "reasoning":
            return {"reasoning": event.text, "reasoning_content": event.text} if self.reading.shows_reasoning else {}
        self.num_calls += event.kind == "begin"
        self.num_whole += event.kind == "end"
        if event.kind not in ("begin", "arguments") or (self.num_calls > 1 and not self.reading.several):
            return {}
        call: dict[str, Any] = {"index": self.num_calls - 1}
        if event.kind == "begin":
            call |= {"id": call_id(self.reading.ids), "type": "function"}
        function = {"name": event.text, "arguments": ""} if event.kind == "begin" else {"arguments": event.text}
        return {"tool_calls": [call | {"function": function}]}


def finish_reason(reading: Reading, sample: CompletionOutput, has_calls: bool) -> str | None:
    """An answer that was cut short says so, calls or not."""
    is_calling = has_calls and reading.ends_with_calls and sample.finish_reason == "stop"
    return "tool_calls" if is_calling else sample.finish_reason
