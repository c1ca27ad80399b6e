"""Rows of one batch that meet small changes of the same weight: which rows, which changes (chapter 15).

Plain PyTorch, and beside it the C kernel that does it for all adapters in one pass (worker/cpu/adapters.c).
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nanovllm.worker.cpu.c_kernels import INT, PTR, args_of, out_address
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.pointers import address

TILE_ROWS = 4  # of a group: a kernel computes them together
PADDING = 16  # numbers: the inputs of A are a multiple of it, and so many lie behind B; PARTIAL_SUMS of cpu/vectors.h


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
        padded, out_size = -(-in_size // PADDING) * PADDING, sum(out_sizes)
        b = torch.zeros(num_slots * max_rank * out_size + PADDING, dtype=dtype, device=device)[:-PADDING]
        a = torch.zeros(num_slots, len(out_sizes), max_rank, padded, dtype=dtype, device=device)
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


class AdapterArgs(ctypes.Structure):
    """adapter_args of worker/cpu/adapters.c."""

    _fields_ = (
        *args_of(PTR, "y y_floats x a b ranks part_ends tasks"),
        *args_of(INT, "num_parts max_rank n k padded_k x_stride"),
    )


def kernel_for(kernels: Kernels) -> Callable[[Tensor, Tensor, AdapterRows, LoRAWeights], None]:
    """add_adapters, or the same in C."""
    return add_adapters if kernels.library is None else partial(_add_in_c, kernels)


def _add_in_c(kernels: Kernels, y: Tensor, x: Tensor, rows: AdapterRows, weights: LoRAWeights) -> None:
    dtype, part_ends, x = kernels.dtype, (INT * len(weights.out_sizes))(*accumulate(weights.out_sizes)), x.contiguous()
    (num_rows, k), n, tiles = x.shape, y.shape[1], rows.tiles
    num_slots, num_parts, max_rank, padded_k = weights.a.shape
    args = AdapterArgs(
        **out_address(y, dtype, (num_rows, n), "y"), x=address(x, dtype, (num_rows, k)),
        a=address(weights.a, dtype, (num_slots, len(weights.out_sizes), max_rank, -(-k // PADDING) * PADDING)),
        b=address(weights.b, dtype, (num_slots, max_rank, n), room=num_slots * max_rank * n + PADDING),
        ranks=address(weights.ranks, torch.int64, (num_slots,)), part_ends=ctypes.addressof(part_ends),
        tasks=address(tiles, torch.int64, (len(tiles), 2 + TILE_ROWS)),
        num_parts=num_parts, max_rank=max_rank, n=n, k=k, padded_k=padded_k, x_stride=x.stride(0),
    )  # fmt: skip
    kernels.library.add_adapters(ctypes.byref(args), INT(len(tiles)))
