"""Exercises of chapter 4: the three operations of a paged memory.

Edit this file, then

    python -m chapters check 4

puts each function into the real engine in place of ours, tries it on small pools, and finally lets a model generate
with it. What you may use: manager.blocks (a list, index == block_id), manager.free_blocks (popleft(), append(block),
appendleft(block), remove(block), len(), iteration over the ids from the head), manager.block_size,
manager.uncache(block); block.block_id, block.ref_count and block.block_hash; the fields of the sequence; and what a
task names. Dividing and rounding up is up to you. You need not care about statistics and events (manager.stats,
manager.on_event).
"""

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence


def allocate(manager: BlockManager, seq: Sequence) -> bool:
    """Give a sequence that holds no blocks enough of them for all of seq.tokens: those first that the cache has.

    This takes the place of BlockManager.allocate_with_prefix. What the cache has, somebody has found out for you:

        hits = manager.get_computed_blocks(seq).blocks

    is a list of blocks, perhaps empty. They hold the K and V of the first tokens of seq.tokens, in order, and all of
    them are full. Other sequences may be using a hit. If nobody is, its ref_count is 0, and it waits in the free queue,
    like every block whose ref_count is 0. (How hits are found is the subject of chapter 7.)

    Returns True when the sequence has its blocks, and then:
    - seq.block_table lists the ids of as many blocks as len(seq.tokens) tokens need: the hits in their order, then
      fresh blocks in the order in which they were taken, each from the head of manager.free_blocks;
    - each hit has one reference more than before, and each fresh block has ref_count 1. None of them is in the free
      queue any more: manager.free_blocks.remove(block) takes a block out from anywhere, and it must be there;
    - a fresh block may still have a hash, by which the prefix cache would find its old content. manager.uncache(block)
      removes the hash, and does nothing if there is none. Hits keep their hashes;
    - seq.num_cached_tokens is the number of tokens in the hits, but at most len(seq.tokens) - 1, because one token has
      to be computed to have logits. seq.num_computed_tokens is the same number;
    - seq.num_registered_blocks is the number of hits, seq.hash_collision is False. All four may still be set from
      earlier: the sequence may have run before, and been preempted.

    Returns False when the pool cannot hold the sequence. Then nothing has changed, in the manager or in the sequence.
    Decide what has to fit where: the answer is True whenever it can be done, and False only when it can't.

    Example: blocks of 4 tokens, free queue 5 0 3, a sequence of 10 tokens. Its first 4 are in block 0, which nobody
    uses. It gets block_table [0, 5, 3]; the queue is empty. A sequence of 14 tokens would get False, and the queue
    would still be 5 0 3.
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
    - A block with a hash (block.block_hash is not None) keeps it: the prefix cache can still find it, until somebody
      takes it from the head of the queue. Blocks with hashes go to the tail (append), and among those of one sequence
      the end of the text must be lost before its beginning, which more requests may have in common.
    - A block without a hash can never be found. If manager.free_order is "uncached_first", it is taken before all that
      are in the queue (appendleft); if it is "release", it goes to the tail like the others.
    - seq.block_table is empty afterwards. The sequence may also have no blocks at all; then nothing happens.

    Example: block_table [5, 0, 4, 3], free queue 1; block 5 is also in another sequence's table, and all but block 3
    have hashes. Afterwards the queue is 3 1 4 0, and block 5 has ref_count 1.
    """
    raise NotImplementedError
