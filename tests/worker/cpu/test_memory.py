"""Page faults out of the way: what is touched in advance is there, and no more than that."""

from pathlib import Path

import pytest
import torch

from nanovllm.worker.cpu import memory as cpu_memory
from nanovllm.worker.kv_cache import lazy_zeros

MB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_each_part_is_touched_up_to_the_next_huge_page(monkeypatch):
    """Further, it would be the memory of two for each part."""
    monkeypatch.setattr(cpu_memory, "HUGE_PAGE", 2 * MB)
    data = torch.full((4, 5 * MB + 1000), 7, dtype=torch.uint8)
    cpu_memory.prefault(list(data)).join()
    for part in data:
        num_touched = 2 * MB - part.data_ptr() % (2 * MB)
        assert not part[:num_touched].any() and (part[num_touched:] == 7).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc, as on Linux")
def test_nothing_else_is_brought_into_memory(monkeypatch):
    monkeypatch.setattr(cpu_memory, "HUGE_PAGE", 16 * MB)
    data = lazy_zeros((4, 128 * MB), torch.uint8)
    num_touched = sum(16 * MB - part.data_ptr() % (16 * MB) for part in data)
    before = resident_bytes()
    cpu_memory.prefault(list(data)).join()
    assert num_touched - 2 * MB < resident_bytes() - before < num_touched + 16 * MB


def test_small_parts_are_touched_to_their_end_only():
    data = lazy_zeros((3, 1000), torch.uint8)
    data[2, -1] = 7  # after the last byte that may be cleared for part 1
    cpu_memory.prefault(list(data[:2])).join()
    assert data[2, -1] == 7 and data.sum() == 7


def test_weights_lie_one_after_another_and_their_memory_goes_with_them(monkeypatch):
    monkeypatch.setattr(cpu_memory, "REGION", cpu_memory.WeightRegion())
    first = cpu_memory.memory_for_weight(1000, torch.bfloat16)
    second = cpu_memory.memory_for_weight(7, torch.float32)
    large = cpu_memory.memory_for_weight(cpu_memory.REGION_BYTES + 1, torch.uint8)
    for tensor, size, dtype in (first, 1000, torch.bfloat16), (second, 7, torch.float32):
        assert tensor.shape == (size,) and tensor.dtype == dtype and not tensor.any()
        assert tensor.data_ptr() % 64 == 0
    assert second.data_ptr() - first.data_ptr() == 2048 and not large[-1]
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all() and (second == 2).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc, as on Linux")
def test_the_memory_of_weights_is_given_back(monkeypatch):
    monkeypatch.setattr(cpu_memory, "REGION", cpu_memory.WeightRegion())
    before = resident_bytes()
    weights = [cpu_memory.memory_for_weight(32 * MB, torch.uint8).fill_(1) for _ in range(5)]
    assert resident_bytes() - before > 150 * MB
    del weights
    cpu_memory.memory_for_weight(100 * MB, torch.uint8)
    assert resident_bytes() - before < 20 * MB


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc, as on Linux")
def test_a_model_that_is_gone_leaves_no_region_behind(monkeypatch):
    monkeypatch.setattr(cpu_memory, "REGION", cpu_memory.WeightRegion())
    before = resident_bytes()
    weight = cpu_memory.memory_for_weight(100 * MB, torch.uint8).fill_(1)
    cpu_memory.REGION.close()
    assert resident_bytes() - before > 90 * MB
    del weight
    assert resident_bytes() - before < 10 * MB
