"""Batch: a step by hand, packed into tensors."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.attention import TorchMetadata
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu import c_kernels
from nanovllm.worker.cpu.c_kernels import TASK_ROWS, AttentionStep, tasks_of


def chunk(num_tokens: int, start: int, end: int, table: list[int], write_start: int | None = None) -> ScheduledChunk:
    seq = Sequence(list(range(100, 100 + num_tokens)))
    seq.block_table = table
    return ScheduledChunk(seq, start, end, start if write_start is None else write_start)


def test_a_decode_a_chunk_and_a_cached_prompt():
    chunks = [chunk(6, 5, 6, [7, 2]), chunk(9, 1, 5, [3, 0, 4]), chunk(8, 7, 8, [1, 5], write_start=8)]
    batch = Batch.from_scheduler_output(SchedulerOutput(chunks, [], 6), 4)
    assert batch.input_ids.tolist() == [105, 101, 102, 103, 104, 107]
    assert batch.positions.tolist() == [5, 1, 2, 3, 4, 7]
    assert batch.slot_mapping.tolist() == [2 * 4 + 1, 13, 14, 15, 0, -1]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5, 6] and batch.seqlens_k.tolist() == [6, 5, 8]
    assert batch.block_tables.tolist() == [[7, 2], [3, 0], [1, 5]], "as far as keys are seen"
    assert batch.logits_rows.tolist() == [0, 5], "the chunk is not the end of its prompt"
    assert (batch.max_query_len, batch.max_key_len) == (4, 8)
    assert (batch.query_lens, batch.key_lens) == ([1, 4, 1], [6, 5, 8])
    rows, slots = batch.written
    assert rows.tolist() == [0, 1, 2, 3, 4] and slots.tolist() == [9, 13, 14, 15, 0]
    assert batch.to(torch.device("cpu")) is batch


def test_tables_of_unequal_lengths():
    chunks = [chunk(9, 8, 9, [7, 2, 5]), chunk(2, 1, 2, [3])]
    batch = Batch.from_scheduler_output(SchedulerOutput(chunks, [], 2), 4)
    assert batch.block_tables.tolist() == [[7, 2, 5], [3, 0, 0]]
    short = {batch.cu_seqlens_q.dtype, batch.seqlens_k.dtype, batch.block_tables.dtype}
    long = {batch.input_ids.dtype, batch.positions.dtype, batch.slot_mapping.dtype, batch.logits_rows.dtype}
    assert (short, long) == ({torch.int32}, {torch.int64}), "as C, Triton and flash-attn read them"


def test_tasks_of():
    """(first row, rows, sequence, keys that the first row sees)"""
    chunks = [chunk(3, 2, 3, [0] * 5), chunk(60, 10, 10 + TASK_ROWS + 3, [0] * 20)]
    batch = Batch.from_scheduler_output(SchedulerOutput(chunks, [], TASK_ROWS + 4), 4)
    tasks, most_rows = tasks_of(batch)
    assert tasks.tolist() == [[0, 1, 0, 3], [1, TASK_ROWS, 1, 11], [1 + TASK_ROWS, 3, 1, 11 + TASK_ROWS]]
    assert most_rows == TASK_ROWS


def test_parts_of_keys_take_no_more_memory_than_they_may(monkeypatch):
    """Where their sums would take gigabytes, a thread computes all parts of its rows."""
    monkeypatch.setattr(c_kernels, "num_pool_threads", lambda: 64)
    heads = SimpleNamespace(part_keys=lambda: 256, partial_bytes=lambda: 4 * 130 * 4)  # of Llama-3.1-8B
    found = []
    for num_rows in (1, 16, 496):
        long = chunk(1 << 17, (1 << 17) - num_rows, 1 << 17, [0] * (1 << 13))
        batch = Batch.from_scheduler_output(SchedulerOutput([long], [], num_rows), 16)
        found.append(AttentionStep.build(batch, heads, num_kv_heads=8).num_parts)
    assert found == [512, 512, 1]


def test_metadata_is_built_once_for_each_backend_and_anew_for_a_changed_batch():
    batch = Batch.from_scheduler_output(SchedulerOutput([chunk(3, 2, 3, [0])], [], 1), 4)
    metadata = batch.metadata(TorchMetadata, 4)
    assert batch.metadata(TorchMetadata, 4) is metadata and batch.query_lens == [1]
    changed = replace(batch, cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32))
    assert not changed.metadata(TorchMetadata, 4).decode_groups and changed.query_lens == [2]
