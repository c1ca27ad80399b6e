"""One decoder for Llama, Qwen2 and Qwen3 (chapter 1).

The three differ in what the checkpoint's config says: a bias on q, k and v (Qwen2), a norm on each query and key head
(Qwen3), tied embeddings, rotary scaling. Attribute names follow the checkpoints', with two exceptions: q, k and v
are packed into qkv_proj, gate and up into gate_up_proj. checkpoint_tensors() says where each tensor of a file goes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.batch import Batch
from nanovllm.worker.group import Group
from nanovllm.worker.kernels import Kernels, Tensors
from nanovllm.worker.kv_cache import KVCache
from nanovllm.worker.layers import Linear, RMSNorm, RotaryEmbedding


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.split_sizes = (q_size, kv_size, kv_size)
        self.qkv_proj = Linear(config.hidden_size, q_size + 2 * kv_size, config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias, group)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos_sin: Tensors, kv_layer: Tensors, batch: Batch, kernels: Kernels) -> Tensor:
        q, k, v = self.qkv_proj(x).split(self.split_sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))  # [T, num_heads, head_dim]
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))  # [T, num_kv_heads, head_dim]
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q = kernels.add_rms_norm(q.contiguous(), None, self.q_norm.weight, self.q_norm.eps)
            k = kernels.add_rms_norm(k.contiguous(), None, self.k_norm.weight, self.k_norm.eps)
        # All K/V of the step goes into the cache before any attention reads it: sequences of one step may share blocks.
        kernels.rotary_and_write(q, k, v, cos_sin, kv_layer, batch)
        return self.o_proj(kernels.paged_attention(q, *kv_layer, batch).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, group)

    def forward(self, x: Tensor, kernels: Kernels) -> Tensor:
        return self.down_proj(kernels.silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, group)

    def forward(
        self, x: Tensor, delta: Tensor | None, cos_sin: Tensors, kv_layer: Tensors, batch: Batch, kernels: Kernels
    ) -> Tensor:
        """x is the residual stream [T, hidden_size]; each half adds what the one before it has returned, `delta`."""
        norm = self.input_layernorm
        delta = self.self_attn(kernels.add_rms_norm(x, delta, norm.weight, norm.eps), cos_sin, kv_layer, batch, kernels)
        norm = self.post_attention_layernorm
        return self.mlp(kernels.add_rms_norm(x, delta, norm.weight, norm.eps), kernels)


class Decoder(nn.Module):
    """The whole network: token ids in, logits of the wanted rows out.

    config has the sizes of this rank's share: of heads, of the MLP's columns, of the vocabulary (group.shard_config).
    """

    def __init__(self, config: ModelConfig, group: Group = Group()) -> None:
        super().__init__()
        self.config, self.group = config, group
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers: Any = nn.ModuleList(DecoderLayer(config, group) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens

    def forward(self, batch: Batch, rotary: RotaryEmbedding, kv_cache: KVCache, kernels: Kernels) -> Tensor:
        """Run one step, writing K/V. Returns logits [R, vocab_size] of batch.logits_rows (of all ranks on rank 0)."""
        x = self.embed(batch.input_ids)  # [T, hidden_size]
        cos_sin = rotary.lookup(batch.positions)
        delta: Any = None
        for layer, kv_layer in zip(self.layers, kv_cache.layers, strict=True):
            delta = layer(x, delta, cos_sin, kv_layer, batch, kernels)
        rows = batch.logits_rows
        x = kernels.add_rms_norm(x[rows], delta[rows], self.norm.weight, self.norm.eps)
        return self.group.gather(self.lm_head(x))

    def embed(self, input_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(input_ids, self.embed_tokens)
        rows = input_ids - self.group.rank * self.config.vocab_size
        elsewhere = (rows < 0) | (rows >= self.config.vocab_size)
        x = F.embedding(rows.masked_fill(elsewhere, 0), self.embed_tokens)
        return self.group.all_reduce(x.masked_fill(elsewhere[:, None], 0))

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the checkpoint, the place it is read into) for every tensor; packed weights give one view a part."""
        yield "model.embed_tokens.weight", self.embed_tokens
        yield "model.norm.weight", self.norm.weight
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head.weight
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{i}."
            for name, tensor in layer.named_parameters():
                parent, _, kind = name.rpartition(".")
                if parent == "self_attn.qkv_proj":
                    parts = zip(("q_proj", "k_proj", "v_proj"), tensor.split(layer.self_attn.split_sizes), strict=True)
                elif parent == "mlp.gate_up_proj":
                    parts = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
                else:
                    yield prefix + name, tensor
                    continue
                for part, view in parts:
                    yield f"{prefix}{parent.split('.')[0]}.{part}.{kind}", view
