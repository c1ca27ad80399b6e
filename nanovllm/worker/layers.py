"""The parts of the decoder: norm, rotary embedding, linear layers (chapters 1, 9 and 10)."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.group import Group
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels


class RMSNorm(nn.Module):
    """Holds weight and eps; the computation is the kernels' add_rms_norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps


class Linear(nn.Module):
    """y = x W^T + b. Projections that read the same input are packed into one weight, one matrix product.

    Under tensor parallelism a rank holds some rows of the weight and gets those columns of y (column-parallel, after
    W^T). With a group, it holds some columns of the weight, for the columns of x that it has, and the ranks add up what
    they get (row-parallel).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, group: Group | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight: Tensor = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return self.product(x, self.weight, self.bias)
        return self.group.all_reduce(self.product(x, self.weight, self.bias if self.group.rank == 0 else None))


def reorder_weights(model: nn.Module, kernels: Kernels) -> None:
    """Lay every weight out the way its product reads it, once, instead of at each product."""
    for layer in [module for module in model.modules() if isinstance(module, Linear)]:
        for candidate in (kernels, TORCH_KERNELS):
            packed = candidate.pack_weight(layer.weight)
            if packed is not None:
                del layer.weight  # a parameter no more: it has a layout of its own
                layer.weight, layer.product = packed, candidate.linear
                break


class RotaryEmbedding:
    """Rotary position embedding (arXiv:2104.09864), with the scalings "default", "linear" and "llama3".

    The table of cosines and sines is made once for all positions; layers share what one step looks up in it.
    """

    def __init__(self, config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        inv_freq = _inverse_frequencies(config)  # [head_dim / 2]
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq  # [max_len, head_dim / 2]
        self.table = torch.stack([angles.cos(), angles.sin()]).to(dtype).to(device)

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for these positions, each [T, head_dim / 2]."""
        cos, sin = self.table[:, positions]
        return cos, sin


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling["rope_type"] == "default":
        return inv_freq
    if scaling["rope_type"] == "linear":
        return inv_freq / scaling["factor"]
    # llama3: long wavelengths are stretched by the factor, short ones stay, those between are blended.
    original_len = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original_len / (2 * math.pi / inv_freq)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretched, 1: as it was
    return (1 - kept) * inv_freq / scaling["factor"] + kept * inv_freq
