"""Code with a fault each, as the exam prints it. tests/course/test_exam.py runs it and sees it go wrong."""

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence


def kv_head_of(head: int, num_heads: int, num_kv_heads: int) -> int:
    return head // num_kv_heads


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return num_tokens // block_size + 1


def admit(waiting: list[Sequence], manager: BlockManager) -> list[Sequence]:
    admitted = []
    for seq in list(waiting):
        if not manager.allocate_with_prefix(seq):
            continue
        waiting.remove(seq)
        admitted.append(seq)
    return admitted


def can_allocate(manager: BlockManager, seq: Sequence) -> bool:
    num_blocks, num_hits = manager.num_blocks_for(len(seq.tokens)), 0
    for index in range(len(seq.tokens) // manager.block_size):
        name, _ = manager.hash_block(seq, index)
        if name not in manager.hash_to_block:
            break
        num_hits += 1
    return num_blocks - num_hits <= len(manager.free_blocks)


def keep_top_p(probs: list[float], top_p: float) -> list[float]:
    kept, mass = [], 0.0
    for p in sorted(probs, reverse=True):
        mass += p
        if mass > top_p:
            break
        kept.append(p)
    return kept
