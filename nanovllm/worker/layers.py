"""The parts of the decoder: norm, rotary embedding, linear layers (chapters 1, 9 and 10)."""

import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.config import ModelConfig

logger = logging.getLogger("nanovllm")


class RMSNorm(nn.Module):
    """Holds weight and eps; the computation is the kernels' add_rms_norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps


class Linear(nn.Module):
    """y = x W^T + b. Projections that read the same input are packed into one weight, one matrix product."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reordered: Tensor | None = None

    def reorder(self) -> None:
        """Lay the weight out the way oneDNN reads it, once, instead of at every product. Raises where it can't.

        The operators are private ones of PyTorch (its compiler uses them for frozen weights).
        """
        self.reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.reordered is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.reordered, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def reorder_weights(model: nn.Module) -> None:
    """Reorder every linear layer, or say why not (float16 needs a CPU that computes in it)."""
    try:
        for layer in model.modules():
            if isinstance(layer, Linear):
                layer.reorder()
    except (RuntimeError, AttributeError) as error:
        logger.info("weights are not reordered for oneDNN: %s", str(error).splitlines()[0])


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
