"""The parts of the decoder: norm, rotary embedding, linear layers, MLP (chapters 1, 9 and 10)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import Kernels, Pair

FLOAT32_ROWS = 1024  # rows of a weight that are converted to float32 at a time
POSITIONS_AT_ONCE = 4096  # whose cosines and sines are computed together, in float64


# What parameters get unless they say otherwise. PyTorch's own defaults are the caller's, and other threads see them.
_dtype_and_device: ContextVar[tuple[torch.dtype | None, torch.device | None]] = ContextVar("building")


@contextmanager
def building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within the block, parameters get this dtype and this device. Outside of any, they get PyTorch's defaults."""
    token = _dtype_and_device.set((dtype, device))
    try:
        yield
    finally:
        _dtype_and_device.reset(token)


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter whose memory is not touched before its numbers come. dtype: one that it has in every model."""
    default, device = _dtype_and_device.get((None, None))
    return nn.Parameter(torch.empty(*shape, dtype=dtype or default, device=device))


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What all layers of a step share. cos_sin: of the batch's positions, [T, rotary_dim / 2] cosines and sines."""

    batch: Batch
    cos_sin: Pair
    kernels: Kernels


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight) over the last dimension (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps
        self.offset = offset

    def forward(self, hidden: Tensor, residual: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Add hidden to residual, in residual's memory. Returns (the normed sum, the sum).

        residual: None in the first layer, and for q and k. Then the sum is hidden itself, and the next norm writes into
        it.
        """
        return context.kernels.add_rms_norm(hidden, residual, self.weight, self.eps, self.offset)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """y = x W^T + b, summed in float32. out_dtype: float32 keeps the sums as they are, None rounds to x's dtype."""
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cpu or "dtype" not in torch.ops.aten.mm.overloads():  # mm has an out_dtype on a GPU, from PyTorch 2.8 on
        # A part of the weight, as float32, fits into a core's cache.
        wide = x.float()
        y = torch.cat([wide @ part.float().T for part in weight.split(FLOAT32_ROWS)], dim=1)
    else:
        y = torch.mm(x, weight.T, out_dtype=out_dtype)
    return y if bias is None else y + bias.float()


class Linear(nn.Module):
    """y = x W^T + b. The weight may be several projections of the same input, one below the other.

    out_sizes: the size of each. projections: their names in a checkpoint; () if it has the whole weight as one.
    out_dtype: what an OutputHead asks its product for; here always None, the dtype of x.
    stays_exact: its weight must not be rounded to fewer bits.
    """

    out_dtype: torch.dtype | None = None
    stays_exact = False

    def __init__(
        self, in_size: int, out_sizes: int | tuple[int, ...], bias: bool, projections: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.out_sizes = (out_sizes,) if isinstance(out_sizes, int) else out_sizes
        self.projections = projections
        self.weight: Any = parameter(sum(self.out_sizes), in_size)
        self.bias = parameter(sum(self.out_sizes)) if bias else None
        # Whoever changes the weight's form says here how to multiply by it: another order (Platform.read_linear),
        # fewer bits (features/quantization). So does who adds something to the product (features/lora).
        self.product: Callable[..., Tensor] = plain_linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class OutputHead(Linear):
    """Computes logits, in float32 whatever the weight's dtype is. In bf16 the largest logits of a row often tie."""

    out_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias, self.out_dtype)


class GatedLinear(Linear):
    """silu(gate(x)) * up(x): two projections in one weight, and what follows them."""

    def __init__(self, in_size: int, size: int, bias: bool) -> None:
        super().__init__(in_size, (size, size), bias, ("gate_proj", "up_proj"))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # pyrefly: ignore[bad-override]
        return context.kernels.gated_linear(x, self)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, intermediate_size: int | None = None) -> None:
        """intermediate_size: None takes the config's."""
        super().__init__()
        size = intermediate_size or config.intermediate_size
        self.gate_up_proj = GatedLinear(config.hidden_size, size, config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, config.mlp_bias)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        return self.down_proj(self.gate_up_proj(hidden, context))


class RotaryEmbedding:
    """Rotary position embedding: pair i of a head of d numbers turns by theta^(-2i/d) radians a position
    (arXiv:2104.09864).

    The table is made once for all positions: angles in float32, as in transformers, and their cosines and sines in
    float64, which all processors round to the same bits.

    axis_of_pair   [rotary_dim / 2], of a model whose images stand in a plane: does a pair turn by a token's time (0),
                   height (1) or width (2)? All three are one number in a text.
    """

    def __init__(self, config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64, device="cpu") / config.rotary_dim
        inv_freq = 1.0 / (config.rope_theta**exponents)  # radians a position: [rotary_dim / 2]
        factor = 1.0  # cosines and sines are multiplied by it (YaRN's attention factor)
        if config.rope_scaling["rope_type"] != "default" or "divisors" in config.rope_scaling:
            from nanovllm.features.positions.rope_frequencies import scale_frequencies

            inv_freq, factor = scale_frequencies(inv_freq, config)
        table = torch.empty(2, max_len, len(inv_freq), dtype=dtype, device="cpu")
        # Slice by slice: the float64 numbers of all positions would take ten times the table's memory.
        for start in range(0, max_len, POSITIONS_AT_ONCE):
            end = min(start + POSITIONS_AT_ONCE, max_len)
            positions = torch.arange(start, end, dtype=torch.float32, device="cpu")
            angles = (positions[:, None] * inv_freq.float()).double()  # [end - start, rotary_dim / 2]
            table[0, start:end] = angles.cos() * factor
            table[1, start:end] = angles.sin() * factor
        self.table = table.to(device)
        self.axis_of_pair: Tensor | None = None
        if config.images is not None and config.images.mrope_section:
            self.axis_of_pair = torch.tensor(config.images.axes(len(inv_freq)), device=device, dtype=torch.int64)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for positions [T] or [3, T], each [T, rotary_dim / 2]. The layers of a step share them."""
        if positions.dim() == 1:
            cos, sin = self.table[:, positions]
            return cos, sin
        pair_positions = positions[self.axis_of_pair].T.contiguous()  # [T, rotary_dim / 2]
        cos, sin = self.table[:, pair_positions, torch.arange(pair_positions.shape[1], device=pair_positions.device)]
        return cos, sin
