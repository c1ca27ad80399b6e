"""In which state each block of a pool is, as numbers (chapters 4 and 7)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.core.block_manager import BlockManager


def count_blocks(manager: "BlockManager") -> dict[str, int]:
    """How many blocks are referenced, unreferenced (cached, nobody's) and free; and how many are cached in all."""
    free = [manager.blocks[block_id] for block_id in manager.free_blocks]
    cached, unreferenced = sum(map(len, manager.hash_to_block.values())), sum(b.block_hash is not None for b in free)
    referenced = len(manager.blocks) - len(free)
    return {"cached": cached, "referenced": referenced, "unreferenced": unreferenced, "free": len(free) - unreferenced}
