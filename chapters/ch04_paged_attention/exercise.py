"""Exercises of chapter 4: the three operations of a paged memory.

Edit this file, then

    python -m chapters check 4

puts each function into the real engine in place of ours, tries it on small pools, and finally lets a model generate
with it. What you may use: manager.blocks (a list, index == block_id), manager.free_blocks (popleft(), append(block),
appendleft(block), len(), iteration over the ids from the head), manager.block_size, manager.uncache(block);
block.block_id, block.ref_count and block.block_hash; the fields of the sequence. Dividing and rounding up is up to you.
You need not care about statistics and events (manager.stats, manager.on_event).
"""

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence


def allocate(manager: BlockManager, seq: Sequence) -> bool:
    """Give a sequence that holds no blocks enough of them for all of seq.tokens. No prefix is looked up.

    This takes the place of BlockManager.allocate_with_prefix.

    Returns True when the sequence has its blocks, and then:
    - seq.block_table lists the ids of as many blocks as len(seq.tokens) tokens need, in the order in which they were
      taken: each from the head of manager.free_blocks;
    - each of these blocks has ref_count 1;
    - a block from the free queue may still have a hash, by which the prefix cache would find its old content.
      manager.uncache(block) removes the hash, and does nothing if there is none: call it for each block;
    - seq.num_computed_tokens, seq.num_cached_tokens and seq.num_registered_blocks are 0, seq.hash_collision is False:
      the sequence may have run before, and been preempted. (The last three belong to prefix caching.)

    Returns False when the free queue is too short. Then nothing has changed, in the manager or in the sequence.

    Example: blocks of 4 tokens, free queue 5 0 3, a sequence of 6 tokens. It gets block_table [5, 0]; the queue is 3.
    A sequence of 13 tokens would get False, and the queue would still be 5 0 3.
    """
    raise NotImplementedError


def append_slots(manager: BlockManager, seq: Sequence, num_tokens: int = 1) -> bool:
    """Make room for the next num_tokens tokens of a running sequence.

    This takes the place of BlockManager.append_slots. The scheduler calls it in every step for every running sequence.

    seq.num_computed_tokens tokens are stored already. Afterwards seq.block_table must have enough blocks for
    num_tokens more: take blocks from the head of manager.free_blocks and append them to the table; what is already in
    the table stays as it is. As in allocate, a block that is taken loses its hash (manager.uncache) and gets
    ref_count 1.

    Often there is nothing to take: the last block has room, or the table is longer than needed, because allocate
    reserved blocks for the whole prompt and the prompt is computed in several steps. Then the answer is True, even when
    no block is free.

    Returns False when the free queue is too short. Then nothing has changed.

    Example: blocks of 4 tokens, num_computed_tokens 8, block_table [5, 0], free queue 3 1. For one more token,
    block_table becomes [5, 0, 3]. For nine more instead, three blocks are needed and two are free: the answer is False.
    """
    raise NotImplementedError


def free(manager: BlockManager, seq: Sequence) -> None:
    """Give back the blocks of a sequence that has ended, was aborted or is preempted.

    This takes the place of BlockManager.free.

    - Each block of seq.block_table loses one reference.
    - A block that now has no reference goes into manager.free_blocks. One that others still hold does not.
    - A block with a hash (block.block_hash is not None) goes to the tail (append): the prefix cache can still find it,
      so it should be taken last. It keeps its hash. A block without a hash goes to the head (appendleft): nothing is
      lost with it.
    - The last block of the table goes first, the first block last. Blocks are taken from the head of the queue, so the
      end of a text is lost before its beginning, which more requests may have in common.
    - seq.block_table is empty afterwards. The sequence may also have no blocks at all; then nothing happens.

    Example: block_table [5, 0, 4, 3], free queue 1; block 5 is also in another sequence's table, and all but block 3
    have hashes. Afterwards the queue is 3 1 4 0, and block 5 has ref_count 1.
    """
    raise NotImplementedError
