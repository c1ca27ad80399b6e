"""Our solutions to the exercises of chapter 9."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.parallel_layers import ParallelDecoder, RowParallelLinear


def row_parallel_forward(layer: RowParallelLinear, x: Tensor) -> Tensor:
    # Whatever every rank adds is in the sum once for each rank. So only one of them adds the bias.
    bias = layer.bias if layer.group.rank == 0 else None
    return layer.group.all_reduce(layer.product(x, layer.weight, bias))


def embed(decoder: ParallelDecoder, input_ids: Tensor) -> Tensor:
    num_words = decoder.config.vocab_size
    rows = input_ids - decoder.group.rank * num_words
    elsewhere = (rows < 0) | (rows >= num_words)
    x = F.embedding(rows.masked_fill(elsewhere, 0), decoder.embed_tokens)  # any row will do for other ranks' words
    return decoder.group.all_reduce(x.masked_fill(elsewhere[:, None], 0))


def read_share(part: Any, name: str, config: ModelConfig, rank: int, size: int) -> Tensor:
    layer, kind = name.split(".")[-2:]
    kv_rows = config.num_key_value_heads * config.head_dim
    merged = {
        "qkv_proj": {"q_proj": config.num_attention_heads * config.head_dim, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }
    if layer in merged:
        shares, first = [], 0
        for projection, num_rows in merged[layer].items():
            start, stop = _rows(projection, num_rows, config, rank, size)
            shares.append(part[first + start : first + stop])
            first += num_rows
        return torch.cat(shares)
    if layer in ("o_proj", "down_proj") and kind == "weight":
        num_columns = part.get_shape()[1] // size
        return part[:, rank * num_columns : (rank + 1) * num_columns]
    if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        start, stop = _rows(layer, part.get_shape()[0], config, rank, size)
        return part[start:stop]
    return part[:]


def _rows(layer: str, num_rows: int, config: ModelConfig, rank: int, size: int) -> tuple[int, int]:
    """The first row of a column-parallel layer that is this rank's, and the first row after its last."""
    if layer in ("k_proj", "v_proj"):
        num_heads = config.num_key_value_heads
        first_head, num_ours = rank * num_heads // size, max(1, num_heads // size)  # neighbors share if there are few
        return first_head * config.head_dim, (first_head + num_ours) * config.head_dim
    return rank * num_rows // size, (rank + 1) * num_rows // size
