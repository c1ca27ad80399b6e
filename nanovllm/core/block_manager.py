"""BlockManager: which sequence holds which block of the KV pool, and which blocks are cached (chapters 4 and 7).

The pool is a list of blocks, made once. A block is in one of three states:

    referenced      a running sequence has it in its block table
    unreferenced    nobody holds it, but it is cached: its K/V can be found and reused until the block is taken
    free            nobody holds it, and it is not cached

These are states, not queues. `free_blocks`, the queue, holds unreferenced blocks as well as free ones. Its head is
taken next, so the order of the queue is the eviction policy. A sequence gives its blocks back last block first; an
uncached block goes to the head, a cached one to the tail:

    head: taken next                                                                       tail
    [ free: nothing is lost | unreferenced: released longest ago            ...  released last ]

So no cached block is evicted while a free one is left (with the default free_order), and of blocks released together
the deepest is evicted first. A radix tree that takes unused memory first and then evicts the leaf released longest ago
(SGLang's, RadixAttention, arXiv:2312.07104) evicts the same blocks, except where two running sequences fill blocks with
the same content: that is one node there and two blocks here (tests/core/test_prefix_properties.py compares the two,
operation by operation).

Invariants, asserted by check_integrity():
- a block is in the free queue if and only if its ref_count is 0;
- in the free queue, uncached blocks come before cached ones (free_order="release": mixed, as they were released);
- hash_to_block holds exactly the cached blocks, and all blocks under one hash have the same content;
- a cached block is full and is never written again: this is why sharing needs no copy-on-write;
- a cached block's parent is cached too (some copy of it), so probing from the front finds all there is to find.

Two sequences that compute the same tokens at the same time fill two blocks with the same content. Both are cached; a
later request can reuse either, and each is evicted on its own. vLLM v0 instead freed the second block and put the first
into the other sequence's table. That saves a block, but then tables change after they were handed out; here they are
append-only.

This file never sees a tensor: it hands out block ids.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.core import integrity
from nanovllm.core.block_hash import BlockHasher, ExtraKeys, extra_keys
from nanovllm.core.cache_stats import PrefixCacheStats
from nanovllm.core.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.core.snapshots.cache import SnapshotCache

# What a block hash stands for: parent's hash, token ids, extra keys.
Content = tuple[bytes | None, list[int], ExtraKeys]


@dataclass(slots=True, eq=False)
class Block:
    """One block of the pool.

    While it is cached, it has its hash (block_hash) and the content that the hash stands for: parent_hash, token_ids
    and extra_keys, which a hit is compared with.
    """

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    parent_hash: bytes | None = None
    token_ids: list[int] = field(default_factory=list)
    extra_keys: ExtraKeys = ()
    prev_free: Any = None  # its neighbors, blocks, while it is in the free queue
    next_free: Any = None

    def holds(self, content: Content) -> bool:
        """Is this really the cached block's content? Two contents may have the same hash."""
        return (self.parent_hash, self.token_ids, self.extra_keys) == content

    def reset_hash(self) -> None:
        self.block_hash = None
        self.parent_hash = None
        self.token_ids = []
        self.extra_keys = ()


class FreeBlockQueue:
    """A doubly linked list threaded through the blocks: every operation is O(1), removal from the middle included."""

    def __init__(self, blocks: list[Block]) -> None:
        # The list is a ring through a sentinel, so that no operation has a special case for the ends.
        self._ring = Block(-1)
        self._ring.prev_free = self._ring.next_free = self._ring
        self._len = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        """Block ids from the head (taken next) to the tail."""
        block = self._ring.next_free
        while block is not self._ring:
            yield block.block_id
            block = block.next_free

    def append(self, block: Block) -> None:
        self._insert(self._ring.prev_free, block, self._ring)

    def appendleft(self, block: Block) -> None:
        self._insert(self._ring, block, self._ring.next_free)

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        assert block.next_free is None, f"block {block.block_id} is in the free queue already"
        block.prev_free = before
        block.next_free = after
        before.next_free = block
        after.prev_free = block
        self._len += 1

    def remove(self, block: Block) -> None:
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        block.prev_free = block.next_free = None
        self._len -= 1

    def popleft(self) -> Block:
        block = self._ring.next_free
        assert block is not self._ring, "the free queue is empty"
        self.remove(block)
        return block


