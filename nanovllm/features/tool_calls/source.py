"""A text that comes in pieces, and what a reader of it says: the base of every format's reader.

A reader is a generator. It takes text from its Source, yields events, and yields None where it cannot go on before more
text has come. It never looks at where one piece ends and the next begins, so the same text gives the same events
however it was cut.
"""

import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

Result = TypeVar("Result")
MAX_MATCH = 1000  # characters of a name or a number: each piece of a longer one would be read from its beginning again


@dataclass(frozen=True, slots=True)
class Event:
    """What a reader has found.

    "text"       a piece of the answer that is no call's
    "reasoning"  a piece of what the model thought (features/reasoning)
    "begin"      a call of the function that text names
    "arguments"  a piece of that call's arguments, as JSON
    "end"        the call is whole
    "cut"        the answer ends within it; text is all that the model wrote of it
    "broken"     it is not whole, and never will be; text as for "cut"
    """

    kind: str
    text: str = ""


Reading = Generator[Event | None, None, Result]


class Malformed(Exception):
    """What comes is not what the format has at this place."""


class Source:
    """rest: what has come and is not taken yet. taken: all of the call that is being read.

    functions: those that may be called, and the JSON schemas of their arguments; empty if nobody has said.
    """

    def __init__(self, functions: Mapping[str, dict[str, Any]] = MappingProxyType({})) -> None:
        self.functions = functions
        self.rest, self.taken = "", ""
        self.ended, self.is_in_call, self.has_begun = False, False, False

    def take(self, num_chars: int) -> str:
        text, self.rest = self.rest[:num_chars], self.rest[num_chars:]
        if self.is_in_call:
            self.taken += text
        return text

    # -- looking ahead: these wait until they know ------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while not self.rest and not self.ended:
            yield None
        return self.rest[:1]

    def starts_with(self, *texts: str) -> Reading[str]:
        """The first of these texts that comes next; "" if none does."""
        while not self.ended and any(len(t) > len(self.rest) and t.startswith(self.rest) for t in texts):
            yield None
        return next((text for text in texts if self.rest.startswith(text)), "")

    def match(self, pattern: "re.Pattern[str]") -> Reading["re.Match[str] | None"]:
        """The pattern's match, which must end before the text does: there must be something behind it.

        None for one that is longer than any name.
        """
        while not (found := pattern.match(self.rest, 0, MAX_MATCH + 1)) or found.end() == len(self.rest):
            if self.ended or (found is None and self.rest) or len(self.rest) > MAX_MATCH:
                break
            yield None
        return None if found is None or found.end() > MAX_MATCH else found

    # -- taking --------------------------------------------------------------------------------------------------------

    def skip(self, *texts: str) -> Reading[str]:
        """Take the first of these texts that comes next; "" if none does."""
        found = yield from self.starts_with(*texts)
        return self.take(len(found))

    def skip_spaces(self) -> Reading[str]:
        """Take white space. The next character; "" at the end."""
        while (following := (yield from self.peek())).isspace():
            self.take(len(self.rest) - len(self.rest.lstrip()))
        return following

    def expect(self, *texts: str) -> Reading[str]:
        if not (found := (yield from self.skip(*texts))):
            raise Malformed
        return found

    def until(self, *markers: str, kind: str = "text") -> Reading[str]:
        """Say what comes before the first of the markers. The marker, which is not taken; "" if there is none.

        Without markers: all that comes.
        """
        while True:
            places = [(at, -len(marker), marker) for marker in markers if (at := self.rest.find(marker)) >= 0]
            _, _, marker = min(places, default=(0, 0, ""))
            num_chars = (
                self.rest.find(marker) if marker else len(self.rest) - (0 if self.ended else self._held(markers))
            )
            if text := self.take(num_chars):
                yield Event(kind, text)
            if marker or self.ended:
                return marker
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

    def call(self, reading: Reading[Any]) -> Reading[bool]:
        """Read one call. If it is malformed, what the model wrote of it is text; if it has begun, broken or cut."""
        self.taken, self.is_in_call, self.has_begun = "", True, False
        try:
            yield from reading
            is_whole = True
        except Malformed:
            is_whole = False
        self.is_in_call = False
        end = "cut" if self.ended and not self.rest else "broken"
        yield Event("end") if is_whole else Event(end if self.has_begun else "text", self.taken)
        return is_whole
