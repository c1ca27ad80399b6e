"""A text that comes in pieces, and what a reader of it says: the base of every format's reader.

A reader is a generator. It takes text from its Source, yields events, and yields None where it cannot go on before more
text has come. It never looks at where one piece ends and the next begins, so the same text gives the same events
however it was cut: a whole answer is a stream of one piece.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from string import whitespace
from types import MappingProxyType
from typing import Any, TypeVar

Result = TypeVar("Result")
PIECE = 4096  # characters that are read at a time: what is taken is cut off the rest, which is copied
SPACES = re.compile(r"\s*")
MAX_MATCH = 1000  # characters of a name or a number: each piece of a longer one would be read from its beginning again


@dataclass(frozen=True, slots=True)
class Event:
    """What a reader has found. at: where in the text, of "text" and "reasoning", which are as the model wrote them.

    "text"       a piece of the answer that is no call's
    "reasoning"  a piece of what the model thought (features/reasoning)
    "begin"      a call of the function that text names; what has begun stays a call
    "arguments"  a piece of that call's arguments: together they are JSON, or the beginning of it in a call that is cut
    "end"        the call is whole
    "cut"        the answer ends within it, or what comes is no argument
    """

    kind: str
    text: str = ""
    at: int = field(default=0, compare=False)


Reading = Generator[Event | None, None, Result]


def changed(reading: Reading[Result], change: Callable[[str], Event | None]) -> Reading[Result]:
    """A reading that says what `change` makes of its texts; of None nothing is said."""
    while True:
        try:
            event = next(reading)
        except StopIteration as end:
            result: Result = end.value
            return result
        if event is None:
            yield None
        elif (other := change(event.text)) is not None:
            yield other


class Malformed(Exception):
    """What comes is not what the format has at this place, or the text ends here."""


class Source:
    """rest: what has come and is not taken yet. at: characters taken. taken: those of a call that has not begun.

    functions: those that may be called, and the JSON schemas of their arguments; empty if nobody has said.
    is_python: values are Python's literals.
    """

    def __init__(self, functions: Mapping[str, dict[str, Any]] = MappingProxyType({})) -> None:
        self.functions = functions
        self.rest, self.taken, self.at = "", "", 0
        self.ended, self.is_in_call, self.has_begun, self.is_whole = False, False, False, False
        self.is_python = False

    def feed(self, reading: Reading[Any], text: str, has_ended: bool) -> list[Event]:
        """What a reading says of more text, and of the end if nothing will follow."""
        events = []
        for start in range(0, len(text) or 1, PIECE):
            self.rest += text[start : start + PIECE]
            self.ended = has_ended and start + PIECE >= len(text)
            while (event := next(reading, None)) is not None:
                events.append(event)
        return events

    def take(self, num_chars: int) -> str:
        text, self.rest = self.rest[:num_chars], self.rest[num_chars:]
        self.at += len(text)
        if self.is_in_call and not self.has_begun:
            self.taken += text
        return text

    # -- looking ahead: these wait until they know ------------------------------------------------------------------

    def peek(self, num_chars: int = 1) -> Reading[str]:
        """The next characters; fewer at the end."""
        while len(self.rest) < num_chars and not self.ended:
            yield None
        return self.rest[:num_chars]

    def starts_with(self, *texts: str, after_spaces: int | None = None) -> Reading[str]:
        """The first of these texts that comes next; "" if none does. after_spaces: after so many characters of rest,
        and the white space that follows them."""
        start = 0 if after_spaces is None else (yield from self.after_spaces(after_spaces))
        while True:
            following = self.rest[start:]
            if self.ended or not any(len(t) > len(following) and t.startswith(following) for t in texts):
                return next((text for text in texts if following.startswith(text)), "")
            yield None

    def after_spaces(self, start: int) -> Reading[int]:
        """The place in rest of the first character from `start` on that is no white space; at the end, perhaps of none.

        What was seen to be white space is not looked at again as more of it comes.
        """
        while (found := SPACES.match(self.rest, start)) and found.end() == len(self.rest) and not self.ended:
            start = found.end()
            yield None
        return found.end() if found else start

    def match(self, pattern: "re.Pattern[str]") -> Reading[str]:
        """What the pattern matches next, taken; "" if it does not, or if the text ends with it, or it has no end."""
        while not (found := pattern.match(self.rest, 0, MAX_MATCH + 1)) or found.end() == len(self.rest):
            if self.ended or (found is None and self.rest) or len(self.rest) > MAX_MATCH:
                return ""
            yield None
        return "" if found.end() > MAX_MATCH else self.take(found.end())

    # -- taking --------------------------------------------------------------------------------------------------------

    def skip(self, text: str) -> Reading[bool]:
        """Take this text if it comes next. What is left of an answer that ends within it is nobody's."""
        found = yield from self.starts_with(text)
        if not found and self.ended and text.startswith(self.rest):
            self.take(len(self.rest))
        self.take(len(found))
        return bool(found)

    def skip_spaces(self, more: str = "") -> Reading[str]:
        """Take white space, and these characters. The next character; "" at the end."""
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip(whitespace + more)))
            if self.rest or self.ended:
                return self.rest[:1]
            yield None

    def skip_brackets(self, brackets: str) -> Reading[None]:
        """Take those of these brackets that come next, and white space before them: a model has written too many."""
        while found := (yield from self.starts_with(*brackets, after_spaces=0)):
            self.take(self.rest.index(found) + 1)

    def expect(self, text: str) -> Reading[None]:
        if not (yield from self.skip(text)):
            raise Malformed

    def until(self, *markers: str, kind: str = "text", closing: tuple[str, ...] = ()) -> Reading[str]:
        """Say what comes before the first of the markers. The marker, which is not taken; "" if there is none.

        Without markers: all that comes. closing: more of them; an answer that ends within one has no such text.
        """
        markers += closing
        while True:
            places = [(at, -len(marker), marker) for marker in markers if (at := self.rest.find(marker)) >= 0]
            num_chars, _, marker = min(places, default=(len(self.rest), 0, ""))
            if not marker:
                num_chars -= self._held(closing if self.ended else markers)
            start = self.at
            if text := self.take(num_chars):
                yield Event(kind, text, start)
            if marker:
                return marker
            if self.ended:
                self.take(len(self.rest))
                return ""
            yield None

    def _held(self, markers: Iterable[str]) -> int:
        """Characters at the end with which a marker may begin."""
        longest = max(map(len, markers), default=0)
        ends = (len(self.rest) - at for at in range(max(0, len(self.rest) - longest + 1), len(self.rest)))
        return next((num for num in ends if any(m.startswith(self.rest[-num:]) for m in markers)), 0)

    # -- a call --------------------------------------------------------------------------------------------------------

    def begin(self, name: Any, must_be_known: bool = False) -> Event:
        if not isinstance(name, str) or not name:
            raise Malformed
        if must_be_known and self.functions and name not in self.functions:
            raise Malformed
        self.has_begun = True
        return Event("begin", name)

    def call(self, reading: Reading[None]) -> Reading[bool]:
        """Read one call. Was it one? If it has not begun, what the model wrote of it is text.

        It is whole once its arguments are, which the reading says by is_whole, whatever follows them. Nothing follows a
        call that is not: the rest of the answer is dropped.
        """
        self.taken, start = "", self.at
        self.is_in_call, self.has_begun, self.is_whole = True, False, False
        with suppress(Malformed):
            yield from reading
        self.is_in_call = False
        if not self.has_begun:
            yield Event("text", self.taken, start)
        elif self.is_whole:
            yield Event("end")
        else:
            while not self.ended:
                self.take(len(self.rest))
                yield None
            self.take(len(self.rest))  # the beginning of something
            yield Event("cut")
        return self.has_begun
