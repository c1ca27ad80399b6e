"""Tiers: K/V that the pool has lost, or that another process has computed, comes back before its prompt is admitted.

An admission finds what is in the pool, and nothing else (block_manager.py). Before that, the scheduler asks of each
waiting sequence whether it awaits anything. Then its blocks are looked for behind those that the pool has:

    blocks of the prompt     [ in the pool | in memory | on the disk | nowhere ]
    round 1                                  copied in
    round 2                                              read by a thread; the sequence waits, others are admitted
    admission                  found in the pool, as if they had never left it  | computed

A round brings a chain of blocks from one store. They get their names in the pool as computed blocks do, and are
nobody's, as if their sequence had ended. So nothing is reserved while a disk is read, and a sequence that is aborted
meanwhile leaves nothing behind. What does not come is computed.

The disk gets a block when it has been computed: parents come before children, so what a killed process leaves is whole
chains. Memory gets a block when the pool evicts it: what both had would be lost to the tier.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import copy
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from nanovllm.core.block_manager import Block, BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.manager import Snapshot
from nanovllm.core.tiers.names import TierNames
from nanovllm.core.tiers.pool_names import PoolNames
from nanovllm.core.tiers.store import STATE, BlockData, Record, Store
from nanovllm.core.tiers.watched import WatchedBlockManager, WatchedHybridBlockManager, Watcher

MAX_FETCHES = 4  # under way or not delivered yet; what each may take is bounded by its store
MAX_IN_VAIN = 3  # then what is still missing is computed


@dataclass(eq=False)
class Awaited:
    """What a waiting sequence wants from tiers.

    records     its full blocks
    num_in_vain answers that brought nothing: it was not there, or what comes before it has left the pool
    fetch       what a store has promised: the data of `wanted`
    found       {medium: tokens whose K/V has come from it}
    """

    records: list[Record]
    num_in_vain: int = 0
    has_asked_for_state: bool = False
    fetch: "Future[list[Any]] | None" = None
    store: Store | None = None
    wanted: list[Record] = field(default_factory=list)  # empty: another sequence has asked for them
    found: dict[str, int] = field(default_factory=dict)

    @property
    def is_pending(self) -> bool:
        return self.fetch is not None and not self.fetch.done()


class Tiers(Watcher):
    """Brings K/V back into a manager's pool, and hands stores what they may keep of it.

    memory      gets what the pool evicts; or None
    disk        gets what has been computed; or None
    data        the pool's tensors
    hit_tokens  {medium: [tokens of first admissions, of those after a preemption] that were found there}
    on_kept     is told of blocks that the pool has got and the disk may have had before
    """

    on_kept: Callable[[list[Record]], None] | None = None

    def __init__(
        self,
        manager: WatchedBlockManager,
        data: BlockData,
        names: TierNames,
        memory: Store | None = None,
        disk: Store | None = None,
    ) -> None:
        self.manager, self.data, self.memory, self.disk = manager, data, memory, disk
        self.names = PoolNames(manager, names)
        self.stores = [store for store in (memory, disk) if store is not None]
        self.hit_tokens = {medium: [0, 0] for medium in ("pool", *(store.medium for store in self.stores))}
        self._awaited: WeakKeyDictionary[Sequence, Awaited] = WeakKeyDictionary()
        self._fetching: WeakSet[Awaited] = WeakSet()  # who has asked a store and has not taken the answer
        manager.watchers.append(self)

    # -- back into the pool ---------------------------------------------------------------------------------------

    def awaits(self, seq: Sequence) -> bool:
        """See BlockManager.awaits. Takes in what has come, and asks for what comes next."""
        awaited = self._awaited.get(seq)
        if awaited is not None and awaited.is_pending:
            return True
        if awaited is None:
            if seq.skip_prefix_cache or not self.manager.enable_prefix_caching:
                return False
            if len(self._fetching) >= MAX_FETCHES:
                return True
            awaited = self._awaited[seq] = Awaited(self.names.records_of(seq))
        while not awaited.is_pending:
            plan = BlockManager.plan_allocation(self.manager, seq)
            if plan is None:  # no room for the sequence: what is brought in now would be evicted before its admission
                return False
            if awaited.fetch is not None:
                self.take(seq, awaited)
            elif not self.ask(seq, awaited, len(plan.hits)):
                return False
        return True

    def ask(self, seq: Sequence, awaited: Awaited, num_hits: int) -> bool:
        """Ask a store for what comes after the blocks that the pool has. False if none may have it."""
        wanted = self.next_wanted(seq, awaited, num_hits)
        store = next((store for store in self.stores if wanted and store.may_have(wanted[0].name)), None)
        if store is None:
            return False
        same = (other for other in self._fetching if other.is_pending and other.wanted[0].name == wanted[0].name)
        if (other := next(same, None)) is not None:
            awaited.fetch, awaited.wanted = other.fetch, []
            return True
        awaited.wanted, awaited.store = [*takewhile(lambda record: store.may_have(record.name), wanted)], store
        awaited.fetch = store.fetch(awaited.wanted)
        self._fetching.add(awaited)
        return True

    def next_wanted(self, seq: Sequence, awaited: Awaited, num_hits: int) -> list[Record]:
        """Records that would help, in order."""
        wanted = awaited.records[num_hits:]
        if isinstance(self.manager, WatchedHybridBlockManager):
            num_usable = self.num_usable(seq, awaited.records, num_hits)
            wanted = awaited.records[num_hits:num_usable]
            if num_usable and not wanted and not awaited.has_asked_for_state:
                awaited.has_asked_for_state = True
                missing = seq.block_hashes[num_usable - 1] not in self.manager.snapshots
                return [self.names.state_record(awaited.records[num_usable - 1])] if missing else []
        return wanted if awaited.num_in_vain < MAX_IN_VAIN else []

    def num_usable(self, seq: Sequence, records: list[Record], num_hits: int) -> int:
        """Of a hybrid model: blocks up to the deepest one that a state may be had after."""
        states: Any = self.manager
        end = (len(seq.tokens) - 1) // self.manager.block_size  # one token, at least, is left to be computed
        num_there = num_hits + sum(1 for _ in takewhile(self.is_kept, records[num_hits:]))
        for n in range(min(end, num_there), 0, -1):
            if seq.block_hashes[n - 1] in states.snapshots or self.is_kept(self.names.state_record(records[n - 1])):
                return n
        return 0

    def take(self, seq: Sequence, awaited: Awaited) -> None:
        """Put what a fetch has brought into the pool."""
        assert awaited.fetch is not None
        data, wanted, store, awaited.fetch = awaited.fetch.result(), awaited.wanted, awaited.store, None
        self._fetching.discard(awaited)
        if not wanted or store is None:
            return
        if not data:
            awaited.num_in_vain += 1
        elif wanted[0].kind == STATE:
            self.put_state(seq.block_hashes[wanted[0].depth - 1], data[0])
        else:
            num_blocks = self.put_blocks(seq, wanted[0].depth, data)
            awaited.num_in_vain += num_blocks == 0
            awaited.found[store.medium] = awaited.found.get(store.medium, 0) + num_blocks * self.manager.block_size

    def put_blocks(self, seq: Sequence, first: int, data: list[Any]) -> int:
        """Give K/V of the sequence's full blocks, from `first` on, blocks of the pool and their names. How many."""
        plan = BlockManager.plan_allocation(self.manager, seq)
        num_hits = 0 if plan is None else len(plan.hits)
        if plan is None or not first <= num_hits < first + len(data):
            return 0
        data, loaded = data[num_hits - first :], copy(seq)
        loaded.block_table = []
        for block in plan.hits:  # held, so that they are not evicted for their own children
            if block.ref_count == 0:
                self.manager.free_blocks.remove(block)
            block.ref_count += 1
            loaded.block_table.append(block.block_id)
        self.manager.take_fresh_blocks(loaded, len(data))
        self.data.write(loaded.block_table[num_hits:], data)
        loaded.num_computed_tokens = len(loaded.block_table) * self.manager.block_size
        loaded.num_registered_blocks = num_hits
        BlockManager.register_prefix(self.manager, loaded)
        BlockManager.free(self.manager, loaded)
        return loaded.num_registered_blocks - num_hits

    def put_state(self, name: bytes, data: Any) -> None:
        """Make a snapshot of what was kept of a block's state, if the block is in the pool and a slot can be had."""
        states: Any = self.manager
        if name not in states.hash_to_block or name in states.snapshots:
            return
        if (slot := states.slot_to_write()) is not None:
            self.data.write_state(slot, data)
            states.snapshots[name] = Snapshot(slot, is_wanted=True)

    def wait(self, seconds: float) -> bool:
        """Nothing else can be done: wait until something has come, but not for longer. False if nothing is awaited."""
        pending = [awaited.fetch for awaited in self._awaited.values() if awaited.fetch is not None]
        wait(pending, seconds, FIRST_COMPLETED)
        return bool(pending)

    # -- what the manager tells -----------------------------------------------------------------------------------

    def admitted(self, seq: Sequence, is_first: bool) -> None:
        awaited = self._awaited.pop(seq, None)
        found = {} if awaited is None else awaited.found
        pool = seq.num_cached_tokens - sum(found.values())
        for medium, num_tokens in {**found, "pool": max(pool, 0)}.items():
            self.hit_tokens[medium][not is_first] += num_tokens
        blocks = [self.manager.blocks[block_id] for block_id in seq.block_table[: seq.num_registered_blocks]]
        names = [self.names.name_of(block) for block in blocks]
        if names and seq.state is not None:
            names.append(self.names.names.name_of_state(names[-1]))  # it began with the state after its last hit
        for store in self.stores if names else ():
            store.touch(names)

    def stored(self, blocks: list[Block]) -> None:
        disk = self.disk
        if disk is None:
            return
        if new := [block for block in blocks if not disk.may_have(self.names.name_of(block))]:
            ids = [block.block_id for block in new]
            disk.put([self.names.record_of(block) for block in new], lambda: self.data.read(ids))
        if self.on_kept is not None and len(new) < len(blocks):
            put = {block.block_id for block in new}
            self.on_kept([self.names.record_of(block) for block in blocks if block.block_id not in put])

    def removed(self, block: Block) -> None:
        assert block.block_hash is not None
        if self.memory is not None:
            self.memory.put([self.names.record_of(block)], lambda: self.data.read([block.block_id]))
            if isinstance(self.manager, WatchedHybridBlockManager):
                self.snapshot_removed(block.block_hash)
        self.names.forget(block)

    def snapshots_stored(self, names: list[bytes]) -> None:
        if self.disk is not None:
            for name in names:
                self.keep_state(self.disk, name)

    def snapshot_removed(self, name: bytes) -> None:
        if self.memory is not None:
            self.keep_state(self.memory, name)

    def keep_state(self, store: Store, name: bytes) -> None:
        states: Any = self.manager
        if (slot := states.slot_of(name)) is not None:
            block = next(iter(states.hash_to_block[name].values()))
            store.put([self.names.state_record(self.names.record_of(block))], lambda: [self.data.read_state(slot)])

    def rolled_back(self) -> None:
        self.names.clear()

    def cleared(self) -> None:
        self.names.clear()

    def is_kept(self, record: Record) -> bool:
        return any(store.may_have(record.name) for store in self.stores)
