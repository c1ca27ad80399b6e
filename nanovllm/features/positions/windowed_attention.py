"""Paged attention with a sliding window, in plain PyTorch (arXiv:2004.05150): the reference for the other backends.

    windowed_attention(q, k_cache, v_cache, batch, window) -> out

As attention.py has it, but a row at position p attends only to the last `window` positions, p - window + 1 to p. Blocks
that lie in front of the windows of all rows are not read.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.worker.batch import Batch, cdiv, move_together

MAX_GATHERED_ROWS = 1 << 16  # keys that are gathered at a time, padding included
TILE_ROWS = 128  # query rows of one sequence that are computed together


def windowed_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int) -> Tensor:
    """See worker/attention.py for shapes. Tiles of equally many rows, as all decodes, are computed together."""
    out, block_size = q.new_empty(q.shape), k_cache.shape[1]
    for size, tiles in batch.metadata(WindowMetadata).tiles.items():
        num_blocks = min(cdiv(window + size - 2, block_size) + 1, batch.block_tables.shape[1])  # that a tile reads
        for group in tiles.split(max(1, MAX_GATHERED_ROWS // (num_blocks * block_size))):
            rows = group[:, :1] + torch.arange(size, device=q.device)  # [n, size]
            out[rows] = _attend(q[rows], k_cache, v_cache, batch, group, num_blocks, window)
    return out


@dataclass(frozen=True, slots=True)
class WindowMetadata:
    """What the layers of a step share, whatever their windows.

    tiles   {number of rows: tiles of so many rows [n, 3]}. A tile: its first row, its sequence, keys before that row's
    """

    tiles: dict[int, Tensor]

    @classmethod
    def build(cls, batch: Batch) -> "WindowMetadata":
        by_size: dict[int, list[tuple[int, int, int]]] = {}
        row = 0
        for b, (num_rows, num_keys) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
            for i in range(0, num_rows, TILE_ROWS):
                by_size.setdefault(min(TILE_ROWS, num_rows - i), []).append((row + i, b, num_keys - num_rows + i))
            row += num_rows
        tiles = {size: torch.tensor(alike, dtype=torch.int64, device="cpu") for size, alike in by_size.items()}
        return cls(move_together(tiles, batch.block_tables.device))


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, tiles: Tensor, num_blocks: int, window: int
) -> Tensor:
    """n tiles. q: [n, size, num_heads, head_dim]."""
    (n, size, _, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    _, seqs, before = tiles.T
    columns = (before + 1 - window).clamp(min=0)[:, None] // block_size + torch.arange(num_blocks, device=q.device)
    tables = batch.block_tables[seqs].gather(1, columns.clamp(max=batch.block_tables.shape[1] - 1))
    k, v = (
        cache.index_select(0, tables.flatten()).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    key = (columns[..., None] * block_size + torch.arange(block_size, device=q.device)).flatten(1)  # [n, keys]
    behind = (before[:, None] + torch.arange(size, device=q.device))[..., None] - key[:, None]  # [n, size, keys]
    mask = (behind >= 0) & (behind < window)
    if q.device.type != "cpu":  # NaN in a key that is masked would outlive the mask: 0 * NaN is NaN
        unseen = ~mask.any(1)[:, None, :, None]
        k, v = (x.masked_fill(unseen, 0) for x in (k, v))
    # The query heads that share a KV head become query rows, so K and V are not repeated.
    q = q.view(n, size, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)  # [n, num_kv_heads, group, size, head_dim]
    mask = mask[:, None, None].expand(n, 1, q.shape[2], size, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask)
    return out.unflatten(2, (-1, size)).permute(0, 3, 1, 2, 4).flatten(2, 3)
