"""Paged attention in plain PyTorch (chapters 4 and 10): the reference that every other backend is tested against.

    paged_attention(q, k_cache, v_cache, batch, window=0) -> out

q and out are [T, num_heads, head_dim]; the caches are one layer's. Row i of sequence b attends causally to positions
0 .. seqlens_k[b] - query_lens[b] + i, whose K/V are found through block_tables[b]; this step's own K/V were written
before. Scores are scaled by head_dim ** -0.5; num_heads / num_kv_heads query heads share a KV head (grouped-query
attention, arXiv:2305.13245). With a window, a row attends only to the last `window` positions of these
(features/positions/windowed_attention.py).

Each sequence's blocks are gathered into contiguous K and V. Sequences with one query row (decodes) are computed
together, padded to the longest of a group. Longer ones are computed one by one, in tiles of query rows, so that a tile
never reads keys that none of its rows may see.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.worker.batch import Batch, cdiv, move_together

# Decodes are grouped so that a group's gathered keys, padding included, are no more than this, unless a single sequence
# has more.
MAX_GATHERED_KEYS = 1 << 16
TILE_ROWS = 128  # query rows of a longer sequence that are computed at a time


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
    """Attention of each row of q to the keys that it may see; the top of this file says which, and has the shapes."""
    if window:
        from nanovllm.features.positions.windowed_attention import windowed_attention

        out = windowed_attention(q, k_cache, v_cache, batch, window)
    else:
        out = _attention(q, k_cache, v_cache, batch)
    # A NaN in V spoils even rows that mask it: 0 * NaN is NaN. On a CPU the step's rows are then computed again, one by
    # one. On a GPU, checking for NaN would make every layer wait, so only _decode replaces masked values by zeros.
    # There, NaN in a prompt's K/V may spoil its earlier rows, and a request that reuses its blocks ends with an error.
    if out.device.type == "cpu" and not out.isfinite().all():
        attention_row_by_row(out, q, k_cache, v_cache, batch, window)
    return out


def _attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
    out = q.new_empty(q.shape)
    for rows, tables, seqlens_k in batch.metadata(TorchMetadata, k_cache.shape[1]).decode_groups:
        out[rows] = _decode(q[rows], k_cache, v_cache, tables, seqlens_k)
    start = 0
    for b, num_rows in enumerate(batch.query_lens):
        if num_rows > 1:
            _prefill(q[start : start + num_rows], k_cache, v_cache, batch, b, out[start : start + num_rows])
        start += num_rows
    return out


Group = tuple[Tensor, Tensor, Tensor]  # of n decodes: rows [n], block tables [n, blocks], seqlens_k [n]


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    """What this backend shares among the layers of a step.

    decode_groups   the sequences with one query row, those of similar lengths together
    """

    decode_groups: list[Group]

    @classmethod
    def build(cls, batch: Batch, block_size: int) -> "TorchMetadata":
        decodes = [b for b, num_rows in enumerate(batch.query_lens) if num_rows == 1]
        groups: list[list[int]] = []
        for b in sorted(decodes, key=lambda b: batch.key_lens[b]):
            # The shortest come first, so a group is padded to the length of the one that joins it last.
            if not groups or (len(groups[-1]) + 1) * batch.key_lens[b] > MAX_GATHERED_KEYS:
                groups.append([])
            groups[-1].append(b)
        widths = [cdiv(max(batch.key_lens[b] for b in group), block_size) for group in groups]
        tensors = [torch.tensor(group, dtype=torch.int64, device="cpu") for group in groups]
        indices = move_together(tensors, batch.block_tables.device)
        return cls(
            [
                (batch.cu_seqlens_q[index].long(), batch.block_tables[index, :width], batch.seqlens_k[index])
                for index, width in zip(indices, widths, strict=True)
            ]
        )


def attention_row_by_row(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int) -> None:
    """Each row with no other keys than those it sees, all that come before it without a window (0).

    For a step in which a key is not finite: NaN in a key that is masked outlives the mask, as 0 * NaN is NaN.
    """
    row = 0
    for b, (num_rows, num_keys) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
        k, v = (cache[batch.block_tables[b]].flatten(0, 1).transpose(0, 1) for cache in (k_cache, v_cache))
        for end in range(num_keys - num_rows + 1, num_keys + 1):
            seen = slice(max(0, end - window) if window else 0, end)
            query = q[row].view(k.shape[0], -1, q.shape[2])  # [num_kv_heads, group_size, head_dim]
            out[row] = F.scaled_dot_product_attention(query, k[:, seen], v[:, seen]).view(q.shape[1:])
            row += 1


def _gather(cache: Tensor, tables: Tensor) -> Tensor:
    """[n, num_kv_heads, blocks * block_size, head_dim]; index_select is several times faster than cache[tables]."""
    return cache.index_select(0, tables.flatten()).view(len(tables), -1, *cache.shape[2:]).transpose(1, 2)


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, seqlens_k: Tensor) -> Tensor:
    """One query row for each of n sequences. q: [n, num_heads, head_dim]."""
    n, num_heads, head_dim = q.shape
    k, v = _gather(k_cache, tables), _gather(v_cache, tables)
    # The query heads that share a KV head become query rows, so K and V are not repeated.
    q = q.view(n, k.shape[1], -1, head_dim)
    mask = torch.arange(k.shape[2], device=q.device) < seqlens_k[:, None]  # [n, padded_len]
    if q.device.type != "cpu":  # a NaN that is masked would outlive the mask: 0 * NaN is NaN
        masked = ~mask[:, None, :, None]
        k, v = k.masked_fill(masked, 0), v.masked_fill(masked, 0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    return out.reshape(n, num_heads, head_dim)


def _prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, b: int, out: Tensor) -> None:
    """Compute the rows of sequence b into out. q, out: [rows, num_heads, head_dim]."""
    num_rows, _, head_dim = q.shape
    num_keys, num_kv_heads = batch.key_lens[b], k_cache.shape[2]
    table = batch.block_tables[b : b + 1, : cdiv(num_keys, k_cache.shape[1])]
    k, v = _gather(k_cache, table)[0].contiguous(), _gather(v_cache, table)[0].contiguous()
    # [num_kv_heads, group_size, rows, head_dim]
    q = (q * head_dim**-0.5).view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    position = torch.arange(TILE_ROWS, device=q.device)
    for start in range(0, num_rows, TILE_ROWS):
        rows = q[:, :, start : start + TILE_ROWS]
        tile = rows.shape[2]
        # Every row of the tile sees the keys before the tile, and row i also sees the first i + 1 keys of the tile.
        num_before = num_keys - num_rows + start
        end = num_before + tile
        scores = rows.reshape(num_kv_heads, -1, head_dim) @ k[:, :end].mT  # [num_kv_heads, group_size * tile, end]
        scores = scores.view(*rows.shape[:3], end)
        is_later = position[:tile, None] < position[:tile]
        scores[..., num_before:].masked_fill_(is_later, -torch.inf)
        result = scores.softmax(-1).view(num_kv_heads, -1, end) @ v[:, :end]
        out[start : start + tile] = result.view(num_kv_heads, -1, tile, head_dim).permute(2, 0, 1, 3).flatten(1, 2)
