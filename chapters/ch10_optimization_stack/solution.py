"""Our solutions of the exercises of chapter 10."""

import torch
import torch.nn.functional as F
from torch import Tensor

from chapters.ch10_optimization_stack.tiles import TILE, KeyReader
from chapters.ch10_optimization_stack.workers import PART, Run
from nanovllm.worker.batch import Batch


def fold(
    running_max: Tensor, running_sum: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new_max = torch.maximum(running_max, scores.amax(-1))
    # A row without any key yet: -inf - -inf would be nan, -inf - 0 is -inf, and exp of that is 0.
    base = new_max.masked_fill(new_max == -torch.inf, 0.0)
    rescale = (running_max - base).exp()  # what was summed up under the old maximum, seen from the new one
    weights = (scores - base[..., None]).exp()
    return new_max, running_sum * rescale + weights.sum(-1), acc * rescale[..., None] + weights @ values


def attend(q: Tensor, block_table: list[int], num_keys: int, reader: KeyReader) -> Tensor:
    rows, num_heads, head_dim = q.shape
    heads, block_size = reader.num_kv_heads, reader.block_size
    group = num_heads // heads
    # The query heads of a group become rows of their KV head: [heads, group * rows, head_dim].
    q = (q * head_dim**-0.5).view(rows, heads, group, head_dim).permute(1, 2, 0, 3).reshape(heads, -1, head_dim)
    position = torch.arange(num_keys - rows, num_keys).repeat(group)[:, None]  # the last key that each row sees
    running_max, running_sum, acc = q.new_full(q.shape[:2], -torch.inf), q.new_zeros(q.shape[:2]), torch.zeros_like(q)
    for first in range(0, num_keys, TILE):
        keys = range(first, min(first + TILE, num_keys))
        k, v = reader.read([block_table[i // block_size] * block_size + i % block_size for i in keys])
        scores = q @ k.permute(1, 2, 0)
        scores = scores.masked_fill(torch.tensor(keys) > position, -torch.inf)
        running_max, running_sum, acc = fold(running_max, running_sum, acc, scores, v.transpose(0, 1))
    return (acc / running_sum[..., None]).view(heads, group, rows, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


def attend_in_parts(num_keys: int, num_workers: int, run: Run) -> Tensor:
    parts = [(first, min(first + PART, num_keys)) for first in range(0, num_keys, PART)]
    done = run([parts[worker::num_workers] for worker in range(num_workers)])
    (_, running_max, running_sum, acc), *others = sorted(done, key=lambda part: part.first)
    for part in others:
        new_max = torch.maximum(running_max, part.running_max)
        before, now = (running_max - new_max).exp(), (part.running_max - new_max).exp()
        running_sum = running_sum * before + part.running_sum * now
        acc = acc * before[..., None] + part.acc * now[..., None]
        running_max = new_max
    return acc / running_sum[..., None]


def pad_decode(batch: Batch, size: int) -> Batch:
    num_missing = size - len(batch.seqlens_k)

    def pad(x: Tensor, value: int) -> Tensor:
        return F.pad(x, (0, num_missing), value=value)

    return Batch(
        input_ids=pad(batch.input_ids, 0),
        positions=pad(batch.positions, 0),
        slot_mapping=pad(batch.slot_mapping, -1),
        cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32),
        seqlens_k=pad(batch.seqlens_k, 1),
        block_tables=F.pad(batch.block_tables, (0, 0, 0, num_missing)),
        logits_rows=torch.arange(size),
        max_query_len=1,
        max_key_len=batch.max_key_len,
    )
