"""Conversations that come back, with tiers below the pool: the second half of chapter 7's lab. Actions only.

As in simulator.py a word is a token, and a block has four. The engine's BlockManager, Tiers and MemoryStore do the
work. A browser has no disk, so its store keeps records in a dict, by the rules of the engine's directory. K/V is
played: that of a block is the text up to its end, so what comes back is compared with what should be there.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from chapters.ch07_prefix_caching.simulator import BLOCK_SIZE, Simulator
from chapters.ch07_prefix_caching.workloads import ANSWER, QUESTIONS, SYSTEM
from chapters.player import actions
from chapters.stage import compute
from nanovllm.core.block_manager import Block, BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.store import Record
from nanovllm.core.tiers.tiers import Awaited, Tiers
from nanovllm.features.tiers.memory_store import MemoryStore

PEOPLE, NUM_TURNS = ("Ada", "Ben", "Cleo", "Dan"), 6
SIZES = {"pool": (20, 40, 80), "memory": (0, 20, 40, 80), "disk": (0, 20, 40, 80)}  # in blocks: what a tier may have
START = {"pool": 20, "memory": 20, "disk": 80}
PLACES = "pool", "memory", "disk", "computed"
SIGNS = {"pool": "=", "memory": "m", "disk": "d", "computed": "+", "own": "·"}  # of blocks
ORDERS = {
    "the four in turn": [(person, turn) for turn in range(NUM_TURNS) for person in PEOPLE],
    "half of each, one after another": [
        (person, turn) for half in (range(3), range(3, NUM_TURNS)) for person in PEOPLE for turn in half
    ],
}
ACTIONS = actions(
    "c|come back|come_back, k|restart|restart, p|pool|next_pool, h|memory|next_memory, d|disk|next_disk, "
    "v|order|next_order"
)


class Written(NamedTuple):
    """A block's K/V: the tokens that it depends on. It counts as one byte, so that stores count blocks."""

    token_ids: tuple[int, ...]
    nbytes: int = 1


class PlayedData:
    """BlockData of a pool (core/tiers/store.py)."""

    def __init__(self) -> None:
        self.written: dict[int, Written] = {}  # block_id -> K/V

    def read(self, block_ids: list[int]) -> list[Any]:
        return [self.written[block_id] for block_id in block_ids]

    def write(self, block_ids: list[int], data: list[Any]) -> None:
        self.written.update(zip(block_ids, data, strict=True))

    def read_state(self, slot: int) -> Any:
        raise AssertionError("no hybrid model is played here")

    def write_state(self, slot: int, data: Any) -> None:
        raise AssertionError("no hybrid model is played here")


@dataclass
class Kept:
    record: Record
    data: Any
    depth: int  # records that come before it
    used: int  # the admission that used it last


class DictStore:
    """A Store in place of a disk. What is fetched comes when deliver() is called.

    No record is used later than its parent: it begins with its parent's time, and an admission touches whole chains.
    So the deepest of the least recently used records is nobody's parent, and goes first.
    """

    medium = "disk"

    def __init__(self, num_records: int) -> None:
        self.num_records, self.now = num_records, 0
        self.kept: dict[bytes, Kept] = {}
        self.promised: list[tuple[list[Record], Future[list[Any]]]] = []

    def may_have(self, key: bytes) -> bool:
        return key in self.kept

    def put(self, records: list[Record], read: Callable[[int], list[Any]]) -> None:
        for record, data in zip(records, read(len(records)), strict=True):
            parent = self.kept.get(record.parent_hash) if record.parent_hash else None
            if record.key in self.kept or (record.parent_hash and parent is None):
                continue
            if len(self.kept) == self.num_records:
                oldest = min(self.kept.values(), key=lambda kept: (kept.used, -kept.depth))
                if oldest is parent:  # its own chain fills the store
                    continue
                del self.kept[oldest.record.key]
            copy = record._replace(token_ids=tuple(record.token_ids))
            depth, used = (parent.depth + 1, parent.used) if parent else (0, self.now)
            self.kept[record.key] = Kept(copy, data, depth, used)

    def fetch(self, records: list[Record]) -> "Future[list[Any]]":
        future: Future[list[Any]] = Future()
        self.promised.append((records, future))
        return future

    def deliver(self) -> None:
        for records, future in self.promised:
            found = []
            for record in records:
                kept = self.kept.get(record.key)
                if kept is None or kept.record != record._replace(token_ids=tuple(record.token_ids)):
                    break
                found.append(kept.data)
            future.set_result(found)
        self.promised = []

    def touch(self, keys: list[bytes]) -> None:
        self.now += 1
        for key in keys:
            if key in self.kept:
                self.kept[key].used = self.now

    def reset(self) -> None:
        self.kept.clear()

    def counts(self) -> dict[str, int]:
        """Of those that a Store may have, what the lab shows."""
        return {"num_records": len(self.kept)}


