"""The C kernels of experts, called through ctypes (chapter 17). Their twins are in rows.py.

Beside experts.c these are worker/cpu/linear.c and features/quantization/quantized.c, which multiply the rows of all
experts in one pass.
"""

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.experts import rows as in_torch
from nanovllm.features.experts.rows import ExpertKernels, ExpertRows, ExpertWeights, is_quantized
from nanovllm.features.quantization.quantized_kernels import kernels_for as quantized_kernels_for
from nanovllm.features.quantization.quantized_kernels import parts_of
from nanovllm.worker.c_calls import INT, PTR, address, args_of
from nanovllm.worker.cpu import c_kernels
from nanovllm.worker.cpu.c_kernels import products
from nanovllm.worker.kernels import Kernels


class RouteArgs(ctypes.Structure):
    """route_args of experts.c."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "weights chosen scores"),
        *args_of(INT, "num_experts num_chosen normalize"),
    )


class SortArgs(ctypes.Structure):
    """sort_args of experts.c."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "rows places order ends chosen"),
        *args_of(INT, "num_chosen num_experts"),
    )


class SumArgs(ctypes.Structure):
    """sum_args of experts.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out x places weights"), *args_of(INT, "count size"))


def in_c(kernels: Kernels) -> ExpertKernels:
    source = Path(__file__).with_name("experts.c")
    signatures = {"route": RouteArgs, "sort_by_expert": SortArgs, "weighted_sum": SumArgs}
    library = kernels.load_wing(source, signatures)
    if library is None:
        return ExpertKernels()
    return ExpertKernels(
        route=partial(route, kernels, library),
        sort_by_expert=partial(sort_by_expert, kernels, library),
        gather=partial(gather, kernels),
        expert_linear=partial(expert_linear, kernels),
        weighted_sum=partial(weighted_sum, kernels, library),
    )


def route(kernels: Kernels, library: Any, scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
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
    kernels.recorder.call(library.route, args)
    return weights, chosen


def sort_by_expert(kernels: Kernels, library: Any, chosen: Tensor, num_weights: int) -> ExpertRows:
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
    kernels.recorder.call(library.sort_by_expert, args)
    return ExpertRows(rows, places, order, ends)


def gather(kernels: Kernels, x: Tensor, rows: Tensor) -> Tensor:
    return c_kernels.gather(kernels.library.gather_rows, kernels.recorder, kernels.dtype, x.contiguous(), rows)


def expert_linear(kernels: Kernels, x: Tensor, weights: ExpertWeights, sorted_rows: ExpertRows) -> Tensor:
    first, num_weights = weights.linears[0], len(weights.linears)
    quantized_products = quantized_kernels_for(kernels).products if is_quantized(first) else None
    if is_quantized(first) and quantized_products is None:
        return in_torch.expert_linear(x, weights, sorted_rows)
    if weights.kernel_args is None:
        if not weights.are_alike(kernels):
            return in_torch.expert_linear(x, weights, sorted_rows)
        weight_args = parts_of if is_quantized(first) else partial(_reordered_address, kernels, first.weight.shape)
        weights.kernel_args = (PTR * num_weights)(*(weight_args(layer.weight) for layer in weights.linears))
    ends, order = (address(each, torch.int64, (num_weights,)) for each in (sorted_rows.ends, sorted_rows.order))
    if quantized_products is not None:
        return quantized_products(
            x,
            weights=weights.kernel_args,
            ends=ends,
            order=order,
            num_weights=num_weights,
            bias=None,
            alike=first.weight,
            num_groups=max(linear.weight.num_groups for linear in weights.linears),
        )
    n, k = first.weight.shape
    return products(
        kernels.library, kernels.recorder, kernels.dtype, x, weights=weights.kernel_args, ends=ends, order=order,
        num_weights=num_weights, bias=None, n=n, k=k,
    )  # fmt: skip


def _reordered_address(kernels: Kernels, shape: tuple[int, int], weight: Tensor) -> int:
    return address(weight, kernels.dtype, shape, room=kernels.library.reordered_size(*shape))


def weighted_sum(kernels: Kernels, library: Any, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
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
    kernels.recorder.call(library.weighted_sum, args)
    return out
