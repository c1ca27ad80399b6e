"""Fewer bits for a model's weights, while they are read (chapter 12)."""

import logging
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import Linear, RowParallelLinear
from nanovllm.worker.model import Decoder
from nanovllm.worker.quantized import (
    FORMATS,
    GROUP_SIZE,
    Groups,
    MergedWeight,
    merge,
    quantize_q4_1,
    quantize_q8_0,
    quantized_lookup,
)

logger = logging.getLogger("nanovllm")

BYTES_PER_NUMBER: dict[str | None, float] = {"int8": 34 / 32, "int4": 22 / 32}  # at most
BYTES_PER_NUMBER |= {name: form.group_bytes / GROUP_SIZE for name, form in FORMATS.items()}
QUANTIZERS: dict[str, Callable[[Tensor], Groups]] = {"int8": quantize_q8_0, "int4": quantize_q4_1}


Read = Callable[[str], Tensor | Groups]  # this rank's share of a tensor of the checkpoint
EMBEDDINGS = "model.embed_tokens.weight"


def quantize_weights(
    model: Decoder, places: dict[str, Tensor], read: Read, quantization: str | None, kernels: Kernels
) -> None:
    """Give every linear layer a quantized weight and take out of places what has been read.

    What the file holds in groups is taken as it is. Without quantization, a layer of ordinary tensors only stays one,
    and an ordinary tensor that is merged with quantized ones is held as int8.
    places: {name in the checkpoint: where the tensor goes}.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    if not layers[0].weight.is_cpu:
        raise ValueError("weights of 8 and 4 bits are computed with on a CPU only; CUDA_VISIBLE_DEVICES= hides a GPU")
    for layer in layers:
        k, size = layer.weight.shape[1], model.group.size
        if isinstance(layer, RowParallelLinear) and size > 1 and k % GROUP_SIZE:
            share = f"{k} of the inputs of a layer, which is no multiple of the {GROUP_SIZE} that share a scale"
            raise ValueError(f"tensor_parallel_size={size} gives each rank {share}; choose another, or no quantization")
    for layer in layers:
        address = layer.weight.untyped_storage().data_ptr()
        names = [name for name, place in places.items() if place.untyped_storage().data_ptr() == address]
        stored = [read(name) for name in names]
        if quantization is None and all(isinstance(part, Tensor) for part in stored):
            continue
        parts = []
        for name, part in zip(names, stored, strict=True):
            groups = part if isinstance(part, Groups) else QUANTIZERS[quantization or "int8"](part)
            minimums = groups.scales if groups.minimums is None else groups.minimums
            if not (groups.scales.isfinite().all() and minimums.isfinite().all()):
                raise ValueError(f"{name} has numbers that are NaN, infinite or too large for a float16 scale")
            parts.append(groups)
        del layer.weight  # no longer a parameter
        layer.weight, layer.product = merge(parts), kernels.quantized_linear
        for name in names:
            del places[name]
    in_pytorch = kernels.quantized_linear is TORCH_KERNELS.quantized_linear
    if in_pytorch and model.group.rank == 0 and any(isinstance(layer.weight, MergedWeight) for layer in layers):
        logger.warning(
            "quantized weights without C kernels: each step restores all of them as float32; with one request it takes "
            "about 6 times as long as with bf16 weights, and 30 times as long as with C kernels"
        )


def take_embeddings(model: Decoder, places: dict[str, Tensor], read: Read, quantization: str | None) -> None:
    """The embedding table: an ordinary one is looked up in the checkpoint's file, for a step reads a few rows of it.

    One in groups is held so, once where the output head is the same tensor. An ordinary one of a file whose layers are
    quantized is left in places.
    """
    table, dtype = read(EMBEDDINGS), model.embed_tokens.dtype
    if quantization is None and isinstance(table, Tensor):
        return
    del model.embed_tokens  # no longer a parameter
    places.pop(EMBEDDINGS, None)
    if isinstance(table, Tensor):
        model.embed_tokens, model.lookup = table, lambda input_ids, table: F.embedding(input_ids, table).to(dtype)
    else:
        model.embed_tokens = model.lm_head.weight if model.config.tie_word_embeddings else merge([table])
        model.lookup = lambda input_ids, weight: quantized_lookup(input_ids, weight, dtype)
