"""One batch, many weights: rows that are grouped by the weights they meet, in plain PyTorch (chapter 15).

cpu/linear.c and cpu/quantized.c multiply all groups in one pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


class GroupedWeights:
    """Weights of the same shape, one of them for each group of rows. linears: the layers that hold them."""

    def __init__(self, linears: Iterable[Any]) -> None:
        self.linears = list(linears)
        self.kernel_args: Any = None  # what a kernel keeps with the weights


def grouped_linear(x: Tensor, weights: GroupedWeights, groups: RowGroups) -> Tensor:
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
