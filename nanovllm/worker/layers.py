"""The parts of the decoder: norm, rotary embedding, linear layers, MLP (chapters 1, 9 and 10)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.group import Group
from nanovllm.features.positions.rope_frequencies import attention_factor, inverse_frequencies
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels, Tensors


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What every layer of one step gets alike. cos_sin: of the batch's positions, each [T, head_dim / 2]."""

    batch: Batch
    cos_sin: Tensors
    kernels: Kernels


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor, residual: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """(normed sum, sum) of hidden and residual. The sum takes residual's memory; None: there is nothing to add."""
        return context.kernels.add_rms_norm(hidden, residual, self.weight, self.eps)


class Linear(nn.Module):
    """y = x W^T + b. out_sizes: of the projections that are merged into the weight, all of the same input.

    Under tensor parallelism a rank holds some rows of the weight and computes those columns of y: column-parallel,
    named after W^T.
    """

    def __init__(self, in_size: int, out_sizes: int | tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.out_sizes = (out_sizes,) if isinstance(out_sizes, int) else out_sizes
        self.weight: Any = nn.Parameter(torch.empty(sum(self.out_sizes), in_size))
        self.bias = nn.Parameter(torch.empty(sum(self.out_sizes))) if bias else None
        self.product: Callable[[Tensor, Any, Tensor | None], Tensor] = F.linear  # the one that reads this weight

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class RowParallelLinear(Linear):
    """A rank holds some columns of the weight, for the columns of x that it has. The ranks add up what they get."""

    def __init__(self, in_size: int, out_size: int, bias: bool, group: Group) -> None:
        super().__init__(in_size, out_size, bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.group.rank == 0 else None  # once, not once a rank
        return self.group.all_reduce(self.product(x, self.weight, bias))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202). intermediate_size: of this rank's share."""

    def __init__(self, config: ModelConfig, intermediate_size: int, group: Group) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, (intermediate_size,) * 2, config.mlp_bias)
        self.down_proj = RowParallelLinear(intermediate_size, config.hidden_size, config.mlp_bias, group)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        return self.down_proj(context.kernels.silu_and_mul(self.gate_up_proj(hidden)))


def reorder_weights(model: nn.Module, kernels: Kernels) -> None:
    """Lay every weight out once in the order in which its matrix product reads it. Quantized ones are already."""
    for layer in [module for module in model.modules() if isinstance(module, Linear) and module.product is F.linear]:
        for candidate in (kernels, TORCH_KERNELS):
            reordered = candidate.reorder_weight(layer.weight)
            if reordered is not None:
                del layer.weight  # no longer a parameter: only its own product can read it
                layer.weight, layer.product = reordered, candidate.linear
                break


class RotaryEmbedding:
    """Rotary position embedding (arXiv:2104.09864), scaled as rope_frequencies.py knows it.

    The table of cosines and sines is made once for all positions; layers share what one step looks up in it.
    """

    def __init__(self, config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        inv_freq = inverse_frequencies(config)  # [head_dim / 2]
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq  # [max_len, head_dim / 2]
        factor = attention_factor(config.rope_scaling)
        self.table = (torch.stack([angles.cos(), angles.sin()]) * factor).to(dtype).to(device)

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for these positions, each [T, head_dim / 2]."""
        cos, sin = self.table[:, positions]
        return cos, sin
