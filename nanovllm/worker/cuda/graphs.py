"""CUDA graphs: a decode step recorded once for each of a ladder of batch sizes, then replayed (chapter 10).

A decode is hundreds of short kernels, and launching them one by one takes longer than running them. A graph launches
them all at once, but always reads and writes the same memory: a step's batch is copied into buffers that the graphs
share. A batch between two sizes is padded with rows that write nothing and that nobody reads. A step with guesses is no
such decode: its kernels are launched one by one, which takes longer. features/speculation measures both kinds of step
and guesses only where that pays.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanovllm.worker.batch import Batch, cdiv

MAX_BATCH = 512
LADDER = [1, 2, 4, *range(8, MAX_BATCH + 1, 8)]


class DecodeGraphs:
    """forward(batch) -> hidden states, recorded for every batch size of the ladder up to max_num_seqs."""

    def __init__(
        self, forward: Callable[[Batch], Tensor], max_num_seqs: int, max_model_len: int, block_size: int, device: Any
    ) -> None:
        largest = next((size for size in LADDER if size >= max_num_seqs), MAX_BATCH)
        self._max_key_len = max_model_len

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._buffers = {
            "input_ids": buffer(largest),
            "positions": buffer(largest),
            "slot_mapping": buffer(largest) - 1,
            "seqlens_k": buffer(largest, dtype=torch.int32) + 1,
            "block_tables": buffer(largest, cdiv(max_model_len, block_size), dtype=torch.int32),
        }
        self._rows = torch.arange(largest + 1, device=device)
        self._sizes = [size for size in LADDER if size <= largest]
        pool, self._graphs = None, {}
        for size in reversed(self._sizes):  # the largest first: the others fit in the memory that it took
            forward(self._batch(size))  # compiles what has to be compiled before anything is recorded
            # Record with a fresh Batch: its cached properties must be computed inside the graph.
            replay, hidden, pool = record(lambda size=size: forward(self._batch(size)), pool)  # type: ignore[misc]
            self._graphs[size] = replay, hidden

    def run(self, batch: Batch) -> Tensor | None:
        """Hidden states of batch.logits_rows, or None if it is not a decode that was recorded."""
        num_seqs = len(batch.seqlens_k)
        if batch.max_query_len > 1 or num_seqs > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= num_seqs)
        for name, buffer in self._buffers.items():
            value = getattr(batch, name)
            if name == "block_tables":
                buffer[:num_seqs, : value.shape[1]].copy_(value)
            else:
                buffer[:num_seqs].copy_(value)
        self._buffers["slot_mapping"][num_seqs:size].fill_(-1)
        self._buffers["seqlens_k"][num_seqs:size].fill_(1)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[batch.logits_rows]

    def _batch(self, size: int) -> Batch:
        """The first `size` rows of the buffers."""
        parts = {name: buffer[:size] for name, buffer in self._buffers.items()}
        rows = self._rows[:size]
        cu_seqlens_q = self._rows[: size + 1].to(torch.int32)
        lengths = {"max_query_len": 1, "max_key_len": self._max_key_len}
        return Batch(cu_seqlens_q=cu_seqlens_q, logits_rows=rows, **parts, **lengths)  # type: ignore[arg-type]


def record(forward: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, Any]:
    """Record forward() in memory of `pool`. Returns how to replay it, where its result will be, and the pool."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = forward()
    return graph.replay, result, graph.pool()
