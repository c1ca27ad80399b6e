"""The engine's attention over a block table of lab 4's making."""

import torch
from torch import Tensor

from chapters.ch04_paged_attention.memories import BLOCK_SIZE
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.attention import paged_attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import rotary_and_write


def attend(table: list[int], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Batch, Batch]:
    """Put K/V of 10 prompt tokens and of 1 more into the blocks of `table` and attend: [11, num_heads, head_dim].

    All other blocks are full of other numbers, as if they were other sequences'.
    """
    trash = torch.Generator().manual_seed(9)
    shape = 16, BLOCK_SIZE, *k.shape[1:]
    kv_layer = torch.randn(shape, generator=trash), torch.randn(shape, generator=trash)
    seq = Sequence(list(range(len(q))))
    seq.block_table = table
    outs, batches = [], []
    for start, end in ((0, 10), (10, 11)):  # the prompt in one step, then one token
        output = SchedulerOutput([ScheduledChunk(seq, start, end, write_start=start)], [], end - start)
        batch = Batch.from_scheduler_output(output, BLOCK_SIZE)
        rows = q[start:end].clone(), k[start:end].clone(), v[start:end]
        no_rotation = torch.ones(end - start, q.shape[2] // 2), torch.zeros(end - start, q.shape[2] // 2)
        rotary_and_write(*rows, no_rotation, kv_layer, batch)
        outs.append(paged_attention(rows[0], *kv_layer, batch))
        batches.append(batch)
    return torch.cat(outs), batches[0], batches[1]
