"""Reasoning: where it begins and ends in a text that comes, and in tokens.

parse_reasoning("<think>Two gulls.</think>Two.")
"""

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from nanovllm.checks.values import check_choice
from nanovllm.features.tool_calls.source import Event, Reading, Source

THINK, MISTRAL = ("<think>", "</think>"), ("[THINK]", "[/THINK]")
# vLLM's names -> what stands around the reasoning
TAGS = {"qwen3": THINK, "deepseek_r1": THINK, "deepseek_v3": THINK, "mistral": MISTRAL}
OFF = "none"
CALL, FUNCTION = "<tool_call>", "<function="  # Qwen3.5 may call while it thinks, and that ends it
LONGEST = 16  # tokens that an opening or a closing text may come in; the beginning of a call, twice as many
AT_ONCE = 256  # tokens that are searched for the end of the reasoning


@dataclass(frozen=True, slots=True)
class Reasoning:
    """is_open: the prompt has the opening. If it has not, the answer begins with it, or has no reasoning."""

    opening: str
    closing: str
    is_open: bool

    @classmethod
    def of(cls, parser: str | None, template: Any, begun: str) -> "Reasoning | None":
        """What to look for in an answer; None: it has no reasoning.

        parser: one of TAGS, OFF, or None: what the template has. begun: the part of the prompt that belongs to the
        answer's message: the last tag there says whether reasoning is open.
        """
        known = (name for name in ("qwen3", "mistral") if any(tag in str(template) for tag in TAGS[name]))
        parser = parser or next(known, OFF)
        if parser == OFF:
            return None
        opening, closing = TAGS[parser]
        opened, closed = begun.rfind(opening), begun.rfind(closing)
        if closed > opened:
            return None
        return cls(opening, closing, is_open=opened >= 0 or parser == "deepseek_r1")

    def read(self, source: Source) -> Reading[None]:
        """Events "reasoning", then "text"."""
        while not source.ended and self.opening.startswith(beginning := source.rest.lstrip()[: len(self.opening)]):
            if beginning == self.opening:
                break
            yield None
        if source.rest.lstrip().startswith(self.opening):
            source.take(source.rest.index(self.opening) + len(self.opening))
        elif not self.is_open:
            yield from source.until()
            return
        while (yield from source.until(self.closing, CALL, kind="reasoning")) == CALL:
            if (yield from self._is_call(source)):
                break
            yield Event("reasoning", source.take(len(CALL)))
        yield from source.skip(self.closing)
        yield from source.until()

    def _is_call(self, source: Source) -> Reading[bool]:
        while (is_call := begins_call(source.rest[len(CALL) :])) is None and not source.ended:
            yield None
        return bool(is_call)


def begins_call(after: str) -> bool | None:
    """Is it a call that has this after CALL? None: it may become one."""
    after = after.lstrip()
    if after.startswith(FUNCTION):
        return True
    return None if FUNCTION.startswith(after) else False


class ReasoningCounter:
    """Counts the tokens of an answer that are reasoning: those of the tags, too, but not those of a call that ends it.

    The answer may grow: what has been looked at is not decoded again, but for a little before what is new.
    """

    def __init__(self, reasoning: Reasoning, tokenizer: Any) -> None:
        self.reasoning, self.tokenizer = reasoning, tokenizer
        self._end: int | None = None  # tokens of the reasoning, once it has ended
        self._num_seen = 0

    def count(self, token_ids: list[int]) -> int:
        """token_ids: all of the answer so far."""
        if not self.reasoning.is_open:
            beginning = self.tokenizer.decode(token_ids[:LONGEST]).lstrip()
            if not beginning.startswith(self.reasoning.opening):
                return 0
        while self._end is None and self._num_seen < len(token_ids):
            start = max(0, self._num_seen - 2 * LONGEST)
            self._num_seen = min(self._num_seen + AT_ONCE, len(token_ids))
            end = end_of_reasoning(self.tokenizer, token_ids[start : self._num_seen], self.reasoning.closing)
            self._end = None if end is None else start + end
        return len(token_ids) if self._end is None else self._end


def end_of_reasoning(tokenizer: Any, token_ids: list[int], closing: str) -> int | None:
    """How many tokens there are up to the first closing text, and with it, or before a call. None: neither has come."""

    def place(start: int, end: int) -> int | None:
        return place_of_end(tokenizer.decode(token_ids[start:end]), closing)

    if place(0, len(token_ids)) is None:
        return None
    end = bisect_left(range(len(token_ids)), True, key=lambda num: place(0, num) is not None)
    text = tokenizer.decode(token_ids[:end])
    if text[: place_of_end(text, closing)].endswith(closing):
        return end
    start = end - 1
    while place(start, end) is None:  # until it has the whole beginning of the call
        start -= 1
    return start


def place_of_end(text: str, closing: str) -> int | None:
    """Where reasoning ends in a text: after the closing text, or before a call. None: it does not."""
    for found in re.finditer(f"{re.escape(closing)}|{CALL}", text):
        if found[0] == closing:
            return found.end()
        if begins_call(text[found.end() :]):
            return found.start()
    return None


def parse_reasoning(text: str, parser: str = "qwen3", is_open: bool = False) -> tuple[str | None, str | None]:
    """(reasoning, content) of a whole answer; None for what it does not have.

    parser: one of TAGS. is_open: the prompt has the opening tag already, as with templates that write it themselves.
    """
    check_choice("the reasoning parser", parser, TAGS)
    source = Source()
    source.rest, source.ended = text, True
    found = {"reasoning": "", "text": ""}
    for event in Reasoning(*TAGS[parser], is_open or parser == "deepseek_r1").read(source):
        assert event is not None  # the text is whole
        found[event.kind] += event.text
    return found["reasoning"] or None, found["text"] or None
