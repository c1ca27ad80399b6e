"""Exercises of chapter 7: the four functions that make a prefix cache out of a pool of blocks, and a look beyond it.

Edit this file, then

    python -m chapters check 7

puts each function into the real engine in place of ours, tries it on small pools and in the real scheduler, and finally
lets a model generate with it. The functions are independent: while one is checked, the others are ours.

seq.num_computed_tokens counts the tokens whose K/V is in the cache once the step in flight is done. It is raised while
the step is being planned, before the model runs: "computed" below means counted in it.

You need not send events (manager.on_event). Each docstring says what you may use.
"""

from collections.abc import Callable

from nanovllm.core.block_hash import MMSpan
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.store import Store


def hash_block(
    parent: bytes | None,
    token_ids: list[int],
    start: int,
    cache_salt: str | None,
    lora_id: int | None,
    mm_spans: tuple[MMSpan, ...],
    hash_bytes: Callable[[bytes], bytes],
) -> bytes:
    """The hash of a full block. Write its content down as bytes and return hash_bytes(those bytes).

    parent      hash of the previous block, as long as what hash_bytes returns; None for the first block of a text
    token_ids   the block's tokens, always as many as a block holds; each from 0 to 2**32 - 1
    start       position of the block's first token in its sequence
    cache_salt  text or None. "" is a salt, too
    lora_id     an integer that fits in 64 signed bits, or None. 0 is an adapter, too
    mm_spans    the sequence's images, sounds and videos, in order: MMSpan(start, length, content_hash) stands for the
                placeholder tokens at positions [start, start + length) of the sequence
    hash_bytes  bytes -> bytes, always the same for the same bytes: xxh64 (8 bytes) or sha256 (32)

    The content of a block is made of exactly these:
    - its parent, or that it has none;
    - its token ids, in order;
    - cache_salt if the block has no parent (later blocks have it through their parents, so leave it out there);
    - lora_id, in every block;
    - for each span that overlaps the block, in the order given: content_hash, and where the span begins relative to the
      block, span.start - start. That is negative if it began in an earlier block. A span that ends where the block
      begins, or begins where the block ends, does not overlap.

    The same content must always give the same hash, in every call and in every process. Different content must give a
    different hash: the bytes that you hash must show where each part ends and which part it is, so that no two contents
    give the same bytes. Nothing else goes into the hash: start only tells you which spans overlap and where, the length
    of a span only whether it does. (A block of the pool does not know its position. check_integrity() hashes it again
    from the parts above, and expects the same hash.)

    struct.pack, int.to_bytes and str.encode will help; so may repr. Python's hash() will not.

    Example: hash_block(None, [7, 8, 9, 9], 0, None, None, (MMSpan(2, 3, "cat"),), hash_bytes) hashes three things:
    that there is no parent, the four ids, and "cat" at 2. The next block, with start 4, has one placeholder left, of
    "cat" at -2.
    """
    raise NotImplementedError


