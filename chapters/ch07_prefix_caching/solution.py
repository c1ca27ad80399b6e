"""Our solutions to the exercises of chapter 7."""

import struct
from collections.abc import Callable
from itertools import takewhile

from nanovllm.core.block_hash import MMSpan
from nanovllm.core.block_manager import Block, BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.store import Store
from nanovllm.core.tiers.tiers import MAX_IN_VAIN


def hash_block(
    parent: bytes | None,
    token_ids: list[int],
    start: int,
    cache_salt: str | None,
    lora_id: int | None,
    mm_spans: tuple[MMSpan, ...],
    hash_bytes: Callable[[bytes], bytes],
) -> bytes:
    # Every part has a tag, and a fixed width or its length in front: read from the left, the bytes mean only one thing.
    data = b"0" if parent is None else b"1" + parent
    data += struct.pack(f"<{len(token_ids)}I", *token_ids)
    if cache_salt is not None and parent is None:
        data += b"S" + _text(cache_salt)
    if lora_id is not None:
        data += b"L" + struct.pack("<q", lora_id)
    for span in mm_spans:
        if span.start < start + len(token_ids) and span.start + span.length > start:
            data += b"M" + _text(span.content_hash) + struct.pack("<q", span.start - start)
    return hash_bytes(data)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded


def allocate_with_prefix(manager: BlockManager, seq: Sequence) -> bool:
    # First pass: look and count. Nothing is touched, so there is nothing to undo.
    found, hash_collision = [], False
    num_full = len(seq.tokens) // manager.block_size if manager.enable_prefix_caching else 0
    for index in range(num_full):
        block_hash, content = manager.hash_block(seq, index)
        copies = manager.hash_to_block.get(block_hash)
        if copies is None:
            break
        block = next(iter(copies.values()))
        if not block.holds(content):
            hash_collision = True
            break
        found.append(block)
    hits = _hits(manager, seq, found)
    num_fresh = manager.num_blocks_for(len(seq.tokens)) - len(hits)
    unused_hits = [block for block in hits if block.ref_count == 0]
    has_state = manager.snapshots is None or manager.snapshots.can_allocate()
    if not has_state or num_fresh + len(unused_hits) > len(manager.free_blocks):
        return False

    # Second pass: the hits, before one of them is popped as a fresh block. Third: the fresh ones.
    for block in unused_hits:
        manager.free_blocks.remove(block)
    for block in hits:
        block.ref_count += 1
        seq.block_table.append(block.block_id)
    manager.take_fresh_blocks(seq, num_fresh)

    seq.num_cached_tokens = min(len(hits) * manager.block_size, len(seq.tokens) - 1)
    seq.num_computed_tokens = seq.num_cached_tokens
    seq.num_registered_blocks = len(hits)
    seq.hash_collision = hash_collision
    if manager.enable_prefix_caching:
        manager.stats.record(num_full, len(hits), int(hash_collision))
    if manager.snapshots is not None:
        manager.snapshots.allocate(seq, len(found) * manager.block_size, manager.block_size)
    return True


def _hits(manager: BlockManager, seq: Sequence, found: list[Block]) -> list[Block]:
    if manager.snapshots is None:
        return found
    most = (len(seq.tokens) - 1) // manager.block_size  # a token is left: no state goes back by one
    num_hits = min(len(found), most)
    while num_hits > 0 and found[num_hits - 1].block_hash not in manager.snapshots.by_hash:
        num_hits -= 1
    return found[:num_hits]


def register_prefix(manager: BlockManager, seq: Sequence) -> None:
    if not manager.enable_prefix_caching or seq.hash_collision:
        return
    for index in range(seq.num_registered_blocks, seq.num_computed_tokens // manager.block_size):
        block_hash, content = manager.hash_block(seq, index)
        block = manager.blocks[seq.block_table[index]]
        copies = manager.hash_to_block.setdefault(block_hash, {})
        if copies and not next(iter(copies.values())).holds(content):
            manager.stats.collisions += 1
            seq.hash_collision = True
            return
        copies[block.block_id] = block
        block.block_hash = block_hash
        block.parent_hash, block.token_ids, block.extra_keys = content
        seq.num_registered_blocks = index + 1


def take_fresh(manager: BlockManager, seq: Sequence, num_blocks: int) -> None:
    for _ in range(num_blocks):
        block = manager.free_blocks.popleft()
        if block.block_hash is not None:
            copies = manager.hash_to_block[block.block_hash]
            del copies[block.block_id]  # this copy only
            if not copies:
                del manager.hash_to_block[block.block_hash]
            block.block_hash = block.parent_hash = None
            block.token_ids, block.extra_keys = [], ()
            manager.stats.evictions += 1
        block.ref_count = 1
        seq.block_table.append(block.block_id)


def next_run(hashes: list[bytes], num_in_pool: int, num_in_vain: int, stores: list[Store]) -> tuple[Store, int] | None:
    wanted = hashes[num_in_pool:]
    if not wanted or num_in_vain >= MAX_IN_VAIN:
        return None
    for store in stores:
        num_blocks = len(list(takewhile(store.may_have, wanted)))
        if num_blocks:
            return store, num_blocks
    return None
