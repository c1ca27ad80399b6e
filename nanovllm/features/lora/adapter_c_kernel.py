"""The C kernel of adapters, called through ctypes (chapter 15). Its twin is in adapter_rows.py."""

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.lora.adapter_rows import PADDING, TILE_ROWS, AdapterRows, LoRAWeights
from nanovllm.worker.batch import round_up
from nanovllm.worker.c_calls import INT, PTR, address, args_of, out_address
from nanovllm.worker.kernels import Kernels


class AdapterArgs(ctypes.Structure):
    """adapter_args of adapters.c."""

    _fields_ = (
        *args_of(PTR, "y y_floats x a b ranks part_ends tasks"),
        *args_of(INT, "num_parts max_rank n k padded_k x_stride"),
    )


def in_c(kernels: Kernels) -> Callable[[Tensor, Tensor, AdapterRows, LoRAWeights], None] | None:
    """add_adapters(); None if it cannot be compiled."""
    library = kernels.load_wing(Path(__file__).with_name("adapters.c"), {})
    return None if library is None else partial(add_adapters, kernels, library)


def add_adapters(kernels: Kernels, library: Any, y: Tensor, x: Tensor, rows: AdapterRows, weights: LoRAWeights) -> None:
    dtype, part_ends, x = kernels.dtype, (INT * len(weights.out_sizes))(*accumulate(weights.out_sizes)), x.contiguous()
    (num_rows, k), n, tiles = x.shape, y.shape[1], rows.tiles
    num_slots, num_parts, max_rank, padded_k = weights.a.shape
    args = AdapterArgs(
        **out_address(y, dtype, (num_rows, n), "y"), x=address(x, dtype, (num_rows, k)),
        a=address(weights.a, dtype, (num_slots, len(weights.out_sizes), max_rank, round_up(k, PADDING))),
        b=address(weights.b, dtype, (num_slots, max_rank, n), room=num_slots * max_rank * n + PADDING),
        ranks=address(weights.ranks, torch.int64, (num_slots,)), part_ends=ctypes.addressof(part_ends),
        tasks=address(tiles, torch.int64, (len(tiles), 2 + TILE_ROWS)),
        num_parts=num_parts, max_rank=max_rank, n=n, k=k, padded_k=padded_k, x_stride=x.stride(0),
    )  # fmt: skip
    library.add_adapters(ctypes.byref(args), INT(len(tiles)))
