"""One batch, many weights: rows that are grouped by the weights they meet, in plain PyTorch (chapter 15).

Experts (experts.py): each row meets some of many weights, and nothing else. Adapters (lora.py): all rows meet one
weight, and some of them a small change of it, too. cpu/linear.c, cpu/quantized.c and cpu/adapters.c multiply all groups
in one pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

TILE_ROWS = 4  # of a group: a kernel computes them together
PADDING = 16  # numbers: the inputs of A are a multiple of it, and so many lie behind B, for kernels that read vectors


# -- experts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowGroups:
    """T rows, each of which meets C of several weights: T * C pairs (row, weight), sorted by weight.

    rows     [T * C]   the row of each pair
    places   [T, C]    where the pairs of each row are
    met      [M]       the weights that any row meets
    ends     [M]       one past the last pair of each of them
    """

    rows: Tensor
    places: Tensor
    met: Tensor
    ends: Tensor


def group_rows(chosen: Tensor, num_weights: int) -> RowGroups:
    """chosen: [T, C], the weights that each row meets. Pairs of one weight are in the order of their rows."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(flat), device=flat.device)
    counts = flat.bincount(minlength=num_weights)
    met = counts.nonzero().squeeze(1)
    return RowGroups(order // chosen.shape[1], places.view(chosen.shape), met, counts.cumsum(0)[met])


class Weights:
    """Weights of the same shape, one of them for each group of rows. linears: the layers that hold them."""

    def __init__(self, linears: Iterable[Any]) -> None:
        self.linears = list(linears)
        self.kernel_args: Any = None  # what a kernel keeps with the weights


def grouped_linear(x: Tensor, weights: Weights, groups: RowGroups) -> Tensor:
    """y = x W^T, each row of x with its own W. x: [pairs, in]; y: [pairs, out]."""
    out, start = x.new_empty(len(x), sum(weights.linears[0].out_sizes)), 0
    for i, end in zip(groups.met.tolist(), groups.ends.tolist(), strict=True):
        linear = weights.linears[i]
        out[start:end] = linear.product(x[start:end], linear.weight, None)
        start = end
    return out


def weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """[T, size]: for each row t, the sum over c of weights[t, c] * x[places[t, c]]. x: [pairs, size]."""
    return (x[places].float() * weights[..., None]).sum(1).to(x.dtype)


# -- adapters ---------------------------------------------------------------------------------------------------------


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
        return torch.tensor(tiles)


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
        like = {"dtype": dtype, "device": device}
        padded, out_size = -(-in_size // PADDING) * PADDING, sum(out_sizes)
        b = torch.zeros(num_slots * max_rank * out_size + PADDING, **like)[:-PADDING]
        a = torch.zeros(num_slots, len(out_sizes), max_rank, padded, **like)
        return cls(a, b.view(num_slots, max_rank, out_size), torch.zeros(num_slots, dtype=torch.int64), out_sizes)


def add_adapters(y: Tensor, x: Tensor, rows: AdapterRows, weights: LoRAWeights) -> None:
    """y += B (A x), in place, for the rows that meet an adapter. x: [T, in]; y: [T, out]."""
    for slot, indices in rows.groups:
        if weights.ranks[slot] == 0:
            continue
        inner = x[indices].float() @ weights.a[slot, :, :, : x.shape[1]].float().mT  # [num_parts, rows, max_rank]
        columns = weights.b[slot].float().split(weights.out_sizes, dim=1)
        change = torch.cat([part @ b for part, b in zip(inner, columns, strict=True)], dim=1)
        y[indices] = (y[indices].float() + change).to(y.dtype)
