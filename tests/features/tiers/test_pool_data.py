"""Bytes of blocks and states, as NumPy copies them on a CPU and as PyTorch does for a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm.features.tiers.pool_data import PoolData, RankData, RanksData


def runner(seed: int, num_blocks: int = 6, **options) -> SimpleNamespace:
    torch.manual_seed(seed)
    data = torch.randn(2, 3, num_blocks, 4, 2, 8).to(torch.bfloat16)  # [2, layers, blocks, block_size, heads, head_dim]
    states = SimpleNamespace(states=torch.randn(5, 2, 3, 4), windows=torch.randn(5, 2, 3).to(torch.bfloat16))
    return SimpleNamespace(kv_cache=SimpleNamespace(data=data), states=states, **options)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_is_read_is_written_elsewhere(on_cpu):
    source, target = runner(0), runner(1)
    before = target.kv_cache.data.clone()
    ours, theirs = PoolData(source), PoolData(target)
    ours.on_cpu = theirs.on_cpu = on_cpu
    copies = ours.read([4, 0, 5])
    source.kv_cache.data.zero_()  # what was read is a copy
    theirs.write([1, 2, 0], copies)
    assert all(copy.nbytes == ours.block_bytes == 2 * 3 * 4 * 2 * 8 * 2 for copy in copies)
    expected = runner(0).kv_cache.data
    assert torch.equal(target.kv_cache.data[:, :, [1, 2, 0]], expected[:, :, [4, 0, 5]])
    assert torch.equal(target.kv_cache.data[:, :, 3:], before[:, :, 3:])


def test_both_ways_make_the_same_bytes():
    ours, other = PoolData(runner(0)), PoolData(runner(0))
    other.on_cpu = False
    for a, b in zip(ours.read([3, 1]), other.read([3, 1]), strict=True):
        assert np.array_equal(a, b)


def test_states():
    source, target = runner(0), runner(1)
    data = PoolData(source).read_state(3)
    assert data.nbytes == PoolData(target).state_bytes == 2 * 3 * 4 * 4 + 2 * 3 * 2
    PoolData(target).write_state(1, data)
    assert torch.equal(target.states.states[1], source.states.states[3])
    assert torch.equal(target.states.windows[1], source.states.windows[3])


def test_shares_of_ranks_lie_one_after_another():
    ranks = [RankData(runner(rank, group=SimpleNamespace(size=2, rank=rank))) for rank in range(2)]
    driver = SimpleNamespace(ask_data=lambda method, *given: [getattr(rank, method)(*given) for rank in ranks])
    whole = RanksData(driver)
    [block], state = whole.read([2]), whole.read_state(4)
    assert block.nbytes == whole.block_bytes == 2 * ranks[0].block_bytes and state.nbytes == whole.state_bytes
    whole.write([5], [block])
    whole.write_state(0, state)
    for rank in ranks:
        assert np.array_equal(*rank.read([2, 5])) and np.array_equal(rank.read_state(4), rank.read_state(0))
