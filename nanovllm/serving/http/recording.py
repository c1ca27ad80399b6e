"""A stream's events, kept while they come: whoever asks follows them from where he likes, as often as he likes."""

import asyncio
from collections.abc import Iterable

from nanovllm.serving.http.responses import Put


class Recording:
    """events: each as it travels, with its blank line. An event's number is its place."""

    def __init__(self, events: Iterable[str] = (), has_ended: bool = False) -> None:
        self.events, self.has_ended = list(events), has_ended
        self._changed = asyncio.Condition()

    async def put(self, text: str) -> None:
        """One event or several."""
        self.events += [f"{part}\n\n" for part in text.split("\n\n") if part]
        async with self._changed:
            self._changed.notify_all()

    async def end(self) -> None:
        self.has_ended = True
        await self.put("")

    async def follow(self, start: int, put: Put) -> None:
        """Events from this number on, those to come included."""
        while True:
            async with self._changed:
                while start >= len(self.events) and not self.has_ended:
                    await self._changed.wait()
            if start >= len(self.events):
                return
            text = "".join(self.events[start:])
            start = len(self.events)
            await put(text)
