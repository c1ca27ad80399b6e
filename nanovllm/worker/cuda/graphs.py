"""CUDA graphs: a decode step recorded once for each of a ladder of batch sizes, then replayed (chapter 10).

A decode is hundreds of short kernels, and launching them one by one takes longer than running them. A graph launches
them all at once, but always reads and writes the same memory: a step's batch is copied into buffers that the graphs
share. A batch between two sizes is padded with rows that write nothing and that nobody reads. A step with draft tokens
is no such decode: its kernels are launched one by one, which takes longer. features/speculation measures both kinds of
step and proposes only where that pays.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.worker.attention import paged_attention
from nanovllm.worker.batch import Batch, cdiv
from nanovllm.worker.platform import RecordedSteps

if TYPE_CHECKING:
    from nanovllm.worker.model_runner import ModelRunner

MAX_BATCH = 512
LADDER = [1, 2, 4, *range(8, MAX_BATCH + 1, 8)]
NUMBERS_PER_SEQ = 7  # of 32 bits: input id, position and slot have 64


def why_no_graphs(runner: "ModelRunner") -> str | None:
    """Why decode steps cannot be recorded; None if they can. A graph cannot wait for a value."""
    model_config = runner.model_config
    if "cuda_graphs" not in runner.config.optimizations:
        return "they are switched off"
    if model_config.pooling is not None:
        return "the steps of a pooling model are prompts"
    if runner.kernels.paged_attention is paged_attention:
        return "PyTorch's attention gathers as many keys as a step's longest sequence has"
    if model_config.expert_layers:
        return "how many rows meet an expert is known only in the step"
    if model_config.hybrid is not None:
        return "which slots hold the states is known only in the step"
    return None


class DecodeGraphs(RecordedSteps):
    """Hidden states of a decode step, recorded for every batch size of the ladder up to max_num_seqs.

    A step is one copy to the device: all its integers lie in one buffer, in the order of _batch().
    """

    def __init__(self, runner: "ModelRunner") -> None:
        super().__init__(runner)
        device = runner.device
        largest = next((size for size in LADDER if size >= runner.config.max_num_seqs), MAX_BATCH)
        self._max_key_len = runner.max_model_len
        self._max_blocks = cdiv(runner.max_model_len, runner.block_size)
        self._inputs = torch.zeros(largest * (NUMBERS_PER_SEQ + self._max_blocks), dtype=torch.int32, device=device)
        self._tables = torch.zeros(largest, self._max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(largest, device=device)
        self._cu_seqlens_q = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._sizes = [size for size in LADDER if size <= largest]
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}  # size -> replay it, where the result will be
        pool = None
        stream = torch.cuda.Stream(device)
        for size in reversed(self._sizes):  # the largest first: the others fit in the memory that it took

            def forward(size: int = size) -> Tensor:
                # A fresh Batch each time: what attention works out of its numbers must be computed inside the graph.
                return self.model(self._batch(size), self.rotary, self.kv_cache, self.kernels)

            wide, seqlens_k = padding(size)
            self._fill(size, wide, seqlens_k)
            forward()  # compiles what has to be compiled before anything is recorded
            replay, hidden, pool = record(forward, pool, stream)
            self._graphs[size] = replay, hidden

    def run(self, batch: Batch) -> Tensor | None:
        """None for what is no decode of at most so many sequences."""
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
        return self.model.logits(hidden[:num_seqs])

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
    wide = torch.zeros(3, num_rows, dtype=torch.int64, device="cpu")
    wide[2] = -1
    return wide, torch.ones(num_rows, dtype=torch.int32, device="cpu")


def record(forward: Callable[[], Tensor], pool: Any, stream: Any) -> tuple[Callable[[], None], Tensor, Any]:
    """Record forward() in memory of `pool`. Returns how to replay it, where its result will be, and the pool.

    stream: the same one for all that share a pool, as a stream's memory is its own. Other threads may use the GPU.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = forward()
    return graph.replay, result, graph.pool()
