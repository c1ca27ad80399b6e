"""What biases cost keys of 8 bits (chapter 12).

A key is W x + b, and with kv_cache_dtype="int8" its numbers share a scale, which the largest of them sets. A bias many
times as large as W x sets it for all keys, and the rest of each key is rounded in steps of that size. But what tells
keys apart is W x: softmax does not notice what all scores have in common. So the rounding error counts relative to W x.

The cost grows with the square of the error. Of the demo model with such biases, K/V in 8 bits beside K/V in bf16, as
examples/perplexity.py --quantization none --kv-cache-dtype auto int8 --key-biases 0 10 30 100 measures it:

    bias               0        10        30       100
    error              -     1.7 %       5 %      17 %
    perplexity   +0.07 %   +0.17 %   +0.74 %   +9.37 %
"""

import logging
import math
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.files.tensor_files import WeightFiles

logger = logging.getLogger("nanovllm")

LARGEST_ERROR = 0.05  # that nobody is told of
NAMES = "self_attn.k_proj.weight", "self_attn.k_proj.bias", "input_layernorm.weight"


def warn_of_int8_keys(files: WeightFiles, config: ModelConfig) -> None:
    """Say so if biases cost a model's keys more than LARGEST_ERROR, the root mean square over layers and heads."""
    if not config.qkv_bias:
        return
    found: list[Tensor] = []
    for layer in range(config.num_hidden_layers):
        weight, bias, norm = (f"model.layers.{layer}.{name}" for name in NAMES)
        if bias in files.stored:  # not in every layer of a hybrid model
            found.append(relative_errors(files.read(weight), files.read(bias), files.read(norm), config))
    error = math.sqrt(torch.cat(found).square().mean()) if found else 0.0
    if error > LARGEST_ERROR:
        logger.warning(
            "int8 keys cost this model accuracy: beside large biases of k_proj the rest of a key is small, and its "
            "rounding error is %.0f %% (5 %% cost the demo model 0.7 %% of perplexity, 17 %% cost it 9 %%); "
            "kv_cache_dtype='auto' avoids it",
            100 * error,
        )


def relative_errors(weight: Any, bias: Tensor, norm: Tensor, config: ModelConfig) -> Tensor:
    """[num_kv_heads]: the rounding error that the bias causes, relative to W x, both as root mean squares.

    weight, bias: of k_proj. norm: the weight of the norm that makes x; the numbers of x are taken to be independent.
    """
    if not isinstance(weight, Tensor):
        weight = weight.dequantize()
    spread = (weight.float() * norm.float()).square().sum(1).view(-1, config.head_dim).mean(1).sqrt()
    heads = bias.float().view(-1, config.head_dim)
    rotated, plain = heads[:, : config.rotary_dim], heads[:, config.rotary_dim :]
    pairs = torch.hypot(*rotated.chunk(2, dim=1))  # a pair turns with its token's position
    largest = torch.cat((pairs, plain.abs()), dim=1).amax(1)
    return largest / 127 / math.sqrt(12) / spread
