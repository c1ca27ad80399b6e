"""One decoder for Llama, Mistral, SmolLM3, Qwen2, Qwen3 and Qwen3-MoE (chapter 1).

They differ in what the checkpoint's config says: a bias on q, k and v (Qwen2), a norm on each query and key head
(Qwen3), tied embeddings, rotary scaling; and from layer to layer in how many keys a row sees (Mistral's sliding
window), whether q and k are rotated (not in some layers of SmolLM3), and whether there is one MLP or several experts
(Qwen3-MoE). Attribute names are those of the checkpoints, except that projections of the same input are merged into one
weight (Linear.projections). The layers of hybrid models, Qwen3-Next and Qwen3.5, are in features/hybrid.

On a CPU with a C compiler, most steps do not run this file. Its layers ran once while their calls of C functions were
recorded, and each step repeats those calls (cpu/recorded_step.py). With LLM(..., enforce_eager=True) every step runs
this code, in PyTorch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import Kernels, Pair
from nanovllm.worker.kv_cache import KVCache
from nanovllm.worker.layers import MLP, ForwardContext, Linear, OutputHead, RMSNorm, RotaryEmbedding, parameter


class Attention(nn.Module):
    """The first half of layer `index`: each row's query attends to the keys of its sequence so far.

    On a CPU a recorded step runs the C of the same functions; to see this run, say enforce_eager=True.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.window = config.windows.get(index, 0)
        self.has_rotary = index not in config.layers_without_rotary
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(
            in_size=config.hidden_size,
            out_sizes=(q_size, kv_size, kv_size),
            bias=config.qkv_bias,
            projections=("q_proj", "k_proj", "v_proj"),
        )
        self.o_proj = Linear(in_size=q_size, out_sizes=config.hidden_size, bias=config.o_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.norm_offset)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.norm_offset)

    def forward(self, hidden: Tensor, kv_layer: Pair, context: ForwardContext) -> Tensor:
        """hidden: normed, [T, hidden_size]. Returns what this half of the layer adds to the residual stream."""
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.out_sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))  # [T, num_heads, head_dim]
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))  # [T, num_kv_heads, head_dim]
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:  # both or neither
            q, _ = self.q_norm(q, None, context)
            k, _ = self.k_norm(k, None, context)
        # All K/V is written before attention reads: a row may see K/V that another sequence computes in this step.
        # q and k are rotated in place.
        cos_sin = context.cos_sin if self.has_rotary else None
        context.kernels.rotary_and_write(q, k, v, cos_sin, kv_layer, context.batch)
        k_cache, v_cache = kv_layer
        out = context.kernels.paged_attention(q, k_cache, v_cache, context.batch, self.window)
        return self.o_proj(out.flatten(1))  # [T, num_heads * head_dim] -> [T, hidden_size]


class DecoderLayer(nn.Module):
    """Layer `index` of the model: layers may differ in what they compute."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        make_attention = Attention if config.hybrid is None else config.hybrid.make_attention
        self.self_attn: nn.Module = make_attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.mlp = make_experts(config) if index in config.expert_layers else MLP(config)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, kv_layer: Pair, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Both tensors [T, hidden_size]. hidden: the output of the layer before, which the norm adds to residual."""
        hidden, residual = self.input_layernorm(hidden, residual, context)
        hidden = self.self_attn(hidden, kv_layer, context)
        hidden, residual = self.post_attention_layernorm(hidden, residual, context)
        return self.mlp(hidden, context), residual


def make_experts(config: ModelConfig) -> nn.Module:
    from nanovllm.features.experts.layer import Experts  # only models that have experts load it

    return Experts(config)


class Decoder(nn.Module):
    """The whole network. forward() makes hidden states of token ids, and logits() makes logits of these."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens: Any = parameter(config.vocab_size, config.hidden_size)
        # Reads embed_tokens; whoever reorders that replaces both.
        self.lookup: Callable[[Tensor, Any], Tensor] = F.embedding
        self.layers: Any = nn.ModuleList(self.make_layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        make_head = OutputHead if config.pooling is None else config.pooling.make_head
        self.lm_head: Any = make_head(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        return DecoderLayer(config, index)

    def forward(self, batch: Batch, rotary: RotaryEmbedding, kv_cache: KVCache, kernels: Kernels) -> Tensor:
        """Run one step, writing K/V. Returns [R, hidden_size], normed, of the rows whose logits are needed."""
        hidden = self.embed(batch.input_ids)  # [T, hidden_size]
        for part in batch.parts.values():
            hidden = part.after_embedding(hidden)
        residual: Any = None
        context = ForwardContext(batch, rotary.cos_sin(batch.positions), kernels)
        for index, (layer, kv_layer) in enumerate(zip(self.layers, kv_cache.layers, strict=True)):
            hidden, residual = layer(hidden, residual, kv_layer, context)
            for part in batch.parts.values():
                hidden = part.after_layer(index, hidden)
        rows = batch.logits_rows
        hidden, residual = self.norm(hidden[rows], residual[rows], context)
        # If the sum of a row's squares is infinite, the normed row is all zeros and looks sound. 0 * infinity is NaN.
        hidden[:, 0] += 0 * residual.float().square().sum(-1)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits, float32 [R, vocab_size]. hidden: [R, hidden_size]."""
        return self.lm_head(hidden)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T, hidden_size]"""
        return self.lookup(input_ids, self.embed_tokens)

    def linear_weights(self) -> Iterator[tuple[Linear, list[str]]]:
        """(layer, names in the checkpoint of what its weight is made of, one below the other) for each linear layer."""
        if isinstance(self.lm_head, Linear):  # not in a pooling model
            tied = self.config.tie_word_embeddings
            yield self.lm_head, ["model.embed_tokens.weight" if tied else "lm_head.weight"]
        for path, module in self.layers.named_modules(prefix="model.layers"):
            if isinstance(module, Linear):
                names = [f"{path.rpartition('.')[0]}.{name}.weight" for name in module.projections]
                yield module, names or [f"{path}.weight"]

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the checkpoint, where to read it to) for each tensor. A merged weight has a view for each part."""
        yield "model.embed_tokens.weight", self.embed_tokens
        yield "model.norm.weight", self.norm.weight
        if not self.config.tie_word_embeddings:
            yield from self.lm_head.named_parameters(prefix="lm_head")
        for path, module in self.layers.named_modules(prefix="model.layers"):  # "model.layers.0.mlp.gate_up_proj"
            for kind, tensor in module.named_parameters(recurse=False):  # "weight", "bias"
                if projections := getattr(module, "projections", ()):
                    for name, view in zip(projections, tensor.split(module.out_sizes), strict=True):
                        yield f"{path.rpartition('.')[0]}.{name}.{kind}", view
                else:
                    yield f"{path}.{kind}", tensor


class ModelPart:
    """What a wing keeps beside the model's weights (ModelRunner.parts). Each method does nothing unless a wing says
    otherwise.

    num_bytes        of its weights
    max_kept_bytes   of what it may come to keep on the device, and has not when a GPU's memory is measured
    """

    num_bytes = 0
    max_kept_bytes = 0

    @property
    def counts(self) -> dict[str, int]:
        """What it has done so far, for LLM.stats()."""
        return {}

    def begin_step(self, batch: Batch) -> None:
        """A step begins. It may change what its wing has put into batch.parts. batch: in the CPU's memory."""

    def forget(self) -> None:
        """Drop what the steps have left behind by which a GPU's memory was measured."""
