"""CUDA graphs: a decode step recorded once for each of a ladder of batch sizes, then replayed (chapter 10).

A decode is hundreds of short kernels, and launching them one by one takes longer than running them. A graph launches
them all at once, but always reads and writes the same memory: a step's batch is copied into buffers that the graphs
share. A batch between two sizes is padded with rows that write nothing and that nobody reads. A step with draft tokens
is no such decode: its kernels are launched one by one, which takes longer. features/speculation measures both kinds of
step and proposes only where that pays.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanovllm.worker.batch import Batch, cdiv

MAX_BATCH = 512
LADDER = [1, 2, 4, *range(8, MAX_BATCH + 1, 8)]
NUMBERS_PER_SEQ = 7  # of 32 bits: input id, position and slot have 64


class DecodeGraphs:
    """forward(batch) -> hidden states, recorded for every batch size of the ladder up to max_num_seqs.

    A step is one copy to the device: all its integers lie in one buffer, in the order of _batch().
    """

    def __init__(
        self, forward: Callable[[Batch], Tensor], max_num_seqs: int, max_model_len: int, block_size: int, device: Any
    ) -> None:
        largest = next((size for size in LADDER if size >= max_num_seqs), MAX_BATCH)
        self._max_key_len, self._max_blocks = max_model_len, cdiv(max_model_len, block_size)
        self._inputs = torch.zeros(largest * (NUMBERS_PER_SEQ + self._max_blocks), dtype=torch.int32, device=device)
        self._tables = torch.zeros(largest, self._max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(largest, device=device)
        self._cu_seqlens_q = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._sizes = [size for size in LADDER if size <= largest]
        pool, self._graphs = None, {}
        for size in reversed(self._sizes):  # the largest first: the others fit in the memory that it took
            self._fill(size, *padding(size))
            forward(self._batch(size))  # compiles what has to be compiled before anything is recorded
            # Record with a fresh Batch: its cached properties must be computed inside the graph.
            replay, hidden, pool = record(lambda size=size: forward(self._batch(size)), pool)  # type: ignore[misc]
            self._graphs[size] = replay, hidden

    def run(self, batch: Batch) -> Tensor | None:
        """Hidden states of the batch's rows, or None if it is not a decode that was recorded.

        batch: in the CPU's memory. The states lie in the graph's memory: the next step overwrites them.
        """
        num_seqs = len(batch.seqlens_k)
        is_decode = batch.max_query_len == 1 and len(batch.logits_rows) == num_seqs
        if not is_decode or num_seqs > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= num_seqs)
        more_wide, more_seqlens_k = padding(size - num_seqs)
        wide = torch.stack((batch.input_ids, batch.positions, batch.slot_mapping))
        wide, seqlens_k = torch.cat((wide, more_wide), dim=1), torch.cat((batch.seqlens_k, more_seqlens_k))
        self._fill(size, wide, seqlens_k, batch.block_tables)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[:num_seqs]

    def _fill(self, size: int, wide: Tensor, seqlens_k: Tensor, tables: Tensor | None = None) -> None:
        """Bring a step's numbers to where its graph reads them. All in the CPU's memory.

        wide: input ids, positions and slots [3, size]; seqlens_k: [size]; tables: of the first sequences, as wide as
        this step needs.
        """
        parts = [wide.flatten().view(torch.int32), seqlens_k]
        if tables is not None:
            parts.append(tables.flatten())
        packed = torch.cat(parts).pin_memory()
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)
        if tables is not None:
            given = self._inputs[NUMBERS_PER_SEQ * size :][: tables.numel()]
            self._tables[: len(tables), : tables.shape[1]].copy_(given.view(tables.shape))

    def _batch(self, size: int) -> Batch:
        """A decode of `size` sequences that reads the buffers."""
        wide = self._inputs[: 6 * size].view(torch.int64).view(3, size)
        return Batch(
            input_ids=wide[0],
            positions=wide[1],
            slot_mapping=wide[2],
            cu_seqlens_q=self._cu_seqlens_q[: size + 1],
            seqlens_k=self._inputs[6 * size : 7 * size],
            block_tables=self._tables[:size],
            logits_rows=self._rows[:size],
            max_query_len=1,
            max_key_len=self._max_key_len,
        )


def padding(num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows that write nothing and see one key: input ids, positions and slots [3, num_rows], and seqlens_k."""
    wide = torch.zeros(3, num_rows, dtype=torch.int64)
    wide[2] = -1
    return wide, torch.ones(num_rows, dtype=torch.int32)


def record(forward: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, Any]:
    """Record forward() in memory of `pool`. Returns how to replay it, where its result will be, and the pool."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = forward()
    return graph.replay, result, graph.pool()