class BlockEvent(NamedTuple):
    """What has become of a block, or of the pool. kind is one of

    "hit"              a sequence reuses a cached block
    "allocate"         a sequence has taken a fresh block
    "register"         the block is cached from now on; its K/V can be read after the next "computed"
    "evict"            a cached block is about to lose its hash: its K/V and its hash are still there
    "free"             the last sequence that held the block has given it back
    "computed"         the step has been computed: K/V of all cached blocks, and all snapshots, can be read
    "clear"            nothing is cached any more
    "snapshot"         a snapshot is taken of the state after this block (core/snapshots)
    "drop_snapshot"    that snapshot is about to be given up; the block stays cached

    block_id and seq_id are -1 where there is none.
    """

    kind: str
    block_id: int = -1
    seq_id: int = -1


Listener = Callable[[BlockEvent], None]


def broadcast(*listeners: Listener | None) -> Listener | None:
    """One listener that calls each of the given ones, in this order; None if none is given."""
    given = [listener for listener in listeners if listener is not None]
    if len(given) < 2:
        return given[0] if given else None

    def tell_each(event: BlockEvent) -> None:
        for listener in given:
            listener(event)

    return tell_each


class ComputedBlocks(NamedTuple):
    """What get_computed_blocks has found.

    blocks            the cached blocks at the beginning of a sequence, in order
    hash_collision    the search ended at a block whose hash stands for other content, not at one that is not cached
    """

    blocks: list[Block]
    hash_collision: bool


