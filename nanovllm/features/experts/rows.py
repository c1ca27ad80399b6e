"""Which rows meet which of many weights, and the rows sorted by the weights they meet (chapter 17).

Plain PyTorch. expert_c_kernels.py has the same in C.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.quantization.formats import MergedWeight
from nanovllm.worker.kernels import Kernels, made_once


@dataclass(frozen=True)
class ExpertRows:
    """T rows, each of which meets C of several weights: T * C pairs (row, weight), sorted by weight.

    rows     [T * C]         the row of each pair
    places   [T, C]          where the pairs of each row are
    order    [num_weights]   the weights: first, in order, those that any row meets
    ends     [num_weights]   one past the last pair of each of them
    """

    rows: Tensor
    places: Tensor
    order: Tensor
    ends: Tensor

    @cached_property
    def counts(self) -> list[tuple[int, int]]:
        """Each weight, in their order, and how many pairs it has. The device is asked once for both products."""
        counts = self.ends.diff(prepend=self.ends.new_zeros(1))
        return [(weight, count) for weight, count in torch.stack([self.order, counts], 1).tolist()]


def route(scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """scores: [T, num_experts]. Returns the weights, float32, and the numbers of each row's experts [T, num_chosen].

    The weights are probabilities over all experts; normalize: those of the chosen ones are scaled to add up to 1.
    """
    weights, chosen = scores.float().softmax(-1).topk(num_chosen)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, chosen


def sort_by_expert(chosen: Tensor, num_weights: int) -> ExpertRows:
    """chosen: [T, C], the weights that each row meets. Pairs of one weight are in the order of their rows."""
    flat = chosen.flatten()
    by_weight = flat.argsort(stable=True)
    places = torch.empty_like(by_weight)
    places[by_weight] = torch.arange(len(flat), device=flat.device)
    counts = flat.new_zeros(num_weights).index_add_(0, flat, torch.ones_like(flat))
    order = (counts == 0).long().argsort(stable=True)
    return ExpertRows(by_weight // chosen.shape[1], places.view(chosen.shape), order, counts[order].cumsum(0))


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """[pairs, size]: these rows of x [T, size]."""
    return x[rows]


class ExpertWeights:
    """Weights of the same shape, one an expert. linears: the layers that hold them."""

    def __init__(self, linears: Iterable[Any]) -> None:
        self.linears = list(linears)
        self.kernel_args: Any = None  # what a kernel keeps with the weights

    def are_alike(self, kernels: Kernels) -> bool:
        """Do these kernels multiply them all in one call? A published checkpoint may hold some in other bits."""
        kinds = {kind_of(linear.weight) if is_quantized(linear) else linear.product for linear in self.linears}
        return len(kinds) == 1 and (is_quantized(self.linears[0]) or kernels.linear in kinds)


def is_quantized(linear: Any) -> bool:
    return isinstance(linear.weight, MergedWeight)


def kind_of(weight: MergedWeight) -> tuple[tuple[int, int], ...]:
    """The outputs and groups of its parts."""
    return tuple((part.shape[0], part.num_groups) for part in weight.parts)


def expert_linear(x: Tensor, weights: ExpertWeights, sorted_rows: ExpertRows) -> Tensor:
    """y = x W^T, each row of x with its own W. x: [pairs, in]; y: [pairs, out]."""
    out, start = x.new_empty(len(x), sum(weights.linears[0].out_sizes)), 0
    for weight, count in sorted_rows.counts:
        if count > 0:
            linear, end = weights.linears[weight], start + count
            out[start:end] = linear.product(x[start:end], linear.weight, None)
            start = end
    return out


def weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """[T, size]: for each row t, the sum over c of weights[t, c] * x[places[t, c]]. x: [pairs, size]."""
    return (x[places].float() * weights[..., None]).sum(1).to(x.dtype)


@dataclass(frozen=True)
class ExpertKernels:
    """The functions above, or the same in C, which sums up in an order of its own on every processor."""

    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]] = route
    sort_by_expert: Callable[[Tensor, int], ExpertRows] = sort_by_expert
    gather: Callable[[Tensor, Tensor], Tensor] = gather
    expert_linear: Callable[[Tensor, ExpertWeights, ExpertRows], Tensor] = expert_linear
    weighted_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum


@made_once
def kernels_for(kernels: Kernels) -> ExpertKernels:
    if kernels.library is None:
        return ExpertKernels()
    from nanovllm.features.experts.expert_c_kernels import in_c

    return in_c(kernels)
