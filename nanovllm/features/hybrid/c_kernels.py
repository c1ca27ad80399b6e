"""The C kernels of hybrid layers, called through ctypes (chapters 10 and 16). Their twins are in delta_rule.py."""

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.core.snapshots.segments import fresh_segments
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu.c_kernels import FLOAT, INT, PTR, args_of

if TYPE_CHECKING:
    from nanovllm.features.hybrid.layers import GatedDeltaNet

COLUMNS, SUMS = 16, 4  # as in cpu/delta_rule.h


class DeltaStep(ctypes.Structure):
    """delta_step of worker/cpu/delta_rule.c."""

    _fields_ = (("segments", PTR), *args_of(INT, "num_segments num_logged"))


class DeltaArgs(ctypes.Structure):
    """delta_args of worker/cpu/delta_rule.c."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "out x states windows log conv a dt_bias norm keys values gates outputs step"),
        *args_of(INT, "x_stride state_stride window_stride log_stride"),
        *args_of(INT, "key_heads value_heads key_dim value_dim kernel_size"),
        ("eps", FLOAT),
    )


class GateArgs(ctypes.Structure):
    """gate_args of worker/cpu/gates.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out x gate"), *args_of(INT, "num_heads size row_stride head_stride"))


def delta_step(batch: Batch) -> DeltaStep:
    """What the layers of a step have in common, worked out by the first of them."""
    if "delta_step" not in batch.plans:
        table = batch.segments
        if table is None:
            table = torch.tensor(fresh_segments(batch.query_lens), dtype=torch.int64)
        step = DeltaStep(table.data_ptr(), len(table), int(table[:, 4].sum()))
        step.kept = table  # as long as the step
        batch.plans["delta_step"] = step
    return batch.plans["delta_step"]


def padded(size: int, multiple: int = COLUMNS) -> int:
    return -(-size // multiple) * multiple


def delta_net(
    lib: ctypes.CDLL, x: Tensor, net: "GatedDeltaNet", state_layer: tuple[Tensor, ...], batch: Batch
) -> Tensor:
    sizes, step, num_rows = net.sizes, delta_step(batch), len(x)
    keys = 2 * sizes.num_key_heads * padded(sizes.key_dim, SUMS)  # numbers of a row; those of q and k
    values, gates = sizes.num_value_heads * padded(sizes.value_dim), 2 * sizes.num_value_heads
    in_all = num_rows + step.num_logged
    scratch = [
        x.new_empty(rows, size, dtype=torch.float32)
        for rows, size in ((in_all, keys), (in_all, values), (in_all, gates), (num_rows, values))
    ]
    out = x.new_empty(num_rows, sizes.value_size)
    if net.kernel_args is None:
        # A vector may be read that reaches beyond the last number.
        conv, norm = (F.pad(part.flatten(), (0, COLUMNS)) for part in (net.conv.weight.T, net.norm.weight))
        net.kernel_args = conv, (-net.A_log.double().exp()).float(), net.dt_bias, norm
    states, windows, log = state_layer if len(state_layer) == 3 else (x, x, x)  # none: nobody keeps the states
    pointers = (part.data_ptr() for part in (out, x, states, windows, log, *net.kernel_args, *scratch))
    strides = (part.stride(0) for part in (x, states, windows, log))
    heads = sizes.num_key_heads, sizes.num_value_heads, sizes.key_dim, sizes.value_dim, sizes.kernel_size
    lib.delta_net(DeltaArgs(num_rows, *pointers, ctypes.addressof(step), *strides, *heads, net.norm.eps))
    return out


def multiply_by_gate(lib: ctypes.CDLL, x: Tensor, gate: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    pointers = out.data_ptr(), x.data_ptr(), gate.data_ptr()
    lib.multiply_by_gate(GateArgs(len(x), *pointers, x.shape[1], x.shape[2], gate.stride(0), gate.stride(1)))
    return out


def add_gated(lib: ctypes.CDLL, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    pointers = out.data_ptr(), x.data_ptr(), gate.data_ptr()
    lib.add_gated(GateArgs(len(x), *pointers, 1, x.shape[1], gate.stride(0), 0))
    return out


def in_c(lib: ctypes.CDLL) -> tuple[partial, ...]:
    """The functions of kernels.py, in their order."""
    for function, args in (lib.delta_net, DeltaArgs), (lib.multiply_by_gate, GateArgs), (lib.add_gated, GateArgs):
        function.restype, function.argtypes = None, [ctypes.POINTER(args)]
    return tuple(partial(function, lib) for function in (delta_net, multiply_by_gate, add_gated))
