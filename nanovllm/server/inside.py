"""The engine's inside, live: what the page at / shows of pool, requests and steps, and how it slows them down.

Drawn in the engine's thread, between two steps, and only while somebody looks. A drawing that took long is followed by
a pause so long that drawing takes MAX_SHARE of the engine's time at most.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.async_llm import AsyncLLM
from nanovllm.core.block_manager import BlockEvent, cdiv
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.server import pictures
from nanovllm.server.http import Events, Put, Refused, event, json_response, read_body
from nanovllm.tools.lines import parse_json
from nanovllm.validation import check_number, reject_unknown

INTERVAL_S = 0.1  # between two drawings, at least
MAX_SHARE = 0.02  # of the engine's time
NUM_STEPS, HISTORY_S = 100, 180  # what the charts show
MAX_CELLS, MAX_CARDS = 4096, 48
MAX_DELAY_S = 10.0
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Sample(NamedTuple):
    """Counters at a moment, for what happened since: seconds, tokens that were sampled, blocks probed and found."""

    time: float
    num_output_tokens: int
    queries: int
    hits: int


class Frame(NamedTuple):
    """What has changed since the last one: cells of the pool, and all panels, as HTML."""

    cells: dict[int, str]
    panels: dict[str, str]


class _Viewer:
    """A page that is open: the cells that it has not been told of yet."""

    def __init__(self, cells: Iterable[int]) -> None:
        self.stale = set(cells)
        self.changed = asyncio.Event()
        self.changed.set()


class Inside:
    """What pages are told. closing: is the server about to end?

    cells, panels   the newest picture; they belong to the event loop
    the others      belong to the engine's thread
    """

    def __init__(self, llm: AsyncLLM, classroom: bool, closing: Callable[[], bool]) -> None:
        self.llm, self.engine, self.classroom, self.closing = llm, llm.engine, classroom, closing
        self.viewers: set[_Viewer] = set()
        self.cells: dict[int, str] = {}
        self.panels: dict[str, str] = {}
        self._drawing: asyncio.Task[None] | None = None
        self.is_open = False
        self.cell_size = cdiv(len(self.engine.block_manager.blocks), MAX_CELLS)  # blocks
        self._names: dict[int, str] = {}  # seq_id -> A, B, C
        self._num_names = 0

    def routes(self) -> list[Route]:
        return [
            Route("/inside/events", self.show),
            Route("/inside/pace", self.change_pace, methods=["POST"]),
            Route("/inside/forget", self.forget_cache, methods=["POST"]),
        ]

    # -- pages ----------------------------------------------------------------------------------------------------

    async def show(self, request: Request) -> Response:
        """Frames, as server-sent events, as long as the page is open."""
        return Events(self._watch)

    async def _watch(self, put: Put) -> None:
        manager = self.engine.block_manager
        pool = {"num_blocks": len(manager.blocks), "block_size": manager.block_size, "blocks_per_cell": self.cell_size}
        await put(event(pool | self._pace()))
        viewer = _Viewer(self.cells)
        self.viewers.add(viewer)
        if self._drawing is None:
            self._drawing = asyncio.create_task(self._keep_drawing())
        try:
            while not self.closing():
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(viewer.changed.wait(), 1.0)
                if viewer.changed.is_set():
                    viewer.changed.clear()
                    stale, viewer.stale = sorted(viewer.stale), set()
                    cells = {str(i): self.cells[i] for i in stale}
                    await put(event({"cells": cells, "panels": self.panels, **self._pace()}))
        finally:
            self.viewers.discard(viewer)

    def _pace(self) -> dict[str, Any]:
        left = None if self.llm.steps_left == math.inf else max(0, self.llm.steps_left)
        return {"classroom": self.classroom, "steps_left": left, "delay_s": self.llm.delay_s}

    async def _keep_drawing(self) -> None:
        """One drawing for all pages, again and again, until the last one is closed."""
        try:
            await self.llm.call(self._open)
            while self.viewers:
                frame, seconds = await self.llm.call(self._draw)
                if frame is not None:
                    self.cells.update(frame.cells)
                    self.panels = frame.panels
                    for viewer in self.viewers:
                        viewer.stale.update(frame.cells)
                        viewer.changed.set()
                await asyncio.sleep(max(INTERVAL_S, seconds / MAX_SHARE))
        finally:
            self._drawing = None
            if self.classroom:  # whoever has paused the engine has gone
                self.llm.set_pace()
            await self.llm.call(self._close)

    async def change_pace(self, request: Request) -> Response:
        """{"steps_left": N or null, "delay_s": X}: so many steps, then a pause (0: at once; null: none)."""
        body = await self._controlled(request, ("steps_left", "delay_s"))
        steps_left = body.get("steps_left")
        if steps_left is not None:
            steps_left = check_number("steps_left", steps_left, Integral, 0)
        delay_s = check_number("delay_s", body.get("delay_s", 0.0), Real, 0, MAX_DELAY_S)
        self.llm.set_pace(math.inf if steps_left is None else steps_left, delay_s)
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

    # -- the engine's thread --------------------------------------------------------------------------------------

    def on_step(self, output: SchedulerOutput) -> None:
        if self.is_open:
            stats = self.engine.stats
            self._steps.append((stats.num_prefill_tokens, output.num_tokens, stats.step_time_s, len(output.preempted)))

    def _open(self) -> None:
        self.is_open = True
        self._steps: deque[tuple[int, int, float, int]] = deque(maxlen=NUM_STEPS + 1)
        self._steps.append((self.engine.stats.num_prefill_tokens, 0, 0.0, 0))
        self._events: list[BlockEvent] = []
        self._samples: deque[Sample] = deque(maxlen=HISTORY_S)
        self._drawn: list[str] = []  # of each block, what its cell shows
        self._seen: tuple[Any, ...] = ()
        self.engine.block_manager.on_event = lambda happened: self._events.append(happened)

    def _close(self) -> None:
        self.is_open, self.engine.block_manager.on_event = False, None

    def _draw(self) -> tuple[Frame | None, float]:
        """What has changed, and the seconds that drawing it took."""
        started = time.perf_counter()
        scheduler, stats = self.engine.scheduler, self.engine.stats
        is_due = not self._samples or started - self._samples[-1].time >= 1.0
        if is_due:
            found = self.engine.block_manager.stats
            self._samples.append(Sample(started, stats.num_output_tokens, found.queries, found.hits))
        seen = (stats.num_steps, len(scheduler.waiting), len(scheduler.running), len(self._events))
        if seen == self._seen and not is_due:
            return None, 0.0
        self._seen = (*seen[:3], 0)
        self._name([*scheduler.running, *scheduler.waiting])
        frame = Frame(self._draw_pool(), self._draw_panels())
        return frame, time.perf_counter() - started

    def _name(self, seqs: list[Sequence]) -> None:
        """Names as in the labs: A, B, C, ... in the order of arrival."""
        known, self._names = self._names, {}
        for seq in seqs:
            if seq.seq_id not in known:
                turn, letter = divmod(self._num_names, len(LETTERS))
                known[seq.seq_id] = LETTERS[letter] + (str(turn) if turn else "")
                self._num_names += 1
            self._names[seq.seq_id] = known[seq.seq_id]

    def _draw_pool(self) -> dict[int, str]:
        blocks = self.engine.block_manager.blocks
        held = pictures.holders(self.engine.scheduler.running, self._names)
        states = ["cached" if block.block_hash else "free" for block in blocks]
        for block_id, names in held.items():
            states[block_id] = " ".join(names)
        happened: dict[int, list[BlockEvent]] = {}
        for each in self._events:
            happened.setdefault(each.block_id, []).append(each)
        self._events = []
        changed = {i for i, (now, before) in enumerate(zip(states, self._drawn, strict=False)) if now != before}
        changed.update(happened, () if self._drawn else range(len(blocks)))
        self._drawn = states
        size, cells = self.cell_size, {}
        for cell in sorted({block_id // size for block_id in changed}):
            members = blocks[cell * size : (cell + 1) * size]
            # Of several blocks the one that says most.
            block = max(members, key=lambda b: (b.block_id in held, b.block_id in happened, b.block_hash is not None))
            names, events = held.get(block.block_id, []), happened.get(block.block_id, [])
            cells[cell] = pictures.draw_block(block, names, events)
        return cells

    def _draw_panels(self) -> dict[str, str]:
        scheduler, stats, manager = self.engine.scheduler, self.engine.stats, self.engine.block_manager
        running, waiting = scheduler.running, list(scheduler.waiting)
        told = list(self._steps)
        ends = [one[2] for one in told[2:]] + [stats.step_time_s]  # on_step is told before the step's time is counted
        steps = [
            pictures.Step(now[0] - before[0], now[1], end - now[2], now[3])
            for before, now, end in zip(told, told[1:], ends, strict=False)
        ]
        pairs = list(zip(self._samples, list(self._samples)[1:], strict=False))
        rates = [(now.num_output_tokens - old.num_output_tokens) / (now.time - old.time) for old, now in pairs]
        hit_rates: list[float] = []
        for old, now in pairs:  # a second in which nothing was looked for says nothing
            asked, before = now.queries - old.queries, hit_rates[-1] if hit_rates else 0.0
            hit_rates.append((now.hits - old.hits) / asked if asked else before)
        recent = manager.stats.snapshot().recent_hit_rate
        counters = {
            "running": len(running),
            "waiting": len(waiting),
            "tokens/s": f"{sum(rates[-5:]) / max(1, len(rates[-5:])):.0f}",
            "recent hit rate": f"{recent or 0:.0%}",
            "blocks held": f"{len(manager.blocks) - len(manager.free_blocks)} of {len(manager.blocks)}",
            "preemptions": scheduler.num_preemptions,
            "evictions": manager.stats.evictions,
            "steps": stats.num_steps,
        }
        return {
            "counters": pictures.draw_counters(counters),
            "running": self._draw_cards(running, "Nothing runs."),
            "waiting": self._draw_cards(waiting, "Nobody waits."),
            "steps": pictures.draw_steps(steps, NUM_STEPS, scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
            "history": pictures.draw_history({"tokens/s": rates, "hit rate": hit_rates}, HISTORY_S),
        }

    def _draw_cards(self, seqs: list[Sequence], nobody: str) -> str:
        if not seqs:
            return f'<p class="none">{nobody}</p>'
        cards = []
        for seq in seqs[:MAX_CARDS]:
            goal = len(seq.tokens) + self.engine.scheduler.num_tokens_left(seq)
            request = self.engine.request_of_seq[seq.seq_id]
            cards.append(pictures.draw_card(seq, self._names[seq.seq_id], goal, request.request_id))
        more = f'<li class="card empty">and {len(seqs) - MAX_CARDS} more</li>' if len(seqs) > MAX_CARDS else ""
        return f'<ol class="cards">{"".join(cards)}{more}</ol>'
