"""The prefix cache to the letter of its documents: worked example, duplicates, collisions, events."""

import pytest

from nanovllm.core import block_manager as block_manager_module
from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.block_manager import BlockEvent, BlockManager
from nanovllm.core.sequence import Sequence
from tests.core.by_hand import admit, cached, compute

# -- the worked example ------------------------------------------------------------------------------------------------


def test_worked_example():
    """Block size 4, ten blocks, three requests: tables, hashes, hits, and the free queue after each step."""
    manager = BlockManager(10, 4, free_order="release")
    queue = manager.free_blocks
    first = list(range(100, 115))

    r0 = admit(manager, first)  # 15 tokens: three full blocks and one with 3 of 4
    assert r0.block_table == [0, 1, 2, 3] and cached(manager) == {0, 1, 2}
    assert list(queue) == [4, 5, 6, 7, 8, 9]

    compute(manager, r0, 115)  # block 3 is full now
    assert r0.block_table == [0, 1, 2, 3] and cached(manager) == {0, 1, 2, 3}
    compute(manager, r0, 116)  # and the next token needs block 4
    assert r0.block_table == [0, 1, 2, 3, 4] and list(queue) == [5, 6, 7, 8, 9]

    r1 = admit(manager, [*first[:10], 201, 202, 203, 204])  # the third block matches in 2 of 4 tokens only
    assert r1.block_table == [0, 1, 5, 6] and r1.num_cached_tokens == 8
    assert cached(manager) == {0, 1, 2, 3, 5} and list(queue) == [7, 8, 9]
    assert [manager.blocks[i].ref_count for i in (0, 1, 2)] == [2, 2, 1]

    manager.free(r0)
    assert list(queue) == [7, 8, 9, 4, 3, 2] and cached(manager) == {0, 1, 2, 3, 5}
    manager.free(r1)
    assert list(queue) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]

    assert manager.stats.evictions == 0
    assert manager.eviction_candidates(5) == [7, 8, 9, 4, 3]
    r2 = Sequence(first[:12] + list(range(300, 317)))  # 29 tokens, 12 shared with the first request
    assert manager.allocate_with_prefix(r2)
    assert r2.block_table == [0, 1, 2, 7, 8, 9, 4, 3] and r2.num_cached_tokens == 12
    assert list(queue) == [6, 5]
    assert manager.stats.evictions == 1, "block 3 was cached and went; 6 was not cached and stays"
    assert cached(manager) == {0, 1, 2, 5}
    manager.check_integrity()


def test_worked_example_with_uncached_blocks_first():
    """The same requests: the uncached blocks, 4 and 6, are taken before 3, and nothing is evicted."""
    manager = BlockManager(10, 4)
    first = list(range(100, 115))
    r0 = admit(manager, first)
    compute(manager, r0, 115)
    compute(manager, r0, 116)
    r1 = admit(manager, [*first[:10], 201, 202, 203, 204])
    manager.free(r0)
    assert list(manager.free_blocks) == [4, 7, 8, 9, 3, 2]
    manager.free(r1)
    assert list(manager.free_blocks) == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]
    r2 = admit(manager, first[:12] + list(range(300, 317)))
    assert r2.block_table == [0, 1, 2, 6, 4, 7, 8, 9] and r2.num_cached_tokens == 12
    assert manager.stats.evictions == 0 and cached(manager) >= {0, 1, 2, 3, 5}


def test_no_hash_is_lost_while_an_uncached_block_is_free():
    """An abort leaves reserved blocks that were never computed, a collision blocks that may not be cached."""
    manager = BlockManager(8, 2)
    manager.free(admit(manager, [1, 2, 3, 4]))
    aborted = Sequence([5, 6, 7, 8, 9])
    assert manager.allocate_with_prefix(aborted)
    manager.free(aborted)
    admit(manager, range(20, 32))  # takes the six blocks that are not cached
    assert manager.stats.evictions == 0
    again = Sequence([1, 2, 3, 4])
    assert manager.allocate_with_prefix(again) and again.num_cached_tokens == 3


def test_an_order_that_there_is_not():
    with pytest.raises(ValueError, match=r'free_order must be "uncached_first" or "release", found \'lru\''):
        BlockManager(4, 2, free_order="lru")


# -- duplicates --------------------------------------------------------------------------------------------------------


