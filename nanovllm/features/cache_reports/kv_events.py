"""KVEvents: tells a follower of the prefix cache what it needs, to hold exactly the names that are in the pool."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.checks.callbacks import told_to
from nanovllm.core.block_manager import Block
from nanovllm.core.tiers.names import NO_EXTRA
from nanovllm.core.tiers.store import BLOCK, Record
from nanovllm.core.tiers.watched import WatchedBlockManager, Watcher
from nanovllm.features.cache_reports.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from nanovllm.files.system import open_for_owner

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

logger = logging.getLogger("nanovllm")


MAX_EVENTS = 10_000  # that a follower has not taken


class Note(NamedTuple):
    """What a store tells. has_lost: it may be anything."""

    medium: str
    stored: Sequence[Record] = ()
    removed: Sequence[bytes] = ()
    has_lost: bool = False


class Told(NamedTuple):
    """A block, as far as a follower hears of it."""

    name: bytes
    parent: bytes | None
    token_ids: Sequence[int]
    lora_id: int | None
    extra: tuple[str, ...] | None


class StoreNames:
    """What a follower has heard of one store below the pool: names with their parents before them.

    told     names that it has
    waiting  records that the store has and the follower cannot place yet, by their names; by_parent: by their parents'
    """

    def __init__(self) -> None:
        self.told: set[bytes] = set()
        self.waiting: dict[bytes, Record] = {}
        self.by_parent: defaultdict[bytes, set[bytes]] = defaultdict(set)

    def stored(self, records: Iterable[Record]) -> dict[bytes, Record]:
        """The store has these. Returns what can be told now, parents first; told() says that it was."""
        new: dict[bytes, Record] = {}
        todo = deque(records)
        while todo:
            record = todo.popleft()
            if record.name in self.told or record.name in new:
                continue
            if record.parent is None or record.parent in self.told or record.parent in new:
                new[record.name] = record
                todo.extend(self.waiting[name] for name in self.by_parent.get(record.name, ()))
            else:
                self.waiting[record.name] = record
                self.by_parent[record.parent].add(record.name)
        return new

    def were_told(self, records: dict[bytes, Record]) -> None:
        self.told.update(records)
        self._wait_no_more(records)

    def removed(self, names: Iterable[bytes]) -> list[bytes]:
        """The store has forgotten these. Returns those that the follower knows."""
        self._wait_no_more(names)
        return [name for name in names if name in self.told]

    def _wait_no_more(self, names: Iterable[bytes]) -> None:
        for name in names:
            record = self.waiting.pop(name, None)
            if record is not None and record.parent is not None:
                self.by_parent[record.parent].discard(name)
                if not self.by_parent[record.parent]:
                    del self.by_parent[record.parent]


class KVEvents(Watcher):
    """Events are gathered, and told when a step has succeeded. If telling fails, the same events are told again: they
    say what is there now, so that hearing them twice changes nothing.

    In each medium a follower hears of a block after its parent, and of its end only if it has heard of it. After
    AllBlocksCleared it knows of nothing.

    on_batch         is called with a KVEventBatch; what it raises is logged, and the step stays made
    path             of a file that gets a line for each batch
    name_of_adapter  lora_id -> lora_name
    """

    def __init__(
        self,
        manager: WatchedBlockManager,
        path: str | None = None,
        name_of_adapter: Callable[[int], str | None] = lambda lora_id: None,
    ) -> None:
        self.manager, self.name_of_adapter = manager, name_of_adapter
        self.on_batch: Callable[[KVEventBatch], None] | None = None
        self._names: set[bytes] = set()  # that a follower has of the pool, when it has heard all of _events
        self._events: list[KVCacheEvent] = []  # not told yet
        self._notes: deque[Note] = deque()  # of stores' threads, that are no events yet
        self._in_stores: defaultdict[str, StoreNames] = defaultdict(StoreNames)  # by medium
        self.path = path
        if path is not None:
            self._events.extend([AllBlocksCleared()])  # of an engine that has written to the file before
            self.publish()
        manager.watchers.append(self)

    # -- what the manager tells -----------------------------------------------------------------------------------

    def stored(self, blocks: list[Block]) -> None:
        new = {block.block_hash: block for block in blocks if block.block_hash not in self._names}
        self._events.extend(self.stored_events(MEDIUM_GPU, map(_told, new.values())))
        self._names.update(new)  # type: ignore[arg-type]

    def removed(self, block: Block) -> None:
        name = block.block_hash
        if name in self._names and len(self.manager.hash_to_block[name]) == 1:
            self._names.discard(name)  # first: whatever comes between the two lines, the block still has its name
            self._events.extend([BlockRemoved([name], MEDIUM_GPU)])

    def rolled_back(self) -> None:
        """An exception may have come in the middle of any change: compare all names."""
        here = self.manager.hash_to_block
        if gone := [name for name in self._names if name not in here]:
            self._events.extend([BlockRemoved(gone, MEDIUM_GPU)])
            self._names.difference_update(gone)
        blocks = (next(iter(copies.values())) for name, copies in here.items() if name not in self._names)
        self.stored(sorted(blocks, key=lambda block: block.depth))

    def cleared(self) -> None:
        self._events.extend([AllBlocksCleared()])
        self._names.clear()
        self._in_stores.clear()
        self.publish()

    def committed(self) -> None:
        self.publish()

    # -- what stores tell, from any thread ------------------------------------------------------------------------

    def tier_stored(self, medium: str, records: list[Record]) -> None:
        """A store has these. Names are those of TierNames. It is told with the next step, or with their parents."""
        self._notes.append(Note(medium, stored=[record for record in records if record.kind == BLOCK]))

    def tier_removed(self, medium: str, names: list[bytes]) -> None:
        """A store has forgotten these."""
        self._notes.append(Note(medium, removed=list(names)))

    def tier_lost(self, medium: str) -> None:
        """A store may have forgotten anything. What it has is told when it is stored, or read into the pool."""
        self._notes.append(Note(medium, has_lost=True))

    # -- telling --------------------------------------------------------------------------------------------------

    def stored_events(self, medium: str, blocks: Iterable[Told]) -> list[BlockStored]:
        """One event for each chain of blocks. Parents come before their children."""
        size, events = self.manager.block_size, list[BlockStored]()
        open_chains: dict[bytes, BlockStored] = {}  # by the name of their last block
        for block in blocks:
            event = open_chains.pop(block.parent, None) if block.parent is not None else None
            if event is None:
                adapter = None if block.lora_id is None else self.name_of_adapter(block.lora_id)
                event = BlockStored([], block.parent, [], size, block.lora_id, medium, adapter, [])
                events.append(event)
            event.block_hashes.append(block.name)
            event.token_ids.extend(block.token_ids)
            event.extra_keys.append(block.extra)  # type: ignore[union-attr]
            open_chains[block.name] = event
        for event in events:
            if not any(event.extra_keys or ()):
                event.extra_keys = None
        return events

    def take_notes(self) -> None:
        """Make events of what stores have told. An exception leaves a note where it is: taking it twice is harmless."""
        while self._notes:
            note = self._notes[0]
            names = self._in_stores[note.medium]
            stored = names.stored(note.stored)
            told = (Told(*r[:3], None, None if r.extra == NO_EXTRA else (r.extra.hex(),)) for r in stored.values())
            self._events.extend(self.stored_events(note.medium, told))
            names.were_told(stored)
            removed = [*names.told] if note.has_lost else names.removed(note.removed)
            if removed:
                self._events.extend([BlockRemoved(removed, note.medium)])
                names.told.difference_update(removed)
            if note.has_lost:
                del self._in_stores[note.medium]
            self._notes.popleft()

    def publish(self) -> None:
        self.take_notes()
        if not (events := self._events[:]):
            return
        batch = KVEventBatch(time.time(), list(_merged(events)))
        self._write(batch)
        if self.on_batch is not None and not told_to(self.on_batch, batch):
            self._bound()
            return
        del self._events[: len(events)]

    def _bound(self) -> None:
        """Somebody does not listen. Events that wait for that are replaced by one, once they are many."""
        if len(self._events) > MAX_EVENTS:
            self._names.clear()
            self._in_stores.clear()
            self._events[:] = [AllBlocksCleared()]
            self.rolled_back()  # all that the pool has is told anew

    def _write(self, batch: KVEventBatch) -> None:
        if self.path is None:
            return
        try:
            # Nobody else may read it: token ids say what was in prompts.
            with open(self.path, "ab", opener=open_for_owner) as file:
                file.write(batch.to_json().encode() + b"\n")
        except OSError as error:
            logger.error("KV events are told in %s no more: %s", self.path, error)
            self.path = None  # a line that is missing makes those after it wrong


def make_kv_events(engine: "LLMEngine", manager: WatchedBlockManager) -> KVEvents:
    """As kv_events_config says."""
    path = engine.config.kv_events_config.path  # type: ignore[union-attr]
    return KVEvents(manager, path, lambda lora_id: engine.known_adapters.name_of(lora_id))


def _told(block: Block) -> Told:
    keys = dict.fromkeys(key[0] for key in block.extra_keys if key[0] != "lora")
    lora_id = next((key[1] for key in block.extra_keys if key[0] == "lora"), None)
    return Told(block.block_hash, block.parent_hash, block.token_ids, lora_id, tuple(keys) or None)  # type: ignore[arg-type]


def _merged(events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
    """The same, in one event what was removed one after another."""
    for medium, group in groupby(events, lambda event: event.medium if isinstance(event, BlockRemoved) else None):
        if medium is None:
            yield from group
        else:
            yield BlockRemoved([name for event in group for name in event.block_hashes], medium)  # type: ignore[union-attr]
