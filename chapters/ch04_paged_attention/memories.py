"""What lab 4 plays with: the same requests in two memories of the same size.

The paged memory is the engine's BlockManager. The contiguous one is a small first-fit allocator that lives in this file
only: it is what paging is compared with, and nothing in the engine looks like it. Actions only; the pictures are in
drawing.py.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chapters.player import actions
from chapters.stage import Stage, compute
from nanovllm.core.block_manager import BlockEvent, BlockManager
from nanovllm.core.sequence import Sequence, SequenceStatus

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 32, 32
SYSTEM_PROMPT = list(range(1, 9))  # every prompt begins with these 8 tokens: two full blocks
COLUMNS = ("running", "refused", "stalls", "tokens", "taken", "empty", "free", "fits")
ACTIONS = actions(
    "a|admit|admit, g|grow|grow, f|end|end_oldest, p|limit|switch_reservation, c|share|switch_caching, "
    "m|less|shrink, r|new|reset"
)


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens it may get at most. Its end can come earlier, and nobody knows when."""

    prompt: list[int]
    max_tokens: int

    @property
    def limit(self) -> int:
        return len(self.prompt) + self.max_tokens


def requests() -> list[Request]:
    """Prompts of 9 to 16 tokens that may get 6 to 20 more."""
    lengths = (10, 14), (13, 6), (9, 20), (16, 6), (11, 12), (9, 16), (12, 14), (10, 17), (9, 8), (14, 9), (11, 20)
    own = [[100 * i + j for j in range(length)] for i, (length, _) in enumerate(lengths, start=1)]
    return [Request(SYSTEM_PROMPT + rest[8:], m) for rest, (_, m) in zip(own, lengths, strict=True)]


