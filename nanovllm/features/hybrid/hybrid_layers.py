"""The attention halves of a hybrid model's layers: Gated DeltaNet, and attention with a gate (chapter 16).

Gated DeltaNet (arXiv:2412.06464) keeps a matrix for each value head, whatever the length of the sequence. A token adds
what its key should give, less what it gives already, and reads with its query (delta_rule.py).
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.hybrid.hybrid_kernels import kernels_for
from nanovllm.worker.kernels import Pair
from nanovllm.worker.layers import ForwardContext, Linear, RMSNorm, parameter


def make_attention(config: ModelConfig, index: int) -> nn.Module:
    return GatedDeltaNet(config) if index in config.hybrid.linear_layers else GatedAttention(config)


class GatedAttention(nn.Module):
    """Attention whose query projection gives a gate, too: query and gate of a head lie side by side."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        projections = "q_proj", "k_proj", "v_proj"
        self.qkv_proj = Linear(config.hidden_size, (2 * q_size, kv_size, kv_size), config.qkv_bias, projections)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.norm_offset)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.norm_offset)

    def forward(self, hidden: Tensor, kv_layer: Pair, context: ForwardContext) -> Tensor:
        """See Attention.forward in worker/model.py."""
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.out_sizes, dim=-1)
        q, gate = q.unflatten(-1, (self.num_heads, 2 * self.head_dim)).split(self.head_dim, dim=-1)
        q, _ = self.q_norm(q, None, context)
        k, _ = self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.head_dim)), None, context)
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        context.kernels.rotary_and_write(q, k, v, context.cos_sin, kv_layer, context.batch)
        k_cache, v_cache = kv_layer
        out = context.kernels.paged_attention(q, k_cache, v_cache, context.batch, 0)
        return self.o_proj(kernels_for(context.kernels).multiply_by_gate(out, gate).flatten(1))


class Convolution(nn.Module):
    """Weights of a causal convolution over time, each channel by itself: [conv_size, kernel_size], float32."""

    projections = "conv_q", "conv_k", "conv_v"

    def __init__(self, out_sizes: tuple[int, ...], kernel_size: int) -> None:
        super().__init__()
        self.out_sizes = out_sizes
        self.weight = parameter(sum(out_sizes), kernel_size, dtype=torch.float32)


class GatedDeltaNet(nn.Module):
    """in_proj gives a row's queries, keys and values, which the convolution sees; z, which gates its output; b and a, a
    number for each value head: how much is written, how much is forgotten. Parameters of no product are float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.sizes = sizes = config.hybrid
        conv_sizes = sizes.key_size, sizes.key_size, sizes.value_size
        out_sizes = *conv_sizes, sizes.value_size, sizes.num_value_heads, sizes.num_value_heads
        projections = tuple(f"in_proj_{name}" for name in "qkvzba")
        self.in_proj = Linear(config.hidden_size, out_sizes, False, projections)
        self.conv = Convolution(conv_sizes, sizes.kernel_size)
        self.A_log = parameter(sizes.num_value_heads, dtype=torch.float32)
        self.dt_bias = parameter(sizes.num_value_heads, dtype=torch.float32)
        self.norm = RMSNorm(sizes.value_dim, config.rms_norm_eps)
        self.norm.weight = parameter(sizes.value_dim, dtype=torch.float32)
        self.out_proj = Linear(sizes.value_size, config.hidden_size, False)
        self.kernel_args: Any = None  # what a kernel makes of the small parameters, once

    def forward(self, hidden: Tensor, state_layer: tuple[Tensor, ...], context: ForwardContext) -> Tensor:
        """hidden: normed, [T, hidden_size]. state_layer: this layer's part of the state pool."""
        x = self.in_proj(hidden)
        return self.out_proj(kernels_for(context.kernels).delta_net(x, self, state_layer, context.batch))
