"""BlockManager: who owns which block of the KV pool, and which blocks can be found again (chapters 4 and 7).

The pool is a list of blocks, made once. A block is *referenced* (some running sequence has it in its table),
*unreferenced* (in the free queue, but still named: its K/V can be found and reused until the block is taken) or *free*
(in the free queue, without a name). Those are states, not queues: there is one free queue, and its head is taken next.
The order of the queue is the eviction policy. A sequence gives its blocks back last block first; a block without a name
goes to the head, a block with one to the tail:

    head: taken next                                                                     tail
    [ free: no name, nothing is lost | unreferenced: released longest ago ... released last ]

So no name is lost while an unnamed block is free, and of names released together the deepest goes first. A radix tree
that takes unused memory first and then evicts the leaf released longest ago (SGLang's, RadixAttention,
arXiv:2312.07104) evicts the same blocks, except where two running sequences fill blocks with the same content: one node
there, two blocks here (tests/core/test_prefix_properties.py compares the two, operation by operation).

Invariants, asserted by check_integrity():
- a block is in the free queue if and only if its ref_count is 0;
- in the free queue the unnamed blocks come before the named ones (free_order="release": mixed, as they were released);
- hash_to_block holds exactly the named blocks, and all blocks under one name have the same content;
- a named block is full and is never written again: this is why sharing needs no copy-on-write;
- a named block's parent is named too (some copy of it), so that probing from the front finds all there is to find.

Two sequences that compute the same tokens at the same time fill two blocks with the same content. Both blocks get the
name; a later request can reuse either, and each is evicted on its own. vLLM v0 instead freed the second block and put
the first into the other sequence's table. That saves a block, but then tables change after they were handed out; here
they are append-only.

This file never sees a tensor: it hands out block ids.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.core import integrity
from nanovllm.core.block_hash import BlockHasher, ExtraKeys, extra_keys
from nanovllm.core.cache_stats import PrefixCacheStats
from nanovllm.core.sequence import Sequence

Content = tuple[bytes | None, list[int], ExtraKeys]  # parent's name, token ids, extra keys: what a name stands for


@dataclass(slots=True, eq=False)
class Block:
    """One block of the pool.

    A block that has a name (block_hash) keeps beside it what it is the name of: parent_hash, token_ids and extra_keys,
    which a hit is compared with, and depth, how many blocks come before it in its sequence. They are set before the
    name and cleared after it (see BlockManager.roll_back).
    """

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    parent_hash: bytes | None = None
    token_ids: list[int] = field(default_factory=list)
    extra_keys: ExtraKeys = ()
    depth: int = 0
    prev_free: "Block" = None  # type: ignore[assignment]  # set while it is in the free queue
    next_free: "Block" = None  # type: ignore[assignment]

    def holds(self, content: Content) -> bool:
        return (self.parent_hash, self.token_ids, self.extra_keys) == content

    def clear_name(self) -> None:
        self.block_hash = None
        self.parent_hash, self.token_ids, self.extra_keys, self.depth = None, [], (), 0


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
        before.next_free, block.prev_free = block, before
        block.next_free, after.prev_free = after, block
        self._len += 1

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None  # type: ignore[assignment]
        self._len -= 1

    def popleft(self) -> Block:
        block = self._ring.next_free
        assert block is not self._ring, "the free queue is empty"
        self.remove(block)
        return block


class BlockEvent(NamedTuple):
    """kind is "hit", "allocate", "register", "evict" or "free" (nobody references the block any more)."""

    kind: str
    block_id: int
    seq_id: int


class AllocationPlan(NamedTuple):
    """What allocate_with_prefix will do: which blocks it reuses, and how many it takes beside them."""

    hits: list[Block]
    num_fresh: int
    hash_collision: bool  # the first block that is not a hit has a name that stands for other content


class BlockManager:
    """Allocates blocks to sequences and keeps the prefix cache.

    blocks          the pool; index == block_id
    free_blocks     the free queue
    hash_to_block   name -> {block_id: Block}, the blocks that hold it
    free_order      "unnamed_first", or "release": every freed block goes to the tail (vLLM's order until 2026)
    on_event        is told of every BlockEvent, in the middle of an operation: it must change nothing
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_algo: str = "xxh64",
        free_order: str = "unnamed_first",
    ) -> None:
        if free_order not in ("unnamed_first", "release"):
            raise ValueError(f'free_order must be "unnamed_first" or "release", found {free_order!r}')
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, found {num_blocks} x {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.free_order = free_order
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_blocks = FreeBlockQueue(self.blocks)
        self.hash_to_block: dict[bytes, dict[int, Block]] = {}
        self.stats = PrefixCacheStats()
        self.on_event: Callable[[BlockEvent], None] | None = None
        self._uncommitted: set[int] = set()  # blocks that the running step has named: their K/V is not there yet
        self.hasher = BlockHasher(block_size, hash_algo)

    # -- what the scheduler calls ---------------------------------------------------------------------------------

    def allocate_with_prefix(self, seq: Sequence) -> bool:
        """Reuse the longest cached prefix of seq.tokens and reserve fresh blocks for the rest.

        Sets block_table, num_cached_tokens and num_computed_tokens. A fully cached sequence still computes its last
        token, to have logits to sample from. Returns False, with nothing changed, when the pool cannot hold it.
        """
        assert seq.tokens and not seq.block_table, f"{seq} is empty or already holds blocks"
        plan = self.plan_allocation(seq)
        if plan is None:
            return False
        for block in plan.hits:
            if block.ref_count == 0:
                self.free_blocks.remove(block)
            block.ref_count += 1
            seq.block_table.append(block.block_id)
            self.tell("hit", block.block_id, seq)
        self.take_fresh_blocks(seq, plan.num_fresh)

        num_hits = len(plan.hits)
        seq.num_cached_tokens = min(num_hits * self.block_size, len(seq.tokens) - 1)
        seq.num_computed_tokens = seq.num_cached_tokens
        seq.num_registered_blocks = num_hits
        seq.hash_collision = plan.hash_collision
        if self.enable_prefix_caching and not seq.skip_prefix_cache:
            self.stats.record(len(seq.tokens) // self.block_size, num_hits, plan.hash_collision, seq.was_admitted)
        seq.was_admitted = True
        return True

    def register_prefix(self, seq: Sequence) -> None:
        """Give every full block of the first num_computed_tokens tokens its name, so that others find it.

        Stops for good where a name already stands for other content.
        """
        if not self.enable_prefix_caching:
            return
        for index in range(seq.num_registered_blocks, seq.num_computed_tokens // self.block_size):
            if seq.hash_collision:
                return
            block_hash, content = self.name_block(seq, index)
            block = self.blocks[seq.block_table[index]]
            copies = self.hash_to_block.get(block_hash)
            if copies and not next(iter(copies.values())).holds(content):
                self.stats.collisions += 1
                seq.hash_collision = True
                return
            self._uncommitted.add(block.block_id)
            block.parent_hash, block.token_ids, block.extra_keys = content
            block.depth, block.block_hash = index, block_hash
            self.hash_to_block.setdefault(block_hash, {})[block.block_id] = block
            seq.num_registered_blocks = index + 1
            self.tell("register", block.block_id, seq)

    def append_slots(self, seq: Sequence, num_tokens: int = 1) -> bool:
        """Grow the table to hold num_computed_tokens + num_tokens. False, with nothing changed, when it can't."""
        num_needed = self.num_blocks_for(seq.num_computed_tokens + num_tokens) - len(seq.block_table)
        if num_needed > len(self.free_blocks):
            return False
        self.take_fresh_blocks(seq, num_needed)
        return True

    def free(self, seq: Sequence) -> None:
        """Give a sequence's blocks back, last block first. Those with names can be found until they are taken."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None and self.free_order == "unnamed_first":
                    self.free_blocks.appendleft(block)
                else:
                    self.free_blocks.append(block)
                self.tell("free", block_id, seq)
        seq.block_table = []

    def clear(self) -> None:
        """Forget everything: no block is cached, and none is in use. The pool may be in any state before."""
        self._uncommitted.clear()
        self.hash_to_block = {}
        for block in self.blocks:
            block.ref_count, block.prev_free, block.next_free = 0, None, None  # type: ignore[assignment]
            block.clear_name()
        self.free_blocks = FreeBlockQueue(self.blocks)

    # -- questions that change nothing ----------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def name_block(self, seq: Sequence, index: int) -> tuple[bytes, Content]:
        """Name and content of the sequence's full block `index`, after those before it. Each is hashed only once."""
        start, end, names = index * self.block_size, (index + 1) * self.block_size, seq.block_hashes
        keys = seq.cache_salt, seq.lora_id, seq.mm_spans
        extra = extra_keys(index, self.block_size, *keys) if seq.has_extra_keys else ()
        content = names[index - 1] if index else None, seq.tokens[start:end], extra
        if index == len(names):
            names.append(self.hasher.name(*content))
        return names[index], content

    def can_allocate(self, seq: Sequence) -> bool:
        """Exactly: would allocate_with_prefix succeed now?"""
        return self.plan_allocation(seq) is not None

    def awaits(self, seq: Sequence) -> bool:
        """Is K/V of its prefix on its way into the pool? Then others are admitted first. (core/tiers brings some.)"""
        return False

    def is_cached(self, seq: Sequence, position: int) -> bool:
        """Is the K/V of this position already in a named block of the sequence's table?"""
        return self.blocks[seq.block_table[position // self.block_size]].block_hash is not None

    def eviction_candidates(self, n: int) -> list[int]:
        """The next n blocks to be taken, in that order."""
        return [block_id for block_id, _ in zip(self.free_blocks, range(n), strict=False)]

    # -- the cache as a whole -------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget every name. False, with nothing changed, while any block is in use."""
        if len(self.free_blocks) != len(self.blocks):
            return False
        for block in self.blocks:
            self.remove_name(block)
        self.stats.recent.clear()
        return True

    def check_integrity(self) -> None:
        """Raise an AssertionError that names the broken invariant."""
        integrity.check_manager(self)

    # -- helpers --------------------------------------------------------------------------------------------------

    def plan_allocation(self, seq: Sequence) -> AllocationPlan | None:
        """What an allocation would do; nothing is changed. None if the free queue is too short for it."""
        hits: list[Block] = []
        hash_collision = False
        num_full = len(seq.tokens) // self.block_size if self.enable_prefix_caching and not seq.skip_prefix_cache else 0
        for index in range(num_full):
            block_hash, content = self.name_block(seq, index)
            copies = self.hash_to_block.get(block_hash)
            if copies is None:
                break
            block = next(iter(copies.values()))
            if not block.holds(content):
                hash_collision = True
                break
            hits.append(block)
        num_fresh = self.num_blocks_for(len(seq.tokens)) - len(hits)
        # Unreferenced hits are in the free queue, too: it must hold the fresh blocks beside them.
        num_free_hits = sum(block.ref_count == 0 for block in hits)
        if num_fresh + num_free_hits > len(self.free_blocks):
            return None
        return AllocationPlan(hits, num_fresh, hash_collision)

    def take_fresh_blocks(self, seq: Sequence, num_blocks: int) -> None:
        for _ in range(num_blocks):
            block = self.free_blocks.popleft()
            if block.block_hash is not None:
                self.remove_name(block)
                self.stats.evictions += 1
                self.tell("evict", block.block_id, seq)
            block.ref_count = 1
            seq.block_table.append(block.block_id)
            self.tell("allocate", block.block_id, seq)

    def tell(self, kind: str, block_id: int, seq: Sequence) -> None:
        if self.on_event is not None:
            self.on_event(BlockEvent(kind, block_id, seq.seq_id))

    def remove_name(self, block: Block) -> None:
        if block.block_hash is None:
            return
        copies = self.hash_to_block[block.block_hash]
        del copies[block.block_id]
        if not copies:
            del self.hash_to_block[block.block_hash]
        block.clear_name()
