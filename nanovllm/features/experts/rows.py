"""Which rows meet which of many weights, and the rows sorted by the weights they meet (chapter 17).

Plain PyTorch, and beside it the C kernels: worker/cpu/experts.c, and linear.c and quantized.c, which multiply the rows
of all experts in one pass.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.quantization.formats import MergedWeight
from nanovllm.features.quantization.quantized_kernels import kernels_for as quantized_kernels_for
from nanovllm.features.quantization.quantized_kernels import parts_of
from nanovllm.worker.cpu import c_kernels
from nanovllm.worker.cpu.c_kernels import INT, PTR, args_of, products
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.pointers import address


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


class RouteArgs(ctypes.Structure):
    """route_args of worker/cpu/experts.c."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "weights chosen scores"),
        *args_of(INT, "num_experts num_chosen normalize"),
    )


class SortArgs(ctypes.Structure):
    """sort_args of worker/cpu/experts.c."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "rows places order ends chosen"),
        *args_of(INT, "num_chosen num_experts"),
    )


class SumArgs(ctypes.Structure):
    """sum_args of worker/cpu/experts.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out x places weights"), *args_of(INT, "count size"))


@lru_cache(8)
def kernels_for(kernels: Kernels) -> ExpertKernels:
    lib = kernels.library
    if lib is None:
        return ExpertKernels()
    for function, args in (lib.route, RouteArgs), (lib.sort_by_expert, SortArgs), (lib.weighted_sum, SumArgs):
        function.restype, function.argtypes = None, [ctypes.POINTER(args)]
    return ExpertKernels(
        route=partial(_route_in_c, kernels),
        sort_by_expert=partial(_sort_in_c, kernels),
        gather=partial(_gather_in_c, kernels),
        expert_linear=partial(_linear_in_c, kernels),
        weighted_sum=partial(_sum_in_c, kernels),
    )


def _route_in_c(kernels: Kernels, scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    scores, (num_rows, num_experts) = scores.contiguous(), scores.shape
    weights = scores.new_empty(num_rows, num_chosen, dtype=torch.float32)
    chosen = scores.new_empty(num_rows, num_chosen, dtype=torch.int64)
    args = RouteArgs(
        num_rows=num_rows,
        weights=address(weights, torch.float32, (num_rows, num_chosen)),
        chosen=address(chosen, torch.int64, (num_rows, num_chosen)),
        scores=address(scores, kernels.dtype, (num_rows, num_experts)),
        num_experts=num_experts,
        num_chosen=num_chosen,
        normalize=normalize,
    )
    kernels.recorder.call(kernels.library.route, args)
    return weights, chosen


def _sort_in_c(kernels: Kernels, chosen: Tensor, num_weights: int) -> ExpertRows:
    num_rows, num_chosen = chosen.shape
    rows = chosen.new_empty(num_rows * num_chosen)
    places = chosen.new_empty(num_rows, num_chosen)
    order, ends = chosen.new_empty(num_weights), chosen.new_empty(num_weights)
    args = SortArgs(
        num_rows=num_rows,
        rows=address(rows, torch.int64, (num_rows * num_chosen,)),
        places=address(places, torch.int64, (num_rows, num_chosen)),
        order=address(order, torch.int64, (num_weights,)),
        ends=address(ends, torch.int64, (num_weights,)),
        chosen=address(chosen, torch.int64, (num_rows, num_chosen)),
        num_chosen=num_chosen,
        num_experts=num_weights,
    )
    kernels.recorder.call(kernels.library.sort_by_expert, args)
    return ExpertRows(rows, places, order, ends)


def _gather_in_c(kernels: Kernels, x: Tensor, rows: Tensor) -> Tensor:
    return c_kernels.gather(kernels.library.gather_rows, kernels.recorder, kernels.dtype, x.contiguous(), rows)


def _linear_in_c(kernels: Kernels, x: Tensor, weights: ExpertWeights, sorted_rows: ExpertRows) -> Tensor:
    first, num_weights = weights.linears[0], len(weights.linears)
    is_quantized = isinstance(first.weight, MergedWeight)
    if first.product is not kernels.linear and not is_quantized:
        return expert_linear(x, weights, sorted_rows)
    if weights.kernel_args is None:
        of_one = parts_of if is_quantized else partial(_reordered_address, kernels, first.weight.shape)
        weights.kernel_args = (PTR * num_weights)(*(of_one(layer.weight) for layer in weights.linears))
    ends, order = (address(each, torch.int64, (num_weights,)) for each in (sorted_rows.ends, sorted_rows.order))
    if is_quantized:
        return quantized_kernels_for(kernels).products(
            x,
            weights=weights.kernel_args,
            ends=ends,
            order=order,
            num_weights=num_weights,
            bias=None,
            alike=first.weight,
        )
    n, k = first.weight.shape
    return products(
        kernels.library, kernels.recorder, kernels.dtype, x, weights=weights.kernel_args, ends=ends, order=order,
        num_weights=num_weights, bias=None, n=n, k=k,
    )  # fmt: skip


def _reordered_address(kernels: Kernels, shape: tuple[int, int], weight: Tensor) -> int:
    return address(weight, kernels.dtype, shape, room=kernels.library.reordered_size(*shape))


def _sum_in_c(kernels: Kernels, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    (num_rows, count), size = places.shape, x.shape[1]
    out, weights = x.new_empty(num_rows, size), weights.contiguous()
    args = SumArgs(
        num_rows=num_rows,
        out=address(out, kernels.dtype, (num_rows, size)),
        x=address(x, kernels.dtype, (len(x), size)),
        places=address(places, torch.int64, (num_rows, count)),
        weights=address(weights, torch.float32, (num_rows, count)),
        count=count,
        size=size,
    )
    kernels.recorder.call(kernels.library.weighted_sum, args)
    return out