def allocate_with_prefix(manager: BlockManager, seq: Sequence) -> bool:
    """Give a sequence that holds no blocks all that seq.tokens need: first those found, then fresh ones.

    This takes the place of BlockManager.allocate_with_prefix. The scheduler calls it when it admits a sequence.

    To find blocks, look up the full blocks of seq.tokens one after another, from the first on.

        manager.hash_block(seq, index) -> (block_hash, content) of the sequence's full block `index`
        manager.hash_to_block: dict[bytes, dict[int, Block]]    hash -> the blocks that have it, by block_id
        block.holds(content) -> bool                            is that really what the block stands for?

    The block found is the first of hash_to_block[block_hash].values(), if that block holds the content. The first full
    block that is not found ends the search. If it ends because the hash stands for different content, that is a
    collision.

    If manager.snapshots is None, as for most models, all blocks found are hits. It is not None for a hybrid model
    (Qwen3.5 and others, chapter 16), in which some layers keep no K and V, but a state that has taken in all tokens
    so far. To go on after some token, such a model needs the state after just that token. States are large, so the
    engine has kept only a few, called snapshots: manager.snapshots.by_hash has the hash of each block after whose last
    token there is one. Decide which of the blocks found are hits then. The computation goes on from the state after the
    last hit, and takes in all tokens after it, one at least. A state can't give a token back, and K and V of a token
    that is taken in anyway are of no use. As many hits as possible are wanted.

    Return False when the pool cannot hold the sequence. (For a hybrid model also if manager.snapshots.can_allocate() is
    False: there is no room for one more state.) Then nothing has changed: reference counts, free queue,
    statistics, and the sequence's fields, including seq.hash_collision. (The hashes that hash_block keeps on the
    sequence don't count.) Each fresh block comes out of manager.free_blocks, and so does each hit that nobody is using,
    whose ref_count is 0. There must be room for both.

    Otherwise return True, and then:
    - each hit has one more reference (block.ref_count) and is not in the free queue: manager.free_blocks.remove(block)
      takes a block out, wherever it is. A hit with references was not in the queue;
    - manager.take_fresh_blocks(seq, num_blocks) has taken the fresh blocks. It pops them, sets their ref_count and
      appends their ids to seq.block_table, nothing else. It takes whatever is at the head of the queue, even a block
      that you have found and not yet taken out;
    - seq.block_table lists the ids of the hits, then the fresh ones. manager.num_blocks_for(num_tokens) rounds up;
    - seq.num_cached_tokens is the number of tokens in hits, but at most len(seq.tokens) - 1: one token has to be
      computed to have logits. Its block stays a hit;
    - seq.num_computed_tokens is the same number;
    - seq.num_registered_blocks is the number of hits (register_prefix goes on from there), seq.hash_collision says
      whether there was a collision. Both may still be set from an earlier run, before the sequence was preempted;
    - manager.stats.record(queries, hits, collisions) has been called once, with the number of full blocks of
      seq.tokens, the number of hits among them, and 1 or 0 collisions;
    - for a hybrid model, after all that, manager.snapshots.allocate(seq, num_matched_tokens, manager.block_size) has
      been called, with the number of tokens in the blocks found, whether they are hits or not.

    If manager.enable_prefix_caching is False, nothing is looked up, hash_block and stats.record are not called, and all
    blocks are fresh.

    Also useful: manager.block_size, manager.blocks (index == block_id), len(manager.free_blocks). What the engine has
    besides for this task (get_computed_blocks, can_allocate, touch and the like) is yours to write.

    Example: blocks of 4. Blocks 0 and 1 are cached for tokens 1 to 4 and, after them, 5 to 8. The free queue is
    6 1 0 9. A sequence with the tokens 1 to 10 gets block_table [0, 1, 6], num_cached_tokens 8; the queue is 9.
    With the queue 1 0 the answer is False: two hits and one fresh block do not fit into two.
    """
    raise NotImplementedError


def register_prefix(manager: BlockManager, seq: Sequence) -> None:
    """Cache the blocks that are full of computed tokens, so that they can be found.

    This takes the place of BlockManager.register_prefix. The scheduler calls it for each chunk, right after it has
    raised seq.num_computed_tokens by the chunk's tokens. A decode also fills a block now and then. Yours is checked for
    models without states: manager.snapshots is None.

    The blocks to register are those from index seq.num_registered_blocks on whose tokens are all among the first
    seq.num_computed_tokens. Earlier ones need nothing and are not hashed again; a partly filled one has no hash. Of a
    prompt that is computed in several chunks, only the part up to num_computed_tokens counts. For each block, in order:

        manager.hash_block(seq, index) -> (block_hash, content) of the sequence's full block `index`
        manager.blocks[seq.block_table[index]]                  the block that has its K/V
        manager.hash_to_block: dict[bytes, dict[int, Block]]    hash -> the blocks that have it, by block_id
        block.holds(content) -> bool                            is that really what the block stands for?

    - If no block has the hash, the block is entered under it.
    - If blocks have it and hold the same content (ask the first of them), the block joins them, as the last. Two
      sequences that ran side by side have filled a copy each; either can serve, so both stay.
    - If they hold different content, it is a collision: manager.stats.collisions goes up by 1, seq.hash_collision
      becomes True, and neither this block nor a later one of the sequence is registered, now or in later calls. The
      blocks before it stay registered: after a collision at the third block, num_registered_blocks is 2.

    A registered block says so itself: block.block_hash is the hash, and (block.parent_hash, block.token_ids,
    block.extra_keys) is the content, a tuple of three. seq.num_registered_blocks becomes one more than its index.
    Reference counts, the free queue and the tables are left alone.

    If manager.enable_prefix_caching is False, or seq.hash_collision is already True, nothing happens, and hash_block is
    not called.

    Example: blocks of 4, block_table [5, 2, 7], num_computed_tokens 10, num_registered_blocks 1 (block 5 was a hit).
    Block 2 is registered; block 7 has 2 of 4 tokens and is not. num_registered_blocks is 2.
    """
    raise NotImplementedError


