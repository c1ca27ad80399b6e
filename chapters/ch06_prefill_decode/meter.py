"""The matrix products and the attention of a step, counted while the engine's decoder does them. Needs torch."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from chapters.ch06_prefill_decode.roofline import StepCost
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.layers import Linear, RotaryEmbedding, building
from nanovllm.worker.model import Attention, Decoder

BLOCK_SIZE = 16


class Meter:
    """Called by PyTorch after each module of the model. Adds up what the matrix products and the attention did."""

    def __init__(self) -> None:
        self.linear_flops = self.attention_flops = self.weight_bytes = self.kv_bytes = 0

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if isinstance(module, Linear):
            (num_rows, in_size), out_size = inputs[0].shape, sum(module.out_sizes)
            self.linear_flops += 2 * num_rows * in_size * out_size
            if num_rows:
                # A weight's numbers are as large as its input's; logits are larger, and the weight may be in any form.
                self.weight_bytes += in_size * out_size * inputs[0].element_size()
        elif isinstance(module, Attention):
            _, (k_cache, _), context = inputs
            for num_rows, num_keys in zip(context.batch.query_lens, context.batch.key_lens, strict=True):
                # The last row attends to all keys, each row before it to one fewer than the next.
                pairs = num_rows * num_keys - num_rows * (num_rows - 1) // 2
                self.attention_flops += 4 * pairs * module.num_heads * module.head_dim
                self.kv_bytes += num_keys * 2 * module.num_kv_heads * module.head_dim * k_cache.element_size()

    def cost(self) -> StepCost:
        return StepCost(**vars(self))


class PaperModel:
    """The engine's decoder without memory: a step has its shapes and no numbers, so any size is counted at once.

    Layers are those of a plain decoder of the config's sizes: attention and one MLP.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        config = replace(config, hybrid=None, pooling=None, expert_layers=frozenset())
        self.config = config
        self.device = torch.device("meta")
        with building(dtype, self.device):
            self.decoder = Decoder(config)
        kv_shape = 1, BLOCK_SIZE, config.num_key_value_heads, config.head_dim
        cache = torch.empty(kv_shape, dtype=dtype, device=self.device)
        self.rotary = RotaryEmbedding(config, 1, dtype, self.device)
        self.kv_cache: Any = SimpleNamespace(layers=[(cache, cache)] * config.num_hidden_layers)
        # What these two do to the cache is all that depends on its size; the meter counts attention by the batch.
        self.kernels = replace(TORCH_KERNELS, rotary_and_write=_write_nothing, paged_attention=_attend_to_nothing)

    def cost(self, chunks: list[ScheduledChunk]) -> StepCost:
        """Of a step with these chunks."""
        for chunk in chunks:
            chunk.seq.block_table = [0] * -(-chunk.end // BLOCK_SIZE)
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        batch = Batch.from_scheduler_output(SchedulerOutput(chunks, [], num_tokens), BLOCK_SIZE)
        tensors = {name: getattr(batch, name).to(self.device) for name in ("input_ids", "positions", "logits_rows")}
        meter = Meter()
        hook = register_module_forward_hook(meter)
        try:
            with torch.inference_mode():
                hidden = self.decoder(replace(batch, **tensors), self.rotary, self.kv_cache, self.kernels)
                self.decoder.logits(hidden)
        finally:
            hook.remove()
        return meter.cost()


def _write_nothing(*args: Any) -> None:
    pass


def _attend_to_nothing(q: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(q)
