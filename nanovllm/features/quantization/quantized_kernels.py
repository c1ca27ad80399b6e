"""The C kernels for weights of few bits, called through ctypes; PyTorch where there are none (chapter 12)."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.features.quantization.formats import (
    FORMATS,
    GROUP_SIZE,
    Q4_1,
    MergedWeight,
    QuantizedRows,
    in_groups,
    quantized_linear,
)
from nanovllm.features.quantization.q4_1_search import search_q4_1
from nanovllm.worker.c_calls import INT, PTR, address, address_or_null, args_of, out_address
from nanovllm.worker.kernels import Kernels, made_once


@dataclass(frozen=True)
class QuantizedKernels:
    """The same functions in PyTorch, see formats.py and q4_1_search.py, or in C. products: of rows that meet
    one of several weights each, in C only."""

    quantized_linear: Callable[..., Tensor] = quantized_linear
    search_q4_1: Callable[[Tensor, Tensor], QuantizedRows] = search_q4_1
    products: Any = None


class QuantizedPart(ctypes.Structure):
    """quantized_part of quantized.c. format: its place in FORMATS."""

    _fields_ = (*args_of(PTR, "blocks order"), *args_of(INT, "block_bytes format n num_groups"))


class QuantizedArgs(ctypes.Structure):
    """quantized_args of quantized.c."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "out out_floats x bias groups weights ends order"),
        *args_of(INT, "num_weights num_parts n k x_stride"),
    )


class SearchArgs(ctypes.Structure):
    """search_args of quantize.c."""

    _fields_ = (*args_of(PTR, "codes scales minimums weight importance"), *args_of(INT, "n k"))


@made_once
def kernels_for(kernels: Kernels) -> QuantizedKernels:
    if kernels.library is None:
        return QuantizedKernels()
    source, dtype = Path(__file__).with_name("quantized.c"), kernels.dtype
    lib = kernels.load_wing(source, {"quantized_linear": QuantizedArgs, "search_q4_1": SearchArgs})
    if lib is None:
        return QuantizedKernels()
    lib.x_groups_bytes.restype, lib.x_groups_bytes.argtypes = INT, [INT]
    scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def products(
        x: Tensor,
        weights: Any,
        ends: int | None,
        num_weights: int,
        bias: Tensor | None,
        alike: MergedWeight,
        num_groups: int,
        order: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See products() of worker/cpu/c_kernels.py. alike: a weight of the same sizes as all of them. num_groups: the
        largest of all their parts.
        """
        nonlocal scratch
        n, k = alike.shape
        scratch_bytes = lib.x_groups_bytes(num_groups)
        if scratch.numel() < scratch_bytes:  # zeros: a tile computes with rows that nobody has written, too
            scratch = torch.zeros(scratch_bytes, dtype=torch.uint8, device="cpu")
        x = x if x.stride(1) == 1 else x.contiguous()
        rows = len(x)
        out = x.new_empty(rows, n, dtype=out_dtype)
        args = QuantizedArgs(
            num_rows=rows, **out_address(out, dtype, (rows, n)), x=address(x, dtype, (rows, k), 1),
            bias=address_or_null(bias, dtype, (n,)), groups=address(scratch, torch.uint8, scratch.shape),
            weights=ctypes.addressof(weights), ends=ends, order=order, num_weights=num_weights,
            num_parts=len(alike.parts), n=n, k=k, x_stride=x.stride(0),
        )  # fmt: skip
        args.kept = weights, scratch  # as long as the arguments
        kernels.recorder.call(lib.quantized_linear, args)
        return out

    def quantized_linear(
        x: Tensor, weight: MergedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return products(x, PTR(parts_of(weight)), None, 1, bias, weight, weight.num_groups, out_dtype=out_dtype)

    def search_q4_1(weight: Tensor, importance: Tensor) -> QuantizedRows:
        k, groups = weight.shape[1], in_groups(weight).contiguous()
        n, num_groups, group_size = groups.shape
        importance = F.pad(importance, (0, -k % group_size))
        codes = torch.empty(n, num_groups, group_size // 2, dtype=torch.uint8, device="cpu")
        scales, minimums = torch.empty(2, n, num_groups, dtype=torch.float32, device="cpu")
        args = SearchArgs(
            codes=address(codes, torch.uint8, (n, num_groups, group_size // 2)),
            scales=address(scales, torch.float32, (n, num_groups)),
            minimums=address(minimums, torch.float32, (n, num_groups)),
            weight=address(groups, torch.float32, (n, num_groups, group_size)),
            importance=address(importance, torch.float32, (num_groups * group_size,)),
            n=n, k=num_groups * group_size,
        )  # fmt: skip
        lib.search_q4_1(args)
        return QuantizedRows(Q4_1, k, codes, scales.half(), minimums.half())

    return QuantizedKernels(quantized_linear, search_q4_1, products)


def parts_of(weight: MergedWeight) -> int:
    """Where the weight's parts lie, as C reads them; made once. Parts whose orders are equal share one."""
    if weight.kernel_args is None:
        formats = list(FORMATS.values())
        parts, orders = (QuantizedPart * len(weight.parts))(), dict[tuple[int, ...] | None, int | None]()
        for place, part in zip(parts, weight.parts, strict=True):
            same = None if part.order is None else tuple(part.order.tolist())
            orders.setdefault(same, address_or_null(part.order, torch.int32, (part.num_groups * GROUP_SIZE,)))
            place.blocks = address(part.blocks, torch.uint8, part.blocks.shape)
            place.order = orders[same]
            place.block_bytes = part.blocks.stride(0)
            place.format = formats.index(part.format)
            place.n = part.shape[0]
            place.num_groups = part.num_groups
        weight.kernel_args = parts
    return ctypes.addressof(weight.kernel_args)