def take_fresh(manager: BlockManager, seq: Sequence, num_blocks: int) -> None:
    """Take num_blocks blocks for a sequence, and evict what is cached in them. The caller knows that they exist.

    This takes the place of BlockManager.take_fresh_blocks, which both allocate_with_prefix and append_slots call. Yours
    is checked for models without states: manager.snapshots is None.

    Each block comes from the head of the free queue, manager.free_blocks.popleft(), whether it is cached or not. Its
    ref_count becomes 1, and its id goes to the end of seq.block_table. Blocks that are already in the table stay there.

    A cached block (block.block_hash is not None) is evicted, because it will soon contain other K/V:
    - manager.hash_to_block[block_hash], a dict block_id -> Block of all blocks that have the hash, loses this block.
      Other copies can still be found. If no copy is left, hash_to_block loses the hash, too: it keeps no empty dicts;
    - the block forgets what it was: block_hash and parent_hash are None, token_ids is [], extra_keys is ();
    - manager.stats.evictions goes up by 1.

    Do this yourself, without manager.uncache.

    Example: the queue is 4 3 2, blocks 3 and 2 are cached, and seq.block_table is [0]. Taking 2 blocks gives
    block_table [0, 4, 3] and one eviction; the queue is 2, and block 2 can still be found.
    """
    raise NotImplementedError


def next_run(hashes: list[bytes], num_in_pool: int, num_in_vain: int, stores: list[Store]) -> tuple[Store, int] | None:
    """Decide which store is asked next for blocks of a waiting sequence, and for how many.

    This makes the decision in Tiers.ask (nanovllm/core/tiers/tiers.py). Before a sequence is admitted, the engine calls
    this function, asks that store, puts what comes into the pool, and calls it again, until the answer is None. What
    the pool lacks then is computed.

    hashes       hashes of all full blocks of the sequence, in order; each block is the parent of the next
    num_in_pool  how many of them, from the first on, are in the pool now
    num_in_vain  how many answers of stores have brought nothing for this sequence
    stores       the tiers below the pool, the fastest first: memory, then disk, or only one of them

        store.may_have(key) -> bool  is the block of this hash likely there? Asking costs nothing: no disk is read.

    A run is a row of blocks, without a gap, that one store has. It begins with the first block that the pool lacks, and
    goes on as long as the store has the next block. Return the store and the number of blocks in the run. If several
    stores have the run's first block, the first of them in the list is asked. A run is not cut short where a faster
    store has one of its later blocks.

    Return None
    - if the pool has all of them;
    - if no store has the first block that the pool lacks: later blocks cannot be used without it;
    - if num_in_vain has reached MAX_IN_VAIN (import it from nanovllm.core.tiers.tiers). may_have may be wrong, a store
      may deliver nothing, and what it delivers may come too late, when its parents have left the pool. Without this
      limit the engine might ask for ever.

    Example: the chain a b c d e f; the pool has a, memory has b and c, the disk a b c d f. num_in_pool is 1. The first
    answer is (memory, 2). Then num_in_pool is 3, and the answer is (disk, 1), which brings d. Then num_in_pool is 4, no
    store has e, and the answer is None: e and f are computed, though the disk has f.
    """
    raise NotImplementedError
