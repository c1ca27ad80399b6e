"""What the page shows of an engine, drawn by its thread between two steps: changed cells of the pool, and panels."""

import time
from collections import deque
from typing import Any, NamedTuple

from nanovllm.core.block_manager import BlockEvent, broadcast
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.engine import LLMEngine
from nanovllm.serving.http import html_pictures as pictures

NUM_STEPS, HISTORY_S = 100, 180  # what the charts show
MAX_CELLS, MAX_CARDS = 4096, 48
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


class Drawing:
    """Between open() and close() it watches the engine. Everything here belongs to the engine's thread."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.is_open = False
        self.cell_size = -(-len(engine.block_manager.blocks) // MAX_CELLS)  # blocks
        self.names: dict[int, str] = {}  # seq_id -> A, B, C
        self._num_names = 0

    @property
    def snapshots(self) -> dict[bytes, Any]:
        """Snapshots of a hybrid model's states, by block hash; other models have none."""
        kept = self.engine.block_manager.snapshots
        return {} if kept is None else kept.by_hash

    def on_step(self, output: SchedulerOutput) -> None:
        if self.is_open:
            stats = self.engine.stats
            self._steps.append((stats.num_prefill_tokens, output.num_tokens, stats.step_time_s, len(output.preempted)))

    def open(self) -> None:
        self.is_open = True
        self._steps: deque[tuple[int, int, float, int]] = deque(maxlen=NUM_STEPS + 1)
        self._steps.append((self.engine.stats.num_prefill_tokens, 0, 0.0, 0))
        self._events: list[BlockEvent] = []
        self._samples: deque[Sample] = deque(maxlen=HISTORY_S)
        self._drawn: list[str] = []  # of each block, what its cell shows
        self._seen: tuple[Any, ...] = ()
        manager = self.engine.block_manager
        self._other_listener = manager.on_event
        manager.on_event = broadcast(self._other_listener, lambda happened: self._events.append(happened))

    def close(self) -> None:
        self.is_open = False
        self.engine.block_manager.on_event = self._other_listener

    def draw(self) -> tuple[Frame | None, float]:
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
        known, self.names = self.names, {}
        for seq in seqs:
            if seq.seq_id not in known:
                turn, letter = divmod(self._num_names, len(LETTERS))
                known[seq.seq_id] = LETTERS[letter] + (str(turn) if turn else "")
                self._num_names += 1
            self.names[seq.seq_id] = known[seq.seq_id]

    def _draw_pool(self) -> dict[int, str]:
        blocks = self.engine.block_manager.blocks
        held = pictures.holders(self.engine.scheduler.running, self.names)
        states = ["cached" if block.block_hash else "free" for block in blocks]
        for block_id, names in held.items():
            states[block_id] = " ".join(names)
        images = pictures.images(self.engine.block_manager, self.engine.scheduler.running)
        for block_id, overlapped in images.items():
            states[block_id] += f", images {' '.join(overlapped)}"
        kept = {block.block_id for block in blocks if block.block_hash in self.snapshots}
        for block_id in kept:
            states[block_id] += ", a snapshot"
        happened: dict[int, list[BlockEvent]] = {}
        for each in self._events:
            if each.block_id < 0:
                continue  # of the whole pool: the states say it
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
            has_snapshot = any(member.block_id in kept for member in members)
            shown = dict.fromkeys(name for member in members for name in images.get(member.block_id, ()))
            cells[cell] = pictures.draw_block(block, names, events, has_snapshot=has_snapshot, images=shown)
        return cells

    def _draw_panels(self) -> dict[str, str]:
        scheduler, stats, manager = self.engine.scheduler, self.engine.stats, self.engine.block_manager
        running, waiting = scheduler.running, list(scheduler.waiting)
        told = list(self._steps)
        # A step that failed before has counted its prompt tokens, too: no more than the step's own are shown.
        ends = [one[2] for one in told[2:]] + [stats.step_time_s]  # on_step is told before the step's time is counted
        steps = [
            pictures.Step(min(now[0] - before[0], now[1]), now[1], end - now[2], now[3])
            for before, now, end in zip(told, told[1:], ends, strict=False)
        ]
        pairs = list(zip(self._samples, list(self._samples)[1:], strict=False))
        rates = [(now.num_output_tokens - old.num_output_tokens) / (now.time - old.time) for old, now in pairs]
        hit_rates: list[float] = []
        for old, now in pairs:  # a second in which nothing was looked for says nothing
            asked, before = now.queries - old.queries, hit_rates[-1] if hit_rates else 0.0
            hit_rates.append((now.hits - old.hits) / asked if asked else before)
        recent = manager.stats.recent_hit_rate
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
        if self.engine.model_config.hybrid is not None:
            counters["snapshots"] = f"{len(self.snapshots)} of {self.engine.kv_pool.states.max_snapshots}"
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
            cards.append(pictures.draw_card(seq, self.names[seq.seq_id], goal, seq.request_id))
        more = f'<li class="card empty">and {len(seqs) - MAX_CARDS} more</li>' if len(seqs) > MAX_CARDS else ""
        return f'<ol class="cards">{"".join(cards)}{more}</ol>'
