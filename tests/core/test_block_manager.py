"""BlockManager by hand; test_prefix_properties.py compares every operation with a naive model."""

import pytest

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence
from tests.core.by_hand import admit


def state(manager: BlockManager):
    refs = [block.ref_count for block in manager.blocks]
    names = {name: sorted(copies) for name, copies in manager.hash_to_block.items()}
    return refs, list(manager.free_blocks), names, manager.stats.snapshot()


def test_token_ids_above_255_and_up_to_32_bits():
    manager = BlockManager(4, 2)
    admit(manager, [256, 2**32 - 1])
    assert admit(manager, [256, 2**32 - 1, 5]).num_cached_tokens == 2


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


def test_fully_cached_prompt_leaves_one_token_to_compute():
    manager = BlockManager(8, 4)
    admit(manager, range(8))
    seq = Sequence(list(range(8)))
    assert manager.allocate_with_prefix(seq)
    assert (seq.num_cached_tokens, seq.num_computed_tokens, len(seq.block_table)) == (7, 7, 2)
    assert manager.is_cached(seq, 7)


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
