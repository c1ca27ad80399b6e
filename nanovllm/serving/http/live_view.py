"""The engine's inside, live: what the page at / shows of pool, requests and steps, and how it slows them down.

Drawn in the engine's thread, between two steps, and only while somebody looks. A drawing that took long is followed by
a pause so long that drawing takes MAX_SHARE of the engine's time at most.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.checks.values import check_number, reject_unknown
from nanovllm.serving.async_llm import AsyncLLM, wait_for
from nanovllm.serving.http.live_frames import Drawing
from nanovllm.serving.http.requests import Events, Put, Refused, check_room, event, json_response, read_body
from nanovllm.serving.openai.json_lines import parse_json

logger = logging.getLogger("nanovllm")

INTERVAL_S = 0.1  # between two drawings, at least
MAX_SHARE = 0.02  # of the engine's time
MAX_DELAY_S = 10.0


class _Viewer:
    """A page that is open: the cells that it has not been told of yet."""

    def __init__(self, cells: Iterable[int]) -> None:
        self.stale = set(cells)
        self.changed = asyncio.Event()
        self.changed.set()


class Inside:
    """What pages are told. closing: is the server about to end?

    cells, panels: the newest picture.
    """

    def __init__(self, llm: AsyncLLM, classroom: bool, closing: Callable[[], bool]) -> None:
        self.llm, self.classroom, self.closing = llm, classroom, closing
        self.viewers: set[_Viewer] = set()
        self.cells: dict[int, str] = {}
        self.panels: dict[str, str] = {}
        self.drawing = Drawing(llm.engine)
        self._task: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        return [
            Route("/inside/events", self.show),
            Route("/inside/pace", self.change_pace, methods=["POST"]),
            Route("/inside/forget", self.forget_cache, methods=["POST"]),
        ]

    # -- pages ----------------------------------------------------------------------------------------------------

    async def show(self, request: Request) -> Response:
        """Frames, as server-sent events, as long as the page is open."""
        check_room(request)
        return Response() if request.method == "HEAD" else Events(self._watch)

    async def _watch(self, put: Put) -> None:
        manager = self.llm.engine.block_manager
        pool = {
            "num_blocks": len(manager.blocks),
            "block_size": manager.block_size,
            "blocks_per_cell": self.drawing.cell_size,
        }
        await put(event(pool | self._pace()))
        viewer = _Viewer(self.cells)
        self.viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._keep_drawing())
        try:
            while not self.closing():
                with suppress(asyncio.TimeoutError):
                    await wait_for(viewer.changed.wait(), 1.0)
                is_changed = viewer.changed.is_set()
                viewer.changed.clear()
                if is_changed and self.panels:  # there are none before the first drawing
                    stale, viewer.stale = sorted(viewer.stale), set()
                    cells = {str(i): self.cells[i] for i in stale}
                    await put(event({"cells": cells, "panels": self.panels, **self._pace()}))
        finally:
            self.viewers.discard(viewer)

    def _pace(self) -> dict[str, Any]:
        left = None if self.llm.thread.steps_left == math.inf else max(0, self.llm.thread.steps_left)
        return {"classroom": self.classroom, "steps_left": left, "delay_s": self.llm.thread.delay_s}

    async def _keep_drawing(self) -> None:
        """One drawing for all pages, again and again, until the last one is closed."""
        try:
            await self.llm.call(self.drawing.open)
            while self.viewers:
                frame = None
                pause_s = 1.0  # after a drawing that has failed
                try:
                    frame, seconds = await self.llm.call(self.drawing.draw)
                    pause_s = max(INTERVAL_S, seconds / MAX_SHARE)
                except Exception:
                    logger.exception("a picture could not be drawn")
                if frame is not None:
                    self.cells.update(frame.cells)
                    self.panels = frame.panels
                    for viewer in self.viewers:
                        viewer.stale.update(frame.cells)
                        viewer.changed.set()
                await asyncio.sleep(pause_s)
        finally:
            self._task = None
            if self.classroom:  # whoever has paused the engine has gone
                self.llm.thread.set_pace()
            await self.llm.call(self.drawing.close)

    async def change_pace(self, request: Request) -> Response:
        """{"steps_left": N or null, "delay_s": X}: so many steps, then a pause (0: at once; null: none)."""
        body = await self._controlled(request, ("steps_left", "delay_s"))
        steps_left = body.get("steps_left")
        if steps_left is not None:
            steps_left = check_number("steps_left", steps_left, Integral, 0)
        delay_s = check_number("delay_s", body.get("delay_s", 0.0), Real, 0, MAX_DELAY_S)
        self.llm.thread.set_pace(math.inf if steps_left is None else steps_left, delay_s)
        await self.llm.call(lambda: None)  # now it holds
        for viewer in self.viewers:
            viewer.changed.set()
        return json_response({})

    async def forget_cache(self, request: Request) -> Response:
        """Empty the prefix cache; running requests wait, and begin anew."""
        await self._controlled(request, ())
        return json_response({"done": await self.llm.reset_prefix_cache(reset_running_requests=True)})

    async def _controlled(self, request: Request, known: tuple[str, ...]) -> dict[str, Any]:
        if not self.classroom:
            raise Refused(403, "the engine is not for playing here; start the server with --classroom")
        body = parse_json(await read_body(request, 1000))
        reject_unknown(body, known, "the body")
        return body