def test_duplicated_blocks():
    """ABCDEF + GHI twice, side by side: block EFGH exists twice under one hash; tables only grow."""
    manager = BlockManager(8, 4)
    a, b, c, d, e, f, g, h, i = range(9)
    one = admit(manager, [a, b, c, d, e, f])
    two = admit(manager, [a, b, c, d, e, f])
    assert (one.block_table, two.block_table) == ([0, 1], [0, 2])
    for token_id in (g, h, i):
        tables = one.block_table[:], two.block_table[:]
        compute(manager, one, token_id)
        compute(manager, two, token_id)
        assert (one.block_table[: len(tables[0])], two.block_table[: len(tables[1])]) == tables
    [efgh] = [copies for copies in manager.hash_to_block.values() if len(copies) == 2]
    assert set(efgh) == {1, 2}
    manager.free(one)
    manager.free(two)
    assert manager.eviction_candidates(8) == [4, 3, 5, 6, 7, 1, 2, 0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_either_copy_can_go_and_the_other_still_serves(order):
    manager = BlockManager(6, 2)
    pair = [admit(manager, [1, 2, 3]), admit(manager, [1, 2, 3])]
    for seq in pair:
        compute(manager, seq, 4)
    copies = [pair[0].block_table[1], pair[1].block_table[1]]
    manager.free(pair[order[0]])
    taker = admit(manager, [9] * 8)  # takes the three blocks never used, then the copy that was freed
    assert copies[order[0]] in taker.block_table
    again = Sequence([1, 2, 3, 4, 5])
    assert not manager.can_allocate(again), "its hits are in use, but there is no block for the rest"
    manager.free(taker)
    assert manager.allocate_with_prefix(again)
    assert again.block_table[1] == copies[order[1]] and again.num_cached_tokens == 4
    manager.check_integrity()


# -- collisions --------------------------------------------------------------------------------------------------------


class OneBitHasher(BlockHasher):
    """Every hash is one byte, the parity of the first token: collisions everywhere, verification must hold."""

    def hash_block(self, parent_hash, token_ids, extra_keys=()):
        return bytes([token_ids[0] % 2])


@pytest.fixture
def colliding(monkeypatch):
    monkeypatch.setattr(block_manager_module, "BlockHasher", OneBitHasher)
    return BlockManager(16, 2)


def test_a_collision_at_lookup_is_a_miss_and_is_never_registered(colliding):
    first = admit(colliding, [2, 7, 1, 1])
    other = admit(colliding, [4, 7, 1, 1])  # same hash, other content
    assert other.num_cached_tokens == 0 and colliding.stats.collisions == 1
    assert other.num_registered_blocks == 0, "nor is anything after the contested hash"
    assert cached(colliding) == set(first.block_table)
    same = admit(colliding, [2, 7, 1, 1, 5])
    assert same.num_cached_tokens == 4 and same.block_table[:2] == first.block_table


def test_a_collision_at_registration_is_a_miss_too(colliding):
    one, two = Sequence([2, 7]), Sequence([4, 7])
    assert colliding.allocate_with_prefix(one) and colliding.allocate_with_prefix(two)
    for seq in (one, two):
        compute(colliding, seq)
    assert colliding.stats.collisions == 1 and cached(colliding) == {one.block_table[0]}
    compute(colliding, two, 9, 9)
    assert cached(colliding) == {one.block_table[0]}, "nothing further of it is registered"


@pytest.mark.parametrize(
    ("keys", "other"),
    [({}, dict(cache_salt="a")), (dict(lora_id=1), dict(lora_id=2)), ({}, dict(mm_spans=((0, 1, "x"),)))],
)
def test_verification_looks_at_extra_keys(colliding, keys, other):
    admit(colliding, [2, 7, 1], **keys)
    assert admit(colliding, [2, 7, 1], **other).num_cached_tokens == 0 and colliding.stats.collisions == 1


def test_verification_looks_at_the_parent(monkeypatch):
    """The same block after two parents, under one hash: only the parent's hash tells them apart."""

    class Forgetful(BlockHasher):
        def hash_block(self, parent_hash, token_ids, extra_keys=()):
            return super().hash_block(None, token_ids, extra_keys)

    monkeypatch.setattr(block_manager_module, "BlockHasher", Forgetful)
    manager = BlockManager(16, 2)
    seq = Sequence([1, 1, 5, 5])
    assert manager.allocate_with_prefix(seq)
    seq.num_computed_tokens = 4
    manager.register_prefix(seq)
    other = Sequence([2, 2])
    assert manager.allocate_with_prefix(other)
    other.num_computed_tokens = 2
    manager.register_prefix(other)
    late = Sequence([2, 2, 5, 5, 1])
    assert manager.allocate_with_prefix(late)
    assert late.num_cached_tokens == 2 and manager.stats.collisions == 1


# -- events -----------------------------------------------------------------------------------------------------------


def test_events():
    manager, events = BlockManager(3, 2), []
    manager.on_event = events.append
    one = admit(manager, [1, 2, 3])
    manager.free(one)
    two = admit(manager, [1, 2, 4, 5])
    manager.free(two)
    three = admit(manager, [8, 8, 8])
    s1, s2, s3 = one.seq_id, two.seq_id, three.seq_id
    assert events == [
        *[BlockEvent("allocate", 0, s1), BlockEvent("allocate", 1, s1), BlockEvent("register", 0, s1)],
        *[BlockEvent("free", 1, s1), BlockEvent("free", 0, s1)],
        *[BlockEvent("hit", 0, s2), BlockEvent("allocate", 1, s2), BlockEvent("register", 1, s2)],
        *[BlockEvent("free", 1, s2), BlockEvent("free", 0, s2)],
        *[BlockEvent("allocate", 2, s3), BlockEvent("evict", 1, s3), BlockEvent("allocate", 1, s3)],
        BlockEvent("register", 2, s3),
    ]
