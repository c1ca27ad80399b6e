"""Which rows meet which of many weights, and the rows sorted by the weights they meet (chapter 17).

Plain PyTorch, and beside it the C kernels that multiply the rows of all experts in one pass (worker/cpu/linear.c and
quantized.c).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.quantization.formats import MergedWeight
from nanovllm.features.quantization.quantized_kernels import kernels_for as quantized_kernels_for
from nanovllm.features.quantization.quantized_kernels import parts_of
from nanovllm.worker.cpu.c_kernels import INT, PTR, products
from nanovllm.worker.cpu.pointers import address
from nanovllm.worker.kernels import Kernels


@dataclass(frozen=True)
class ExpertRows:
    """T rows, each of which meets C of several weights: T * C pairs (row, weight), sorted by weight.

    rows     [T * C]         the row of each pair
    places   [T, C]          where the pairs of each row are
    counts   [num_weights]   how many pairs each weight has
    """

    rows: Tensor
    places: Tensor
    counts: Tensor

    @cached_property
    def num_rows(self) -> list[int]:
        """The same counts, on the host: the device is asked once a layer, for both of its products."""
        return self.counts.tolist()

    @cached_property
    def met(self) -> Tensor:
        """The weights that any row meets, in order: [M]."""
        return self.counts.nonzero().squeeze(1)

    @cached_property
    def ends(self) -> Tensor:
        """One past the last pair of each of them: [M]."""
        return self.counts.cumsum(0)[self.met]


def route(scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """scores: [T, num_experts]. Returns the weights, float32, and the numbers of each row's experts [T, num_chosen].

    The weights are probabilities over all experts; normalize: those of the chosen ones are scaled to add up to 1.
    """
    weights, chosen = scores.float().softmax(-1).topk(num_chosen)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, chosen


def sort_by_expert(chosen: Tensor, num_weights: int) -> ExpertRows:
    """chosen: [T, C], the weights that each row meets. Pairs of one weight are in the order of their rows."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(flat), device=flat.device)
    counts = flat.new_zeros(num_weights).index_add_(0, flat, torch.ones_like(flat))
    return ExpertRows(order // chosen.shape[1], places.view(chosen.shape), counts)


class ExpertWeights:
    """Weights of the same shape, one an expert. linears: the layers that hold them."""

    def __init__(self, linears: Iterable[Any]) -> None:
        self.linears = list(linears)
        self.kernel_args: Any = None  # what a kernel keeps with the weights


def expert_linear(x: Tensor, weights: ExpertWeights, sorted_rows: ExpertRows) -> Tensor:
    """y = x W^T, each row of x with its own W. x: [pairs, in]; y: [pairs, out]."""
    out, start = x.new_empty(len(x), sum(weights.linears[0].out_sizes)), 0
    for linear, num_rows in zip(weights.linears, sorted_rows.num_rows, strict=True):
        if num_rows > 0:
            end = start + num_rows
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
    expert_linear: Callable[[Tensor, ExpertWeights, ExpertRows], Tensor] = expert_linear
    weighted_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum


@lru_cache(8)
def kernels_for(kernels: Kernels) -> ExpertKernels:
    if kernels.library is None:
        return ExpertKernels()
    return ExpertKernels(partial(_route_in_c, kernels), partial(_linear_in_c, kernels), partial(_sum_in_c, kernels))


def _route_in_c(kernels: Kernels, scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = scores.shape
    weights = torch.empty(num_rows, num_chosen)
    chosen = torch.empty(num_rows, num_chosen, dtype=torch.int64)
    scores, shape = scores.contiguous(), (num_rows, num_chosen)
    of_results = address(weights, torch.float32, shape), address(chosen, torch.int64, shape)
    pointers = *of_results, address(scores, kernels.num, (num_rows, num_experts))
    kernels.library.route(*map(PTR, pointers), *map(INT, (num_rows, num_experts, num_chosen, normalize)))
    return weights, chosen


def _linear_in_c(kernels: Kernels, x: Tensor, weights: ExpertWeights, sorted_rows: ExpertRows) -> Tensor:
    first = weights.linears[0]
    is_quantized = isinstance(first.weight, MergedWeight)
    if first.product is not kernels.linear and not is_quantized:
        return expert_linear(x, weights, sorted_rows)
    if weights.kernel_args is None:
        of_one = parts_of if is_quantized else partial(_reordered_address, kernels, first.weight.shape)
        weights.kernel_args = torch.tensor([of_one(layer.weight) for layer in weights.linears])
    met, num_met = weights.kernel_args[sorted_rows.met], len(sorted_rows.met)
    of_weights = (PTR * num_met).from_address(address(met, torch.int64, (num_met,)))
    ends = address(sorted_rows.ends, torch.int64, (num_met,))
    if is_quantized:
        return quantized_kernels_for(kernels).products(x, of_weights, ends, num_met, None, first.weight)
    n, k = first.weight.shape
    return products(
        kernels.library, kernels.recorder, kernels.num, x,
        weights=of_weights, ends=ends, num_weights=num_met, bias=None, n=n, k=k,
    )  # fmt: skip


def _reordered_address(kernels: Kernels, shape: tuple[int, int], weight: Tensor) -> int:
    return address(weight, kernels.num, shape, room=kernels.library.reordered_size(*shape))


def _sum_in_c(kernels: Kernels, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    num, size, weights = kernels.num, x.shape[1], weights.contiguous()
    out = x.new_empty(len(places), size)
    of_rows = address(out, num, (len(places), size)), address(x, num, (len(x), size))
    pointers = *of_rows, address(places, torch.int64, places.shape), address(weights, torch.float32, places.shape)
    kernels.library.weighted_sum(*map(PTR, pointers), *map(INT, (*places.shape, size)))
    return out