class BlockManager:
    """Allocates blocks to sequences and keeps the prefix cache.

    blocks          the pool; index == block_id
    free_blocks     the free queue
    hash_to_block   block hash -> {block_id: Block}, the blocks that hold it
    free_order      "uncached_first": uncached blocks go to the head; "release": every freed block goes to the tail, as
                    in vLLM until 2026
    snapshots       of a model that has states beside its K/V (core/snapshots); None for every other model
    on_event        called with every BlockEvent, in the middle of an operation: it must change nothing here.
                    broadcast() makes one listener of several
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_algo: str = "xxh64",
        free_order: str = "uncached_first",
        snapshots: "SnapshotCache | None" = None,
    ) -> None:
        if free_order not in ("uncached_first", "release"):
            raise ValueError(f'free_order must be "uncached_first" or "release", found {free_order!r}')
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, found {num_blocks} x {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.free_order = free_order
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_blocks = FreeBlockQueue(self.blocks)
        self.hash_to_block: dict[bytes, dict[int, Block]] = {}
        self.hasher = BlockHasher(block_size, hash_algo)
        self.stats = PrefixCacheStats()
        self.on_event: Listener | None = None
        self.snapshots = snapshots
        if snapshots is not None:
            snapshots.on_event = self._emit_snapshot

    # -- what the scheduler calls ---------------------------------------------------------------------------------

    def allocate_with_prefix(self, seq: Sequence) -> bool:
        """Reuse the longest cached prefix of seq.tokens and reserve fresh blocks for the rest.

        It reserves blocks for all tokens, not only for those of the first chunk, so a prompt in chunks never waits for
        blocks. It sets block_table, num_cached_tokens and num_computed_tokens. A fully cached sequence still computes
        its last token, to have logits to sample from. Returns False, with nothing changed, if the pool cannot hold it.
        """
        assert seq.tokens and not seq.block_table, f"{seq} is empty or already holds blocks"
        found = self.get_computed_blocks(seq)
        hits = self._reusable(seq, found.blocks)
        if not self._has_room(seq, hits):
            return False

        # The hits leave the free queue before fresh blocks are popped from it, or one of them might be popped.
        self.touch(hits)
        for block in hits:
            seq.block_table.append(block.block_id)
            self._emit("hit", block.block_id, seq.seq_id)
        self.take_fresh_blocks(seq, self.num_blocks_for(len(seq.tokens)) - len(hits))

        seq.num_cached_tokens = min(len(hits) * self.block_size, len(seq.tokens) - 1)
        seq.num_computed_tokens = seq.num_cached_tokens
        seq.num_registered_blocks = len(hits)
        seq.hash_collision = found.hash_collision
        if self.snapshots is not None:
            num_matched_tokens = len(found.blocks) * self.block_size
            self.snapshots.allocate(seq, num_matched_tokens, self.block_size)
        if self.enable_prefix_caching and not seq.scores_prompt:
            num_full_blocks = len(seq.tokens) // self.block_size
            self.stats.record(num_full_blocks, len(hits), found.hash_collision, was_preempted=seq.was_admitted)
        seq.was_admitted = True
        return True

    def register_prefix(self, seq: Sequence) -> None:
        """Cache every full block of the first num_computed_tokens tokens, so that others find it.

        After a hash that already stands for other content, none of the sequence's later blocks is cached either: their
        parent could not be found.
        """
        if not self.enable_prefix_caching:
            return
        num_full_blocks = seq.num_computed_tokens // self.block_size
        for index in range(seq.num_registered_blocks, num_full_blocks):
            if seq.hash_collision:
                break
            block = self.blocks[seq.block_table[index]]
            block_hash, content = self.hash_block(seq, index)
            copies = self.hash_to_block.setdefault(block_hash, {})
            if copies and not next(iter(copies.values())).holds(content):
                self.stats.collisions += 1
                seq.hash_collision = True
                break
            copies[block.block_id] = block
            block.block_hash = block_hash
            block.parent_hash, block.token_ids, block.extra_keys = content
            seq.num_registered_blocks = index + 1
            self._emit("register", block.block_id, seq.seq_id)
        if self.snapshots is not None:
            self.snapshots.take(seq, self.block_size)

    def append_slots(self, seq: Sequence, num_tokens: int = 1) -> bool:
        """Grow the table to hold num_computed_tokens + num_tokens. False, with nothing changed, if it can't."""
        num_needed = self.num_blocks_for(seq.num_computed_tokens + num_tokens) - len(seq.block_table)
        if num_needed > len(self.free_blocks):
            return False
        self.take_fresh_blocks(seq, num_needed)
        return True

    def free(self, seq: Sequence) -> None:
        """Give a sequence's blocks back, last block first. The cached ones can be found until they are taken."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None and self.free_order == "uncached_first":
                    self.free_blocks.appendleft(block)
                else:
                    self.free_blocks.append(block)
                self._emit("free", block_id, seq.seq_id)
        seq.block_table = []
        if self.snapshots is not None:
            self.snapshots.free(seq)

    def step_done(self) -> None:
        """Announce that a step has been computed: from now on the K/V of every cached block can be read outside it."""
        self._emit("computed")

    # -- questions: they change nothing, except that seq.block_hashes keeps what was hashed ------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def hash_block(self, seq: Sequence, index: int) -> tuple[bytes, Content]:
        """(hash, content) of full block `index`. Blocks 0 to index - 1 must have been asked for before.

        seq.block_hashes keeps each hash, so a block is hashed once.
        """
        assert index <= len(seq.block_hashes), f"block {index} is asked for before block {len(seq.block_hashes)}"
        start = index * self.block_size
        parent_hash = seq.block_hashes[index - 1] if index > 0 else None
        token_ids = seq.tokens[start : start + self.block_size]
        extra: ExtraKeys = ()
        if seq.has_extra_keys:
            extra = extra_keys(index, self.block_size, seq.cache_salt, seq.lora_id, seq.mm_spans)
        if index == len(seq.block_hashes):
            seq.block_hashes.append(self.hasher.hash_block(parent_hash, token_ids, extra))
        return seq.block_hashes[index], (parent_hash, token_ids, extra)

    def get_computed_blocks(self, seq: Sequence) -> ComputedBlocks:
        """The longest cached prefix of a sequence. It ends at the first block that is not found."""
        blocks: list[Block] = []
        if not self.enable_prefix_caching or seq.scores_prompt:
            return ComputedBlocks(blocks, hash_collision=False)
        for index in range(len(seq.tokens) // self.block_size):
            block_hash, content = self.hash_block(seq, index)
            copies = self.hash_to_block.get(block_hash)
            if copies is None:
                break
            block = next(iter(copies.values()))
            if not block.holds(content):
                return ComputedBlocks(blocks, hash_collision=True)
            blocks.append(block)
        return ComputedBlocks(blocks, hash_collision=False)

    def can_allocate(self, seq: Sequence) -> bool:
        """Would allocate_with_prefix succeed now? Exact, not an estimate."""
        return self._has_room(seq, self._reusable(seq, self.get_computed_blocks(seq).blocks))

    def is_cached(self, seq: Sequence, position: int) -> bool:
        """Is the K/V of this position in a cached block of the sequence's table?"""
        return self.blocks[seq.block_table[position // self.block_size]].block_hash is not None

    def eviction_candidates(self, n: int) -> list[int]:
        """The next n blocks to be taken, in that order."""
        return [block_id for block_id, _ in zip(self.free_blocks, range(n), strict=False)]

    # -- the cache as a whole -------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget everything that is cached. False, with nothing changed, while any block is in use."""
        if len(self.free_blocks) != len(self.blocks):
            return False
        self.clear()
        self.stats.recent.clear()
        return True

    def clear(self) -> None:
        """Make every block free and uncached, in whatever state the pool is.

        It is called after a step that has failed, too. The exception may have come between any two lines of this file,
        so it undoes nothing and builds everything anew. If clear() itself is interrupted, it is called again. The
        caller resets the sequences' own fields.
        """
        for block in self.blocks:
            block.ref_count = 0
            block.reset_hash()
            block.prev_free = block.next_free = None
        self.hash_to_block = {}
        self.free_blocks = FreeBlockQueue(self.blocks)
        if self.snapshots is not None:
            self.snapshots.clear()
        self._emit("clear")

    def check_integrity(self) -> None:
        """Raise an AssertionError that names the broken invariant."""
        integrity.check_manager(self)

    # -- parts of the above; core/tiers uses touch and take_fresh_blocks, chapter 4 uncache ------------------------

    def _reusable(self, seq: Sequence, blocks: list[Block]) -> list[Block]:
        """Those of the cached blocks that the sequence can use: all, unless the model has states (core/snapshots)."""
        if self.snapshots is None:
            return blocks
        return self.snapshots.reusable(seq, blocks, self.block_size)

    def _has_room(self, seq: Sequence, hits: list[Block]) -> bool:
        """Are there enough free blocks for the part of the sequence that is not in `hits`?"""
        if self.snapshots is not None and not self.snapshots.can_allocate():
            return False
        num_fresh = self.num_blocks_for(len(seq.tokens)) - len(hits)
        # The free queue holds the unreferenced hits as well. They leave it, and the fresh blocks must still be in it.
        num_unreferenced = sum(block.ref_count == 0 for block in hits)
        return num_fresh + num_unreferenced <= len(self.free_blocks)

    def touch(self, blocks: list[Block]) -> None:
        """Take a reference to each of these blocks. Those in the free queue leave it, so none of them is evicted."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_blocks.remove(block)
            block.ref_count += 1

    def take_fresh_blocks(self, seq: Sequence, num_blocks: int) -> None:
        """Pop blocks from the head of the free queue into the sequence's table; one that is cached is evicted."""
        for _ in range(num_blocks):
            block = self.free_blocks.popleft()
            if block.block_hash is not None:
                self._emit("evict", block.block_id, seq.seq_id)
                self.uncache(block)
                self.stats.evictions += 1
            block.ref_count = 1
            seq.block_table.append(block.block_id)
            self._emit("allocate", block.block_id, seq.seq_id)

    def uncache(self, block: Block) -> None:
        """Take a block's hash away, so that nobody finds it. Other copies stay. Does nothing if there is no hash."""
        block_hash = block.block_hash
        if block_hash is None:
            return
        copies = self.hash_to_block[block_hash]
        del copies[block.block_id]
        if not copies:
            del self.hash_to_block[block_hash]
            if self.snapshots is not None:
                self.snapshots.evict(block_hash)
        block.reset_hash()

    def _emit(self, kind: str, block_id: int = -1, seq_id: int = -1) -> None:
        if self.on_event is not None:
            self.on_event(BlockEvent(kind, block_id, seq_id))

    def _emit_snapshot(self, kind: str, block_hash: bytes) -> None:
        copies = self.hash_to_block[block_hash]
        self._emit(kind, next(iter(copies)))