class ContiguousMemory:
    """Each sequence gets one stretch of slots, the first that is long enough, and keeps it until it ends."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reserved: dict[str, range] = {}

    def holes(self) -> list[range]:
        taken = sorted(self.reserved.values(), key=lambda slots: slots.start)
        starts, ends = [0, *(slots.stop for slots in taken)], [*(slots.start for slots in taken), self.num_slots]
        return [range(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    def reserve(self, name: str, size: int) -> bool:
        hole = next((hole for hole in self.holes() if len(hole) >= size), None)
        if hole is not None:
            self.reserved[name] = range(hole.start, hole.start + size)
        return hole is not None

    @property
    def num_free(self) -> int:
        return self.num_slots - sum(map(len, self.reserved.values()))


def slots_of(seq: Sequence) -> list[int]:
    """The slots of all its blocks, in the order of its tokens."""
    return [block_id * BLOCK_SIZE + offset for block_id in seq.block_table for offset in range(BLOCK_SIZE)]


class TwoMemories:
    """Both memories and what happens to them. Whatever is done is done to both."""

    def __init__(
        self,
        num_blocks: int = NUM_BLOCKS,
        *,
        reserve_longest: bool = True,
        caching: bool = False,
        source: list[Request] | None = None,
    ) -> None:
        self.source, self.reserve_longest, self.caching = source or requests(), reserve_longest, caching
        self._start(num_blocks)

    def _start(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=self.caching)
        self.events: list[BlockEvent] = []  # since the last action, in order; a face that shows them empties the list
        self.manager.on_event = self.events.append
        self.seqs: dict[str, Sequence] = {}  # in the paged memory, oldest first
        self.contiguous = ContiguousMemory(num_blocks * BLOCK_SIZE)
        self.lengths: dict[str, int] = {}  # in the contiguous one: tokens stored
        self.limits: dict[str, int] = {}  # tokens at the end
        self.arrivals: dict[str, Sequence] = {}  # the latest of each name, in the order of arrival
        self.names: dict[int, str] = {}  # seq_id -> name
        self.refused = {"contiguous": 0, "paged": 0}
        self.num_stalls = 0
        self.num_requests = 0

    # -- what can be done -----------------------------------------------------------------------------------------

    def admit(self) -> str:
        """The next request asks both for room."""
        request = self.source[self.num_requests % len(self.source)]
        name = chr(ord("A") + self.num_requests % 26)
        if name in self.seqs or name in self.lengths:
            return f"{name} is still running: let it end first"
        self.num_requests += 1
        self.limits[name] = min(request.limit, MAX_MODEL_LEN)
        said = []

        size = MAX_MODEL_LEN if self.reserve_longest else self.limits[name]
        if self.contiguous.reserve(name, size):
            self.lengths[name] = len(request.prompt)
            said.append(f"contiguous reserves {size} slots,")
        else:
            self.refused["contiguous"] += 1
            longest = max(map(len, self.contiguous.holes()), default=0)
            said.append(f"contiguous refuses (wants {size}, longest hole {longest}),")

        seq = Sequence(request.prompt)
        self.arrivals.pop(name, None)  # of a request long gone
        self.arrivals[name], self.names[seq.seq_id] = seq, name
        if self.manager.allocate_with_prefix(seq):
            self.seqs[name] = seq
            seq.status = SequenceStatus.DECODE
            compute(self.manager, seq)
            said.append(f"paged takes blocks {' '.join(map(str, seq.block_table))}")
        else:
            self.refused["paged"] += 1
            wanted = self.manager.num_blocks_for(len(seq.tokens))
            said.append(f"paged refuses (wants {wanted} blocks, {len(self.manager.free_blocks)} free)")
        return f"{name}, {len(request.prompt)} tokens: {' '.join(said)}"

    def grow(self) -> str:
        """Every sequence gets one more token; those that reach their limit end."""
        stalled = []
        for name in [*self.lengths]:
            self.lengths[name] += 1
            if self.lengths[name] == self.limits[name]:
                self._end_contiguous(name)
        for name, seq in [*self.seqs.items()]:
            if len(seq.tokens) == seq.num_computed_tokens:  # else the token of last time still waits for its slot
                seq.append(10_000 + len(seq.tokens))
            if not self.manager.append_slots(seq):
                stalled.append(name)
                continue
            compute(self.manager, seq)
            if seq.num_computed_tokens == self.limits[name]:
                self.manager.free(self.seqs.pop(name))
        self.num_stalls += len(stalled)
        self.manager.check_integrity()
        return f"append_slots said False to {', '.join(stalled)}: no block is free" if stalled else ""

    def end_oldest(self) -> str:
        """The oldest request that runs anywhere comes to its end."""
        name = next((name for name in self.arrivals if name in self.lengths or name in self.seqs), None)
        if name is None:
            return "nothing is running: admit a request"
        if name in self.lengths:
            self._end_contiguous(name)
        if name in self.seqs:
            self.manager.free(self.seqs.pop(name))
        return f"{name} ends"

    def switch_reservation(self) -> str:
        """Start over; the contiguous memory reserves max_model_len, or prompt + max_tokens, in turn."""
        self.reserve_longest = not self.reserve_longest
        self._start(len(self.manager.blocks))
        return f"Started over: contiguous now reserves {self.reservation}."

    def switch_caching(self) -> str:
        """Start over with prefix caching on or off: whether the paged memory shares full blocks."""
        self.caching = not self.caching
        self._start(len(self.manager.blocks))
        return f"Started over: prefix caching is {'on: full blocks are shared' if self.caching else 'off'}."

    def shrink(self) -> str:
        """Start over with 8 blocks fewer; after the smallest pool, with all 32."""
        num_blocks = len(self.manager.blocks)
        self._start(num_blocks - 8 if num_blocks > 8 else NUM_BLOCKS)
        return f"Started over with {len(self.manager.blocks)} blocks, {self.contiguous.num_slots} slots in each memory."

    def reset(self) -> str:
        """Start over with all 32 blocks."""
        self._start(NUM_BLOCKS)
        return "Started over."

    def counters(self) -> dict[str, dict[str, int]]:
        """What the table shows, in slots and sequences. A shared slot is taken once and serves several tokens."""
        num_taken = self.contiguous.num_slots - self.contiguous.num_free
        num_tokens = sum(self.lengths.values())
        longest = max(map(len, self.contiguous.holes()), default=0)
        contiguous = len(self.lengths), self.refused["contiguous"], 0, num_tokens, num_taken, num_taken - num_tokens
        num_free = len(self.manager.free_blocks) * BLOCK_SIZE
        num_taken = self.contiguous.num_slots - num_free
        filled = {slot for seq in self.seqs.values() for slot in slots_of(seq)[: seq.num_computed_tokens]}
        num_tokens = sum(seq.num_computed_tokens for seq in self.seqs.values())
        paged = len(self.seqs), self.refused["paged"], self.num_stalls, num_tokens, num_taken, num_taken - len(filled)
        return {
            "contiguous": dict(zip(COLUMNS, (*contiguous, self.contiguous.num_free, longest), strict=True)),
            "paged": dict(zip(COLUMNS, (*paged, num_free, num_free), strict=True)),
        }

    # -- helpers --------------------------------------------------------------------------------------------------

    @property
    def reservation(self) -> str:
        return f"max_model_len = {MAX_MODEL_LEN}" if self.reserve_longest else "prompt + max_tokens"

    def _end_contiguous(self, name: str) -> None:
        del self.lengths[name], self.contiguous.reserved[name]


# -- a day's work: the same requests to the end -----------------------------------------------------------------------

POOL_SLOTS, LONGEST = 16_384, 2_048


@dataclass
class Totals:
    """Of a run until nobody waits any more; `steps` until nobody runs any more."""

    steps: int = 0
    busy_steps: int = 0
    running: int = 0
    stored: int = 0
    empty: int = 0
    table_entries: int = 0
    preempted: int = 0

    def add(self, running: int, stored: int, taken: int) -> None:
        self.busy_steps += 1
        self.running += running
        self.stored += stored
        self.empty += taken - stored

    def row(self) -> list[str]:
        if self.busy_steps == 0:  # there is room for all of so few requests
            return [*"----", f"{self.steps:,}"]
        shares = [amount / self.busy_steps / POOL_SLOTS for amount in (self.stored, self.empty)]
        shares.append(1 - sum(shares))
        return [f"{self.running / self.busy_steps:.1f}", *(f"{share:.1%}" for share in shares), f"{self.steps:,}"]

    def blocks_in_a_table(self) -> str:
        return f"{self.table_entries / self.running:.1f}" if self.running else "-"


def make_jobs(num_jobs: int = 200) -> list[tuple[Request, int]]:
    """Requests with lengths as in chats: most short, a few long. With each, the number of tokens it will get."""
    rng = random.Random(0)
    jobs = []
    for _ in range(num_jobs):
        num_prompt = min(max(int(rng.lognormvariate(5, 0.9)), 8), 1_500)
        max_tokens = rng.choice([128, 256, 512])
        jobs.append((Request([1] * num_prompt, max_tokens), min(max(int(rng.lognormvariate(4.5, 0.8)), 4), max_tokens)))
    return jobs


def run_contiguous(jobs: list[tuple[Request, int]], size_of: Callable[[Request], int]) -> Totals:
    """First come, first served, as the engine's scheduler does it, with stretches of slots."""
    memory, totals = ContiguousMemory(POOL_SLOTS), Totals()
    waiting = deque(enumerate(jobs))
    running: dict[str, list[int]] = {}  # index -> [tokens stored, tokens at its end]
    while waiting or running:
        while waiting and memory.reserve(str(waiting[0][0]), size_of(waiting[0][1][0])):
            index, (request, num_output) = waiting.popleft()
            running[str(index)] = [len(request.prompt), len(request.prompt) + num_output - 1]
        if waiting:
            totals.add(len(running), sum(length for length, _ in running.values()), POOL_SLOTS - memory.num_free)
        totals.steps += 1
        for name, progress in [*running.items()]:
            if progress[0] == progress[1]:
                del running[name], memory.reserved[name]
            progress[0] += 1
    return totals


def run_paged(jobs: list[tuple[Request, int]], block_size: int) -> Totals:
    """The engine's scheduler and block manager; only the model is missing: we say what it would have sampled."""
    limits: dict[str, Any] = dict(max_num_seqs=len(jobs), max_num_batched_tokens=POOL_SLOTS, max_model_len=LONGEST)
    options: dict[str, Any] = dict(block_size=block_size, enable_prefix_caching=False, checking=False)
    stage = Stage(POOL_SLOTS // block_size, **limits, **options)
    scheduler, totals = stage.scheduler, Totals()
    for request, num_output in jobs:
        stage.add(request.prompt, num_output, max_tokens=request.max_tokens)
    while stage.has_unfinished():
        output = stage.schedule()
        if scheduler.waiting:
            stored = sum(seq.num_computed_tokens for seq in scheduler.running)
            taken = POOL_SLOTS - len(stage.manager.free_blocks) * block_size
            totals.add(len(scheduler.running), stored, taken)
            totals.table_entries += sum(len(seq.block_table) for seq in scheduler.running)
        stage.finish(output)
    totals.steps, totals.preempted = len(stage.steps), scheduler.num_preemptions
    return totals