class NotedTiers(Tiers):
    """The engine's; notes where the blocks of the sequence that is being admitted were found, in order."""

    places: list[str]

    def take(self, seq: Sequence, awaited: Awaited, ahead: dict[int, Block]) -> None:
        before = Counter(awaited.found)
        super().take(seq, awaited, ahead)
        for medium, num_tokens in (Counter(awaited.found) - before).items():
            self.places += [medium] * (num_tokens // BLOCK_SIZE)


@dataclass
class Visit:
    """A request. places: of its full blocks, in order, where each was found; what was computed is not among them."""

    name: str
    token_ids: list[int]
    places: list[str]
    num_computed: int
    num_waits: int  # for the disk

    def place(self, index: int) -> str:
        """Of a block; "own" if it is not full."""
        if index < len(self.places):
            return self.places[index]
        return "computed" if (index + 1) * BLOCK_SIZE <= len(self.token_ids) else "own"

    @property
    def num_blocks(self) -> int:
        return -(-len(self.token_ids) // BLOCK_SIZE)

    def tokens(self) -> dict[str, int]:
        """{place: prompt tokens from there}."""
        found = Counter(self.places)
        return {place: BLOCK_SIZE * found[place] for place in PLACES[:-1]} | {"computed": self.num_computed}


class Conversations:
    """Four people, six turns each. When a size is changed, all that has happened happens again with the new size."""

    def __init__(self, order: str = next(iter(ORDERS)), **sizes: int) -> None:
        self.order, self.sizes = order, START | sizes
        self.words = Simulator()  # words -> token ids and back
        self.done: list[str] = []  # actions that are played again
        self._play([])

    def _play(self, done: list[str]) -> None:
        self.visits: list[Visit] = []
        self.texts = dict.fromkeys(PEOPLE, SYSTEM)
        self.disk = DictStore(self.sizes["disk"]) if self.sizes["disk"] else None
        self.restarts: list[int] = []  # number of visits before each
        self._begin()
        self.done = []
        for method in done:
            getattr(self, method)()

    def _begin(self) -> None:
        """A new process: pool and memory are empty, the disk is as it was."""
        self.manager, self.data = BlockManager(self.sizes["pool"], BLOCK_SIZE), PlayedData()
        self.memory = MemoryStore(self.sizes["memory"]) if self.sizes["memory"] else None
        self.tiers = NotedTiers(self.manager, self.data, self.memory, self.disk)
        self.manager.on_event = self.tiers.on_event

    # -- actions --------------------------------------------------------------------------------------------------

    def come_back(self) -> str:
        """Tiers: the next person comes, and sends all that was said in this conversation before, and a question."""
        if len(self.visits) == len(ORDERS[self.order]):
            return "All have had their six turns. Change a size (p, h, d), and they come again."
        self.done.append("come_back")
        person, turn = ORDERS[self.order][len(self.visits)]
        self.texts[person] += f" {'' if turn else f'{person} asks '}{QUESTIONS[turn % len(QUESTIONS)]}"
        visit = self._admit(f"{person} {turn + 1}", self.words.ids(self.texts[person]))
        answer = " ".join(ANSWER[turn * 3 % len(ANSWER) :][:3])
        self.texts[person] += f" {answer}"
        self._answer(answer)
        self.visits.append(visit)
        tokens = ", ".join(f"{place} {num}" for place, num in visit.tokens().items() if num)
        waits = f"; it waited for the disk {visit.num_waits} times" if visit.num_waits > 1 else ""
        return f"{visit.name}: {len(visit.token_ids)} tokens: {tokens}{waits}."

    def restart(self) -> str:
        """Tiers: the process ends, and another begins. Pool and memory are empty, the disk is as it was."""
        self.done.append("restart")
        self.restarts.append(len(self.visits))
        self._begin()
        return "A new process: pool and memory are empty, the disk is as it was."

    def next_pool(self) -> str:
        """Tiers: a pool of 20, 40 or 80 blocks. All that has happened happens again."""
        return self._move("pool")

    def next_memory(self) -> str:
        """Tiers: memory for 0, 20, 40 or 80 blocks. All that has happened happens again."""
        return self._move("memory")

    def next_disk(self) -> str:
        """Tiers: a disk for 0, 20, 40 or 80 blocks. All that has happened happens again."""
        return self._move("disk")

    def next_order(self) -> str:
        """Tiers: start over with the people in a different order."""
        orders = list(ORDERS)
        self.order = orders[(orders.index(self.order) + 1) % len(orders)]
        self._play([])
        return f"They come in a different order: {self.order}. Pool, memory and disk are empty."

    def _move(self, tier: str) -> str:
        values = SIZES[tier]
        self.sizes[tier] = values[(values.index(self.sizes[tier]) + 1) % len(values)]
        self._play(self.done)
        return f"The {tier} has room for {self.sizes[tier]} blocks now. {self.verdict()}"

    # -- what the actions and the faces ask -----------------------------------------------------------------------

    def totals(self) -> dict[str, int]:
        """{place: prompt tokens of all visits}."""
        sums: Counter[str] = Counter(dict.fromkeys(PLACES, 0))
        for visit in self.visits:
            sums.update(visit.tokens())
        return dict(sums)

    def verdict(self) -> str:
        totals = self.totals()
        return f"{totals['computed']} of {sum(totals.values())} prompt tokens were computed." if self.visits else ""

    def filled(self) -> dict[str, tuple[int, int]]:
        """{tier: (blocks that are kept there, room)}."""
        cached = sum(block.block_hash is not None for block in self.manager.blocks)
        kept = {"pool": cached, "memory": 0, "disk": 0}
        kept |= {store.medium: store.counts()["num_records"] for store in self.tiers.stores}
        return {tier: (kept[tier], self.sizes[tier]) for tier in kept}

    # -- helpers --------------------------------------------------------------------------------------------------

    def _admit(self, name: str, token_ids: list[int]) -> Visit:
        """What the scheduler does with a sequence that waits, until it has its blocks."""
        manager, seq, num_waits = self.manager, Sequence(token_ids), 0
        assert manager.can_allocate(seq), "the smallest pool holds the longest conversation"
        self.tiers.places = ["pool"] * len(manager.get_computed_blocks(seq).blocks)
        self.tiers.poll([seq])
        while seq.awaits_blocks:
            assert self.disk is not None
            self.disk.deliver()  # meanwhile the engine admits others
            num_waits += 1
            self.tiers.poll([seq])
        manager.allocate_with_prefix(seq)
        self.tiers.save_evicted()
        num_computed = len(token_ids) - seq.num_cached_tokens
        self._compute(seq)
        self.seq = seq
        return Visit(name, list(token_ids), [*self.tiers.places], num_computed, num_waits)

    def _answer(self, text: str) -> None:
        for token_id in self.words.ids(text):
            self.seq.append(token_id)
            self.manager.append_slots(self.seq)
            self.tiers.save_evicted()
            self._compute(self.seq)
        self.manager.free(self.seq)
        self.manager.check_integrity()

    def _compute(self, seq: Sequence) -> None:
        """A step: K/V is written, the blocks that it fills are cached, and the tiers are told."""
        first = seq.num_computed_tokens // BLOCK_SIZE
        for index, block_id in enumerate(seq.block_table):
            text = Written(tuple(seq.tokens[: (index + 1) * BLOCK_SIZE]))
            if index >= first:
                self.data.written[block_id] = text
            assert self.data.written[block_id] == text, "K/V of another text"
        compute(self.manager, seq)
        self.manager.step_done()


def played(order: str, restart_after: int | None = None, **sizes: int) -> Conversations:
    """All of them; restart_after: so many visits the process is another one."""
    world = Conversations(order, **sizes)
    for number in range(len(ORDERS[order])):
        if number == restart_after:
            world.restart()
        world.come_back()
    return world
