"""Our solutions to the exercises of chapter 4."""

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence


def allocate(manager: BlockManager, seq: Sequence) -> bool:
    num_needed = -(-len(seq.tokens) // manager.block_size)  # rounded up
    if num_needed > len(manager.free_blocks):  # before anything is touched: there is nothing to undo
        return False
    _take(manager, seq, num_needed)
    seq.num_computed_tokens = seq.num_cached_tokens = seq.num_registered_blocks = 0
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
        if block.ref_count == 0 and block.block_hash is None:  # nobody can find it: taken before all others
            manager.free_blocks.appendleft(block)
        elif block.ref_count == 0:
            manager.free_blocks.append(block)
    seq.block_table = []


def _take(manager: BlockManager, seq: Sequence, num_blocks: int) -> None:
    for _ in range(num_blocks):
        block = manager.free_blocks.popleft()
        manager.uncache(block)  # else the cache would hand out what is about to be overwritten
        block.ref_count = 1
        seq.block_table.append(block.block_id)
