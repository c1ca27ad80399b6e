"""BlockManager by hand: allocation, sharing, failure, freeing."""

import pytest

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence
from tests.core.by_hand import admit, compute


def state(manager: BlockManager):
    refs = [block.ref_count for block in manager.blocks]
    names = {name: sorted(copies) for name, copies in manager.hash_to_block.items()}
    return refs, list(manager.free_blocks), names, manager.stats.snapshot()


def test_token_ids_above_255_and_up_to_32_bits():
    manager = BlockManager(4, 2)
    admit(manager, [256, 2**32 - 1])
    assert admit(manager, [256, 2**32 - 1, 5]).num_cached_tokens == 2


def test_same_block_behind_another_prefix_is_no_hit():
    manager = BlockManager(8, 2)
    admit(manager, [1, 2, 3, 4])
    assert admit(manager, [9, 9, 3, 4]).num_cached_tokens == 0
    assert admit(manager, [3, 4, 1, 2]).num_cached_tokens == 0


def test_failed_allocation_changes_nothing():
    manager = BlockManager(4, 2)
    shared = admit(manager, [1, 2, 3, 4])
    big = Sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    before = state(manager)
    assert not manager.can_allocate(big) and not manager.allocate_with_prefix(big)
    assert state(manager) == before and big.block_table == [] and big.num_cached_tokens == 0
    manager.free(shared)
    before = state(manager)  # now the two hits wait in the free queue: 4 free blocks, but 5 are needed
    assert not manager.can_allocate(big) and not manager.allocate_with_prefix(big)
    assert state(manager) == before


def test_hits_in_the_free_queue_are_not_counted_as_free():
    manager = BlockManager(3, 2)
    manager.free(admit(manager, [1, 2, 3, 4]))
    seq = Sequence([1, 2, 3, 4, 5, 6])
    assert manager.can_allocate(seq) and manager.allocate_with_prefix(seq)
    assert sorted(seq.block_table) == [0, 1, 2] and len(manager.free_blocks) == 0
    assert not manager.can_allocate(Sequence([1, 2, 3, 4, 9])), "both hits are in use, and nothing is free"


def test_a_hit_count_that_changes_between_check_and_allocation():
    """The hits that made a sequence fit are evicted after the check: the allocation decides anew."""
    manager = BlockManager(4, 2)
    first = admit(manager, [1, 2, 3, 4])
    other = admit(manager, [7, 7])
    late = Sequence([1, 2, 3, 4, 5, 6])
    assert manager.can_allocate(late)  # two hits in use, one block free
    manager.free(first)
    taker = admit(manager, [8, 8, 8, 8, 8])  # evicts what `late` would have hit
    assert not manager.can_allocate(late) and not manager.allocate_with_prefix(late)
    manager.free(other)
    manager.free(taker)
    assert manager.allocate_with_prefix(late) and late.num_cached_tokens == 0
    manager.check_integrity()


def test_fully_cached_prompt_leaves_one_token_to_compute():
    manager = BlockManager(8, 4)
    admit(manager, range(8))
    seq = Sequence(list(range(8)))
    assert manager.allocate_with_prefix(seq)
    assert (seq.num_cached_tokens, seq.num_computed_tokens, len(seq.block_table)) == (7, 7, 2)
    assert manager.is_cached(seq, 7)


def test_append_slots_grows_only_at_the_border():
    manager = BlockManager(3, 4)
    seq = admit(manager, range(7))
    assert manager.append_slots(seq) and len(seq.block_table) == 2
    compute(manager, seq, 7)
    assert manager.append_slots(seq) and len(seq.block_table) == 3
    assert not manager.append_slots(seq, 5) and len(seq.block_table) == 3
    assert manager.append_slots(seq, 4)


def test_free_returns_the_deepest_block_first_and_keeps_shared_ones():
    manager = BlockManager(8, 2)
    a, b = admit(manager, range(6)), admit(manager, [0, 1, 9])
    manager.free(a)
    assert list(manager.free_blocks)[-2:] == [2, 1] and manager.blocks[0].ref_count == 1
    manager.free(b)
    assert list(manager.free_blocks) == [3, 4, 5, 6, 7, 2, 1, 0]
    manager.check_integrity()


def test_without_prefix_caching_nothing_is_hashed(monkeypatch):
    manager = BlockManager(4, 2, enable_prefix_caching=False)
    monkeypatch.setattr(manager, "hasher", None)
    manager.free(admit(manager, range(4)))
    assert admit(manager, range(4)).num_cached_tokens == 0 and manager.stats.queries == 0


def test_reset_prefix_cache():
    manager = BlockManager(4, 2)
    seq = admit(manager, range(4))
    assert not manager.reset_prefix_cache()
    manager.free(seq)
    assert manager.reset_prefix_cache() and not manager.hash_to_block
    assert admit(manager, range(4)).num_cached_tokens == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(num_blocks, block_size)
