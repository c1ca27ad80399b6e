"""KVEvents: tells a follower of the prefix cache what it needs to know exactly the block hashes in the pool."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.checks.callers import notify
from nanovllm.core.block_manager import Block, BlockEvent, BlockManager
from nanovllm.core.tiers.store import BLOCK, NO_EXTRA, Record
from nanovllm.features.cache_reports.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from nanovllm.features.cache_reports.kv_events_config import check_kv_events
from nanovllm.files.system import open_for_owner
from nanovllm.wings import Wing

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

logger = logging.getLogger("nanovllm")


MAX_EVENTS = 10_000  # that a follower has not taken


class Note(NamedTuple):
    """What a store tells."""

    medium: str
    stored: Sequence[Record] = ()
    removed: Sequence[bytes] = ()


class Told(NamedTuple):
    """A block, as far as a follower hears of it."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: Sequence[int]
    lora_id: int | None
    extra: tuple[str, ...] | None


class StoreHashes:
    """What a follower has heard of one store below the pool: block hashes, each after its parent.

    told     hashes that it has
    waiting  records that the store has and the follower cannot place yet, by their hashes; by_parent: by their parents'
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
            block_hash, parent = record.block_hash, record.parent_hash
            if block_hash in self.told or block_hash in new:
                continue
            if parent is None or parent in self.told or parent in new:
                new[block_hash] = record
                todo.extend(self.waiting[child] for child in self.by_parent.get(block_hash, ()))
            else:
                self.waiting[block_hash] = record
                self.by_parent[parent].add(block_hash)
        return new

    def were_told(self, records: dict[bytes, Record]) -> None:
        self.told.update(records)
        self._wait_no_more(records)

    def removed(self, block_hashes: Iterable[bytes]) -> list[bytes]:
        """The store has forgotten these. Returns those that the follower knows."""
        self._wait_no_more(block_hashes)
        return [block_hash for block_hash in block_hashes if block_hash in self.told]

    def _wait_no_more(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            record = self.waiting.pop(block_hash, None)
            if record is not None and record.parent_hash is not None:
                self.by_parent[record.parent_hash].discard(block_hash)
                if not self.by_parent[record.parent_hash]:
                    del self.by_parent[record.parent_hash]


class KVEvents(Wing):
    """A listener of a block manager. Events are gathered, and told when a step has succeeded. If on_batch raises, it is
    told the same events again: they say what is there now, so that hearing them twice changes nothing. The file gets
    each event once.

    In each medium a follower hears of a block after its parent, and of its end only if it has heard of it. After
    AllBlocksCleared it knows of nothing.

    on_batch         is called with a KVEventBatch; what it raises is logged, and the step stays made
    path             of a file that gets a line for each batch
    name_of_adapter  lora_id -> lora_name
    """

    def __init__(
        self,
        manager: BlockManager,
        path: str | None = None,
        name_of_adapter: Callable[[int], str | None] = lambda lora_id: None,
    ) -> None:
        self.manager, self.name_of_adapter = manager, name_of_adapter
        self.on_batch: Callable[[KVEventBatch], None] | None = None
        self._hashes: set[bytes] = set()  # that a follower has of the pool, when it has heard all of _events
        self._registered: dict[int, Block] = {}  # block_id -> block that the running step has registered
        self._events: list[KVCacheEvent] = []  # that on_batch has not taken
        self._num_written = 0  # of these, the first ones, that are in the file
        self._notes: deque[Note] = deque()  # of stores' threads, that are no events yet
        self._in_stores: defaultdict[str, StoreHashes] = defaultdict(StoreHashes)  # by medium
        self.path = path
        if path is not None:
            self._events.append(AllBlocksCleared())  # of an engine that has written to the file before
            self.publish()

    # -- what the block manager does ------------------------------------------------------------------------------

    def on_event(self, event: BlockEvent) -> None:
        """See BlockManager.on_event."""
        if event.kind == "register":
            self._registered[event.block_id] = self.manager.blocks[event.block_id]
        elif event.kind == "evict":
            self._registered.pop(event.block_id, None)
            self._block_evicted(self.manager.blocks[event.block_id])
        elif event.kind == "computed":
            self._blocks_stored([*self._registered.values()])
            self._registered.clear()
            self.publish()
        elif event.kind == "clear":
            self.take_notes()
            self._events.append(AllBlocksCleared())
            self._hashes.clear()
            self._registered.clear()
            self._in_stores.clear()
            self.publish()

    def _blocks_stored(self, blocks: Iterable[Block]) -> None:
        """Their K/V can be read. Parents come before their children."""
        new = {block.block_hash: block for block in blocks if block.block_hash not in self._hashes}
        self._events.extend(self.stored_events(MEDIUM_GPU, map(_told, new.values())))
        self._hashes.update(new)  # pyrefly: ignore[bad-argument-type]

    def _block_evicted(self, block: Block) -> None:
        block_hash = block.block_hash
        if block_hash in self._hashes and len(self.manager.hash_to_block[block_hash]) == 1:
            self._hashes.discard(block_hash)
            self._events.append(BlockRemoved([block_hash], MEDIUM_GPU))

    # -- what stores tell, from any thread ------------------------------------------------------------------------

    def listen(self, store: Any, medium: str) -> None:
        """Hear what a store has and has forgotten, states among it. It is told with the next step, or with its parents.

        The store gets the notes alone: its thread would keep whoever it refers to, a follower and its engine, too.
        """
        notes = self._notes
        store.on_stored = lambda records: notes.append(Note(medium, stored=[r for r in records if r.kind == BLOCK]))
        store.on_removed = lambda keys: notes.append(Note(medium, removed=list(keys)))

    # -- telling --------------------------------------------------------------------------------------------------

    def stored_events(self, medium: str, blocks: Iterable[Told]) -> list[BlockStored]:
        """One event for each chain of blocks. Parents come before their children."""
        size, events = self.manager.block_size, list[BlockStored]()
        open_chains: dict[bytes, BlockStored] = {}  # by the hash of their last block
        for block in blocks:
            event = open_chains.pop(block.parent_hash, None) if block.parent_hash is not None else None
            if event is None:
                adapter = None if block.lora_id is None else self.name_of_adapter(block.lora_id)
                event = BlockStored([], block.parent_hash, [], size, block.lora_id, medium, adapter, [])
                events.append(event)
            event.block_hashes.append(block.block_hash)
            event.token_ids.extend(block.token_ids)
            event.extra_keys.append(block.extra)  # pyrefly: ignore[missing-attribute]
            open_chains[block.block_hash] = event
        for event in events:
            if not any(event.extra_keys or ()):
                event.extra_keys = None
        return events

    def take_notes(self) -> None:
        """Make events of what stores have told. An exception leaves a note where it is: taking it twice is harmless."""
        while self._notes:
            note = self._notes[0]
            known = self._in_stores[note.medium]
            stored = known.stored(note.stored)
            self._events.extend(self.stored_events(note.medium, map(_told_of_record, stored.values())))
            known.were_told(stored)
            removed = known.removed(note.removed)
            if removed:
                self._events.append(BlockRemoved(removed, note.medium))
                known.told.difference_update(removed)
            self._notes.popleft()

    def publish(self) -> None:
        self.take_notes()
        if not (events := self._events[:]):
            return
        now = time.time()
        batch = KVEventBatch(now, list(_merged(events)))
        if self._num_written == 0:
            self._write(batch)
        elif new := events[self._num_written :]:  # on_batch has raised since the others were written
            self._write(KVEventBatch(now, list(_merged(new))))
        self._num_written = len(events)
        if self.on_batch is not None and not notify(self.on_batch, batch):
            self._bound()
            return
        self._num_written = 0  # before they go: an exception between the two loses no line
        del self._events[: len(events)]

    def _bound(self) -> None:
        """Somebody does not listen. Events that wait for that are replaced by one, once they are many."""
        if len(self._events) > MAX_EVENTS:
            self._hashes.clear()
            self._in_stores.clear()
            self._num_written = 0
            self._events[:] = [AllBlocksCleared()]
            # All that the pool has is told anew. A hash was entered after its parent's.
            self._blocks_stored(next(iter(copies.values())) for copies in self.manager.hash_to_block.values())

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


def prepare(engine: "LLMEngine") -> None:
    """See wings.BESIDE_AN_ENGINE."""
    check_kv_events(engine.config)


def attach(engine: "LLMEngine", prepared: None) -> KVEvents:
    """As kv_events_config says. It hears of the tiers below the pool, too."""
    config: Any = engine.config.kv_events_config
    events = KVEvents(engine.block_manager, config.path)
    if engine.config.enable_lora:
        events.name_of_adapter = engine.known_adapters.name_of
    if (tiers := engine.tiers) is not None and tiers.memory is not None:
        events.listen(tiers.memory, "CPU")
    if tiers is not None and tiers.disk is not None:
        events.listen(tiers.disk.directory, "DISK")
        tiers.on_kept = tiers.disk.tell_of
    return events


def _told(block: Block) -> Told:
    keys = dict.fromkeys(key[0] for key in block.extra_keys if key[0] != "lora")
    lora_id = next((key[1] for key in block.extra_keys if key[0] == "lora"), None)
    return Told(block.block_hash, block.parent_hash, block.token_ids, lora_id, tuple(keys) or None)  # pyrefly: ignore[bad-argument-type]


def _told_of_record(record: Record) -> Told:
    extra = None if record.extra == NO_EXTRA else (record.extra.hex(),)
    return Told(record.block_hash, record.parent_hash, record.token_ids, lora_id=None, extra=extra)


def _merged(events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
    """The same, in one event what was removed one after another."""
    for medium, group in groupby(events, lambda event: event.medium if isinstance(event, BlockRemoved) else None):
        if medium is None:
            yield from group
        else:
            yield BlockRemoved([each for event in group for each in event.block_hashes], medium)  # pyrefly: ignore[missing-attribute]
