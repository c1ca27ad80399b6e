"""Our solutions to the exercises of chapter 4."""

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence


def allocate(manager: BlockManager, seq: Sequence) -> bool:
    hits = manager.get_computed_blocks(seq).blocks
    num_fresh = -(-len(seq.tokens) // manager.block_size) - len(hits)  # rounded up
    # Hits that nobody uses leave the queue as the fresh ones do, so there must be room for both.
    unused_hits = [block for block in hits if block.ref_count == 0]
    if num_fresh + len(unused_hits) > len(manager.free_blocks):  # before anything is touched: there is nothing to undo
        return False
    for block in unused_hits:  # before fresh ones are taken, or one of them might be
        manager.free_blocks.remove(block)
    for block in hits:
        block.ref_count += 1
        seq.block_table.append(block.block_id)
    _take(manager, seq, num_fresh)
    seq.num_cached_tokens = min(len(hits) * manager.block_size, len(seq.tokens) - 1)
    seq.num_computed_tokens = seq.num_cached_tokens
    seq.num_registered_blocks = len(hits)
    seq.hash_collision = False
    return True


def append_slots(manager: BlockManager, seq: Sequence, num_tokens: int = 1) -> bool:
    # Compared with the table, not with the tokens: it may be longer than needed, and then num_needed is below 0.
    num_needed = -(-(seq.num_computed_tokens + num_tokens) // manager.block_size) - len(seq.block_table)
    if num_needed > len(manager.free_blocks):
        return False
    _take(manager, seq, num_needed)
    return True


def free(manager: BlockManager, seq: Sequence) -> None:
    for block_id in reversed(seq.block_table):
        block = manager.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count > 0:
            continue
        if block.block_hash is None and manager.free_order == "uncached_first":  # nobody can find it
            manager.free_blocks.appendleft(block)
        else:
            manager.free_blocks.append(block)
    seq.block_table = []


def _take(manager: BlockManager, seq: Sequence, num_blocks: int) -> None:
    for _ in range(num_blocks):
        block = manager.free_blocks.popleft()
        manager.uncache(block)  # else the cache would hand out what is about to be overwritten
        block.ref_count = 1
        seq.block_table.append(block.block_id)
