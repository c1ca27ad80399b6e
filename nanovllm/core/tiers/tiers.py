"""Tiers: K/V that the pool has lost, or that another process has computed, comes back before its prompt is admitted.

An admission finds what is in the pool and nothing else (block_manager.py). So at the beginning of a step poll() looks
at the first sequences that wait, and searches the tiers for the blocks that follow those in the pool:

    blocks of the prompt     [ in the pool | in memory | on the disk | nowhere ]
    round 1                                  copied in
    round 2                                              read by a thread; the sequence waits, others are admitted
    admission                found in the pool, as if they had never left it  | computed

A round brings a run of blocks from one store. They are cached in the pool as computed blocks are, and nobody holds
them, as if their sequence had ended. So nothing is reserved while a disk is read, and a sequence that is aborted
meanwhile leaves nothing behind. What does not come is computed.

The disk gets a block when its step has been computed; parents come before children. Memory gets a block when the pool
evicts it, since keeping it in both places would waste memory. Its K/V is copied by save_evicted(), after the step has
been scheduled and before it is computed.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Any

from nanovllm.core.block_hash import ExtraKeys
from nanovllm.core.block_manager import Block, BlockEvent, BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.store import EXTRA_BYTES, NO_EXTRA, STATE, BlockData, Record, Store, state_key

MAX_FETCHES = 4  # under way, or not taken in yet; how much each may bring is bounded by its store
MAX_IN_VAIN = 3  # answers that bring nothing; then what is still missing is computed
MAX_POLLED = 32  # sequences looked at in a step, so that it does not take longer where more of them wait


@dataclass(eq=False)
class Awaited:
    """What a waiting sequence wants from tiers.

    records      its full blocks
    num_in_vain  answers that brought nothing: it was not there, or what comes before it has left the pool
    fetch        what a store has promised: the data of `wanted`, which begins at the sequence's block `first`
    found        {medium: tokens whose K/V has come from it}
    """

    records: list[Record]
    num_in_vain: int = 0
    has_asked_for_state: bool = False
    fetch: "Future[list[Any]] | None" = None
    store: Store | None = None
    wanted: list[Record] = field(default_factory=list)  # empty: another sequence has asked for them
    first: int = 0
    found: dict[str, int] = field(default_factory=dict)

    @property
    def is_pending(self) -> bool:
        return self.fetch is not None and not self.fetch.done()


class Tiers:
    """Brings K/V back into a manager's pool, and hands stores what they may keep of it.

    memory      gets what the pool evicts; or None
    disk        gets what has been computed; or None
    data        the pool's tensors
    hit_tokens  {medium: [tokens of first admissions, of those after a preemption] that were found there}
    on_kept     called with blocks that the pool has got and the disk may have had before; or None

    on_event() hears what the block manager does. In each step poll() comes before schedule(), which admits none but the
    sequences that poll() returns (Scheduler.candidates), and save_evicted() between that and the computation.
    """

    def __init__(
        self, manager: BlockManager, data: BlockData, memory: Store | None = None, disk: Store | None = None
    ) -> None:
        self.manager = manager
        self.data = data
        self.memory = memory
        self.disk = disk
        self.stores = [store for store in (memory, disk) if store is not None]
        self.hit_tokens = {medium: [0, 0] for medium in ("pool", *(store.medium for store in self.stores))}
        self.on_kept: Callable[[list[Record]], None] | None = None
        self._awaited: dict[int, Awaited] = {}  # seq_id -> what it wants
        self._polled: list[int] = []  # seq_ids of those that were looked up last
        self._was_refused = False  # one of them could not ask: too many fetches were on their way
        self._preempted: set[int] = set()  # seq_ids of those that wait and have had blocks before
        self._reset_step()

    def _reset_step(self) -> None:
        self._hits: dict[int, list[Block]] = {}  # seq_id -> the cached blocks that it was admitted with
        self._registered: dict[int, Block] = {}  # block_id -> block; not stored yet
        self._evicted: list[tuple[Record, int]] = []  # block_id
        self._dropped: list[tuple[Record, int]] = []  # of states: the slot
        self._new_snapshots: dict[bytes, bool] = {}  # block hash -> has it been computed? not stored yet

    # -- back into the pool ---------------------------------------------------------------------------------------

    def poll(self, waiting: Iterable[Sequence], is_full: bool = False) -> list[Sequence]:
        """Take in what has arrived, and ask for what is missing, for the sequences that may be admitted next.

        waiting: in the order of the queue. Returns the first of them, MAX_POLLED at most. Sets awaits_blocks of these:
        others are admitted before one that awaits any. It is True, too, of those for which the pool has no
        room: what was brought in now would be evicted before their admission.

        So the time that it takes depends on these sequences' prompts, and not on how many wait after them. It is called
        in every step, also where nobody can be admitted: meanwhile their blocks are read ahead.

        is_full: none of them can be admitted now, because max_num_seqs sequences are running. Then the same ones are
        not looked up again while nothing is on its way to them, and none waits until it may ask.
        """
        polled = list(islice(waiting, MAX_POLLED))
        seq_ids = [seq.seq_id for seq in polled]
        is_idle = not self._was_refused and not any(awaited.fetch for awaited in self._awaited.values())
        if is_full and is_idle and seq_ids == self._polled:
            return polled
        self._polled, self._was_refused = seq_ids, False
        for seq in polled:
            seq.awaits_blocks = True
        # What the others have asked for is given up. Nobody takes it in, and it would use up MAX_FETCHES for ever.
        self._awaited = {seq.seq_id: self._awaited[seq.seq_id] for seq in polled if seq.seq_id in self._awaited}
        self._preempted = {seq.seq_id for seq in polled if seq.was_admitted}
        num_free = len(self.manager.free_blocks)
        ahead: dict[int, Block] = {}  # block_id -> cached blocks that sequences further ahead will reuse
        for seq in polled:
            hits = self.manager.get_computed_blocks(seq).blocks
            if self.num_needed(seq, hits, ahead) > num_free:
                break
            hits = self.bring(seq, hits, ahead)
            if not seq.awaits_blocks:
                num_free -= self.num_needed(seq, hits, ahead)
            ahead |= {block.block_id: block for block in hits}

        # What they will reuse counts as used now, or fresh blocks for the first of them would evict it.
        queue = self.manager.free_blocks
        for block in reversed(ahead.values()):
            if block.ref_count == 0:
                queue.remove(block)
                queue.append(block)
        return polled

    def num_needed(self, seq: Sequence, hits: list[Block], ahead: dict[int, Block]) -> int:
        """Blocks of the free queue that its admission takes, beside those that sequences further ahead reuse."""
        num_shared = sum(block.ref_count > 0 or block.block_id in ahead for block in hits)
        return self.manager.num_blocks_for(len(seq.tokens)) - num_shared

    def bring(self, seq: Sequence, hits: list[Block], ahead: dict[int, Block]) -> list[Block]:
        """Take in what has come for a sequence, and ask for what comes next. Ends awaits_blocks if nothing is left.

        hits: its cached blocks. Returns them with those that have just come.
        """
        if seq.scores_prompt or not self.manager.enable_prefix_caching:
            seq.awaits_blocks = False
            return hits
        awaited = self._awaited.get(seq.seq_id)
        if awaited is None:
            if len(self._fetching()) >= MAX_FETCHES:
                self._was_refused = True
                return hits
            awaited = self._awaited[seq.seq_id] = Awaited(self.records_of(seq))
        while not awaited.is_pending:
            if awaited.fetch is not None:
                self.take(seq, awaited, ahead)
                hits = self.manager.get_computed_blocks(seq).blocks
            elif not self.ask(seq, awaited, len(hits)):
                seq.awaits_blocks = False
                break
        return hits

    def ask(self, seq: Sequence, awaited: Awaited, num_hits: int) -> bool:
        """Ask a store for what comes after the blocks that the pool has. False if none may have it."""
        wanted = self.next_wanted(seq, awaited, num_hits)
        store = next((store for store in self.stores if wanted and store.may_have(wanted[0].key)), None)
        if store is None:
            return False
        for other in self._fetching():
            if other.is_pending and other.wanted[0].key == wanted[0].key:
                awaited.fetch = other.fetch
                awaited.wanted = []
                return True
        awaited.store = store
        awaited.first = num_hits
        awaited.wanted = list(takewhile(lambda record: store.may_have(record.key), wanted))
        awaited.fetch = store.fetch(awaited.wanted)
        return True

    def next_wanted(self, seq: Sequence, awaited: Awaited, num_hits: int) -> list[Record]:
        """Records that would help, in order."""
        wanted = awaited.records[num_hits:]
        snapshots = self.manager.snapshots
        if snapshots is not None:
            num_usable = self.num_usable(seq, awaited.records, num_hits)
            wanted = awaited.records[num_hits:num_usable]
            if num_usable and not wanted and not awaited.has_asked_for_state:
                awaited.has_asked_for_state = True
                block_hash = seq.block_hashes[num_usable - 1]
                return [] if block_hash in snapshots.by_hash else [self.state_record(block_hash)]
        return wanted if awaited.num_in_vain < MAX_IN_VAIN else []

    def num_usable(self, seq: Sequence, records: list[Record], num_hits: int) -> int:
        """How many blocks a hybrid model's sequence can use: up to the deepest one after which a state may be had."""
        assert self.manager.snapshots is not None
        end = (len(seq.tokens) - 1) // self.manager.block_size  # one token, at least, is left to be computed
        num_there = num_hits + sum(1 for _ in takewhile(lambda record: self.is_kept(record.key), records[num_hits:]))
        for n in range(min(end, num_there), 0, -1):
            block_hash = seq.block_hashes[n - 1]
            if block_hash in self.manager.snapshots.by_hash or self.is_kept(state_key(block_hash)):
                return n
        return 0

    def take(self, seq: Sequence, awaited: Awaited, ahead: dict[int, Block]) -> None:
        """Put what a fetch has brought into the pool."""
        assert awaited.fetch is not None
        data = awaited.fetch.result()
        awaited.fetch = None
        if not awaited.wanted or awaited.store is None:
            return  # another sequence takes it in
        if not data:
            awaited.num_in_vain += 1
        elif awaited.wanted[0].kind == STATE:
            self.put_state(awaited.wanted[0].block_hash, data[0])
        else:
            num_blocks = self.put_blocks(seq, awaited.first, data, ahead)
            awaited.num_in_vain += num_blocks == 0
            medium = awaited.store.medium
            awaited.found[medium] = awaited.found.get(medium, 0) + num_blocks * self.manager.block_size

    def put_blocks(self, seq: Sequence, first: int, data: list[Any], ahead: dict[int, Block]) -> int:
        """Cache K/V of the sequence's full blocks, from `first` on, in blocks of the pool. Returns how many.

        The blocks before them are held meanwhile, and so are those that sequences further ahead will reuse.
        """
        hits = self.manager.get_computed_blocks(seq).blocks
        if not first <= len(hits) < first + len(data):
            return 0
        loaded, holder = copy(seq), copy(seq)
        loaded.block_table = [block.block_id for block in hits]
        holder.block_table = list(ahead)
        self.manager.touch(hits)
        self.manager.touch(list(ahead.values()))
        data = data[len(hits) - first :][: len(self.manager.free_blocks)]
        self.manager.take_fresh_blocks(loaded, len(data))
        self.save_evicted()
        self.data.write(loaded.block_table[len(hits) :], data)
        loaded.num_computed_tokens = len(loaded.block_table) * self.manager.block_size
        loaded.num_registered_blocks = len(hits)
        loaded.hash_collision = False  # that of an admission before
        self.manager.register_prefix(loaded)
        self.manager.free(loaded)
        self.manager.free(holder)  # last: what is needed first is evicted last
        return loaded.num_registered_blocks - len(hits)

    def put_state(self, block_hash: bytes, data: Any) -> None:
        """Make a snapshot of what was kept of a block's state, if the block is in the pool and a slot can be had."""
        snapshots = self.manager.snapshots
        assert snapshots is not None
        if block_hash not in self.manager.hash_to_block or block_hash in snapshots.by_hash:
            return
        slot = snapshots.take_slot(is_wanted=True)
        if slot is not None:
            self.save_evicted()
            self.data.write_state(slot, data)
            snapshots.add(block_hash, slot, is_wanted=True)

    def wait(self, seconds: float) -> bool:
        """Nothing else can be done: wait until something has come, but not for longer. False if nothing is awaited."""
        pending = [awaited.fetch for awaited in self._awaited.values() if awaited.fetch is not None]
        wait(pending, seconds, FIRST_COMPLETED)
        return bool(pending)

    def _fetching(self) -> list[Awaited]:
        """Who has asked a store and has not taken the answer in."""
        return [awaited for awaited in self._awaited.values() if awaited.fetch is not None and awaited.wanted]

    # -- out of the pool ------------------------------------------------------------------------------------------

    def on_event(self, event: BlockEvent) -> None:
        """See BlockManager.on_event. Nothing is copied here."""
        block = self.manager.blocks[event.block_id]
        if event.kind == "hit":
            self._hits.setdefault(event.seq_id, []).append(block)
        elif event.kind == "register":
            self._registered[block.block_id] = block
        elif event.kind == "evict":
            self._registered.pop(block.block_id, None)
            if self.memory is not None:
                self._evicted.append((self.record_of(block), block.block_id))
            if len(self.manager.hash_to_block[block.block_hash]) == 1:  # pyrefly: ignore[bad-index]
                self._drop_snapshot(block)
        elif event.kind == "snapshot":
            self._new_snapshots[block.block_hash] = False  # pyrefly: ignore[unsupported-operation]
        elif event.kind == "drop_snapshot":
            self._drop_snapshot(block)
        elif event.kind == "computed":
            self._store_computed()
        elif event.kind == "clear":
            self._awaited.clear()
            self._reset_step()

    def save_evicted(self) -> None:
        """Copy what has been evicted into memory, before anything is written over it."""
        if self.memory is not None:
            for record, block_id in self._evicted:
                self.memory.put([record], lambda n: self.data.read([block_id]))  # noqa: B023
            for record, slot in self._dropped:
                self.memory.put([record], lambda n: [self.data.read_state(slot)])  # noqa: B023
        self._evicted.clear()
        self._dropped.clear()

    def _drop_snapshot(self, block: Block) -> None:
        """The snapshot after this block is about to go, if there is one. One that is not computed yet is no loss."""
        snapshots, block_hash = self.manager.snapshots, block.block_hash
        if snapshots is None or block_hash not in snapshots.by_hash:
            return
        is_computed = self._new_snapshots.pop(block_hash, True)
        if is_computed and self.memory is not None:
            self._dropped.append((self.state_record(block_hash), snapshots.by_hash[block_hash].slot))

    def _store_computed(self) -> None:
        """A step has been computed: the disk gets what is new, and stores hear what was used."""
        for seq_id, blocks in self._hits.items():
            self._count_hits(seq_id, len(blocks) * self.manager.block_size)
            keys = [block.block_hash for block in blocks if block.block_hash is not None]
            if self.manager.snapshots is not None:
                keys.append(state_key(keys[-1]))  # the sequence began with the state after its last hit
            for store in self.stores:
                store.touch(keys)
        self._hits.clear()
        if self.disk is not None:
            self._store_blocks(self.disk)
        self._registered.clear()
        if self.manager.snapshots is not None:
            self._store_snapshots()

    def _store_blocks(self, disk: Store) -> None:
        """What the step has registered; a block's parent was registered before it."""
        records = {block.block_id: self.record_of(block) for block in self._registered.values()}
        new, kept, keys = dict[int, Record](), list[Record](), set[bytes]()
        for block_id, record in records.items():
            parent = record.parent_hash
            if disk.may_have(record.key):
                kept.append(record)
            elif parent is None or parent in keys or disk.may_have(parent):  # else nobody could find it
                new[block_id] = record
                keys.add(record.key)
        if new:
            disk.put([*new.values()], lambda n: self.data.read([*new][:n]))
        if self.on_kept is not None and kept:
            self.on_kept(kept)

    def _store_snapshots(self) -> None:
        """Only the newest snapshot of a running sequence's output is kept, and it goes within a few tokens: the disk
        gets it when the sequence has ended."""
        snapshots = self.manager.snapshots
        assert snapshots is not None
        newest = {state.newest for state in snapshots.states.values()}
        for block_hash in list(self._new_snapshots):
            self._new_snapshots[block_hash] = True
            if block_hash in newest:
                continue
            del self._new_snapshots[block_hash]
            disk = self.disk
            if disk is not None and disk.may_have(block_hash) and not disk.may_have(state_key(block_hash)):
                slot = snapshots.by_hash[block_hash].slot
                disk.put([self.state_record(block_hash)], lambda n: [self.data.read_state(slot)])  # noqa: B023

    def _count_hits(self, seq_id: int, num_tokens: int) -> None:
        """A sequence was admitted with this many tokens in cached blocks, wherever their K/V came from."""
        awaited = self._awaited.pop(seq_id, None)
        found = {} if awaited is None else awaited.found
        for medium, num_found in {**found, "pool": num_tokens}.items():
            counted = min(num_found, num_tokens)  # what has come may have left the pool again before the admission
            num_tokens -= counted
            self.hit_tokens[medium][seq_id in self._preempted] += counted

    # -- records --------------------------------------------------------------------------------------------------

    def records_of(self, seq: Sequence) -> list[Record]:
        """The records of all full blocks of a sequence."""
        records = []
        for index in range(len(seq.tokens) // self.manager.block_size):
            block_hash, (parent_hash, token_ids, extra_keys) = self.manager.hash_block(seq, index)
            records.append(Record(block_hash, parent_hash, token_ids, self.digest(extra_keys)))
        return records

    def record_of(self, block: Block) -> Record:
        """The record of a cached block."""
        assert block.block_hash is not None
        return Record(block.block_hash, block.parent_hash, block.token_ids, self.digest(block.extra_keys))

    def state_record(self, block_hash: bytes) -> Record:
        """The record of the state after a block."""
        return Record(block_hash, None, (), NO_EXTRA, STATE)

    def digest(self, extra_keys: ExtraKeys) -> bytes:
        """A digest of a block's extra keys: stores need not know a salt."""
        if not extra_keys:
            return NO_EXTRA
        return blake2b(self.manager.hasher.encode(extra_keys), digest_size=EXTRA_BYTES).digest()

    def is_kept(self, key: bytes) -> bool:
        return any(store.may_have(key) for store in self.stores)
