"""Page faults out of the way: what is touched in advance is there, and no more than that."""

from pathlib import Path

import pytest
import torch

from nanovllm.worker.cpu import memory as cpu_memory

MB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc, as on Linux")
def test_the_beginning_of_each_part_is_touched(monkeypatch):
    monkeypatch.setattr(cpu_memory, "PREFAULTED_BYTES", 16 * MB)
    data = cpu_memory.lazy_zeros((4, 128 * MB), torch.uint8)
    before = resident_bytes()
    cpu_memory.prefault(list(data)).join()
    assert 60 * MB < resident_bytes() - before < 80 * MB
    assert not data[:, : 16 * MB].any()


def test_small_parts_are_touched_to_their_end_only():
    data = cpu_memory.lazy_zeros((3, 1000), torch.uint8)
    data[2, -1] = 7  # behind the last byte that may be cleared for part 1
    cpu_memory.prefault(list(data[:2])).join()
    assert data[2, -1] == 7 and data.sum() == 7
