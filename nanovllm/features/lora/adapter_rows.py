"""Rows of one batch that meet small changes of the same weight: which rows, which changes (chapter 15).

Plain PyTorch. adapter_c_kernel.py does it for all adapters in one pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nanovllm.worker.batch import round_up
from nanovllm.worker.kernels import Kernels, made_once

TILE_ROWS = 4  # of a group: a kernel computes them together
PADDING = 16  # numbers: the inputs of A are a multiple of it, and so many lie after B; PARTIAL_SUMS of cpu/vectors.h


@dataclass(frozen=True)
class AdapterRows:
    """Rows that meet an adapter, by the slot that it is in."""

    groups: list[tuple[int, Tensor]]

    @classmethod
    def of(cls, slots: Tensor, device: Any) -> "AdapterRows":
        """slots: of each row; -1: it meets none."""
        return cls([(i, (slots == i).nonzero().squeeze(1).to(device)) for i in slots.unique().tolist() if i >= 0])

    @cached_property
    def tiles(self) -> Tensor:
        """[tiles, 2 + TILE_ROWS]: slot, number of rows, rows. For a kernel."""
        tiles = []
        for slot, rows in self.groups:
            for part in rows.split(TILE_ROWS):
                tiles.append([slot, len(part), *part.tolist(), *[0] * (TILE_ROWS - len(part))])
        table = torch.tensor(tiles, dtype=torch.int64, device="cpu")
        return table.view(-1, 2 + TILE_ROWS)  # also if no row meets an adapter


@dataclass(frozen=True)
class LoRAWeights:
    """A and B of one linear layer, this rank's share, for the adapters in all slots.

    The layer may hold several projections (q, k, v): each has an A of its own, and its columns of B belong to that.
    There are zeros where the slot's adapter has no ranks, or changes nothing; its scale is in B.

    a       [num_slots, num_parts, max_rank, in, rounded up to a multiple of PADDING]
    b       [num_slots, max_rank, out]
    ranks   [num_slots]   the largest rank of the slot's adapter here; 0: it leaves this layer as it is
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    out_sizes: tuple[int, ...]

    @classmethod
    def empty(
        cls, num_slots: int, max_rank: int, in_size: int, out_sizes: tuple[int, ...], dtype: Any, device: Any
    ) -> "LoRAWeights":
        out_size = sum(out_sizes)
        b = torch.zeros(num_slots * max_rank * out_size + PADDING, dtype=dtype, device=device)[:-PADDING]
        a = torch.zeros(num_slots, len(out_sizes), max_rank, round_up(in_size, PADDING), dtype=dtype, device=device)
        ranks = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
        return cls(a, b.view(num_slots, max_rank, out_size), ranks, out_sizes)


def add_adapters(y: Tensor, x: Tensor, rows: AdapterRows, weights: LoRAWeights) -> None:
    """y += B (A x), in place, for the rows that meet an adapter. x: [T, in]; y: [T, out]."""
    for slot, indices in rows.groups:
        if weights.ranks[slot] == 0:
            continue
        inner = x[indices].float() @ weights.a[slot, :, :, : x.shape[1]].float().mT  # [num_parts, rows, max_rank]
        columns = weights.b[slot].float().split(weights.out_sizes, dim=1)
        change = torch.cat([part @ b for part, b in zip(inner, columns, strict=True)], dim=1)
        y[indices] = (y[indices].float() + change).to(y.dtype)


@made_once
def kernel_for(kernels: Kernels) -> Callable[[Tensor, Tensor, AdapterRows, LoRAWeights], None]:
    """add_adapters, or the same in C."""
    if kernels.library is None:
        return add_adapters
    from nanovllm.features.lora.adapter_c_kernel import in_c

    return in_c(kernels) or add_adapters
