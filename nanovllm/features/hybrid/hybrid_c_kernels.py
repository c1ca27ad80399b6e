"""The C kernels of hybrid layers, called through ctypes (chapters 10 and 16). Their twins are in delta_rule.py."""

import ctypes
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.core.snapshots.segments import fresh_segments
from nanovllm.features.hybrid.batch_states import segments_of
from nanovllm.features.hybrid.state_pool import COLUMNS, SUMS
from nanovllm.worker.batch import Batch, round_up
from nanovllm.worker.c_calls import FLOAT, INT, PTR, address, args_of
from nanovllm.worker.kernels import Kernels

if TYPE_CHECKING:
    from nanovllm.features.hybrid.hybrid_layers import GatedDeltaNet


class DeltaStep(ctypes.Structure):
    """delta_step of delta_rule.c: what the layers of a step share."""

    _fields_ = (("segments", PTR), *args_of(INT, "num_segments num_logged"))

    @classmethod
    def build(cls, batch: Batch) -> "DeltaStep":
        table = segments_of(batch)
        if table is None:
            table = torch.tensor(fresh_segments(batch.query_lens), dtype=torch.int64, device="cpu")
        step = cls(address(table, torch.int64, (len(table), 8)), len(table), int(table[:, 4].sum()))
        step.kept = table  # as long as the step
        return step


class DeltaArgs(ctypes.Structure):
    """delta_args of delta_rule.h."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "out x states windows log conv a dt_bias norm keys values gates outputs step"),
        *args_of(INT, "x_stride state_stride window_stride log_stride"),
        *args_of(INT, "key_heads value_heads key_dim value_dim kernel_size"),
        ("eps", FLOAT),
    )


class GateArgs(ctypes.Structure):
    """gate_args of gates.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out x gate"), *args_of(INT, "num_heads size row_stride head_stride"))


def delta_net(
    kernels: Kernels, library: Any, x: Tensor, net: "GatedDeltaNet", state_layer: tuple[Tensor, ...], batch: Batch
) -> Tensor:
    dtype, sizes, step, num_rows = kernels.dtype, net.sizes, batch.metadata(DeltaStep), len(x)
    key_dim, value_dim = round_up(sizes.key_dim, SUMS), round_up(sizes.value_dim, COLUMNS)
    keys = 2 * sizes.num_key_heads * key_dim  # numbers of a row; those of q and k
    values, gates = sizes.num_value_heads * value_dim, 2 * sizes.num_value_heads
    in_all = num_rows + step.num_logged
    shapes = {
        "keys": (in_all, keys), "values": (in_all, values), "gates": (in_all, gates), "outputs": (num_rows, values)
    }  # fmt: skip
    scratch = {name: x.new_empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
    out = x.new_empty(num_rows, sizes.value_size)
    args = DeltaArgs(
        num_rows=num_rows, out=address(out, dtype, (num_rows, sizes.value_size)),
        x=address(x, dtype, (num_rows, sizes.conv_size + sizes.value_size + gates), 1), x_stride=x.stride(0),
        **{name: address(part, torch.float32, shapes[name]) for name, part in scratch.items()},
        **weight_addresses(net), step=ctypes.addressof(step), eps=net.norm.eps,
        key_heads=sizes.num_key_heads, value_heads=sizes.num_value_heads, key_dim=sizes.key_dim,
        value_dim=sizes.value_dim, kernel_size=sizes.kernel_size,
    )  # fmt: skip
    if len(state_layer) == 3:  # otherwise nobody keeps the states
        states, windows, log = state_layer
        state_shape = len(states), sizes.num_value_heads, key_dim, value_dim
        args.states, args.state_stride = address(states, torch.float32, state_shape, 1), states.stride(0)
        window_shape = len(windows), sizes.kernel_size - 1, sizes.conv_size
        args.windows, args.window_stride = address(windows, dtype, window_shape, 1), windows.stride(0)
        log_shape = len(log), log.shape[1], sizes.conv_size + gates
        args.log, args.log_stride = address(log, dtype, log_shape, 1), log.stride(0)
    kernels.recorder.call(library.delta_net, args)
    return out


def prepare_nets(model: nn.Module) -> None:
    """Make what the kernels read of all layers' small parameters, before a step is recorded."""
    from nanovllm.features.hybrid.hybrid_layers import GatedDeltaNet

    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            kernel_args_of(module)


def kernel_args_of(net: "GatedDeltaNet") -> dict[str, Tensor]:
    """What a kernel reads of a layer's small parameters, made once."""
    if net.kernel_args is None:
        # A vector may be read that reaches beyond the last number.
        conv, norm = (F.pad(part.flatten(), (0, COLUMNS)) for part in (net.conv.weight.T, net.norm.weight))
        net.kernel_args = {"conv": conv, "a": (-net.A_log.double().exp()).float(), "dt_bias": net.dt_bias, "norm": norm}
    return net.kernel_args


def weight_addresses(net: "GatedDeltaNet") -> dict[str, int]:
    """Where kernel_args_of(net) lies, by the names of DeltaArgs."""
    sizes = net.sizes
    num_numbers = {
        "conv": sizes.kernel_size * sizes.conv_size + COLUMNS, "a": sizes.num_value_heads,
        "dt_bias": sizes.num_value_heads, "norm": sizes.value_dim + COLUMNS,
    }  # fmt: skip
    return {name: address(part, torch.float32, (num_numbers[name],)) for name, part in kernel_args_of(net).items()}


def multiply_by_gate(kernels: Kernels, library: Any, x: Tensor, gate: Tensor) -> Tensor:
    dtype, out = kernels.dtype, x.new_empty(x.shape)
    args = GateArgs(
        num_rows=len(x), out=address(out, dtype, x.shape), x=address(x, dtype, x.shape),
        gate=address(gate, dtype, x.shape, 2), num_heads=x.shape[1], size=x.shape[2], row_stride=gate.stride(0),
        head_stride=gate.stride(1),
    )  # fmt: skip
    kernels.recorder.call(library.multiply_by_gate, args)
    return out


def add_gated(kernels: Kernels, library: Any, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    dtype = kernels.dtype
    args = GateArgs(
        num_rows=len(x), out=address(out, dtype, x.shape), x=address(x, dtype, x.shape),
        gate=address(gate, dtype, (len(x), 1), 1), num_heads=1, size=x.shape[1], row_stride=gate.stride(0),
    )  # fmt: skip
    kernels.recorder.call(library.add_gated, args)
    return out


def in_c(kernels: Kernels) -> tuple[partial, ...]:
    """The functions of hybrid_kernels.py, in their order. () if they cannot be compiled."""
    source = Path(__file__).with_name("delta_rule.c")
    signatures = {"delta_net": DeltaArgs, "multiply_by_gate": GateArgs, "add_gated": GateArgs}
    library = kernels.load_wing(source, signatures)
    if library is None:
        return ()
    return tuple(partial(function, kernels, library) for function in (delta_net, multiply_by_gate, add_gated))
