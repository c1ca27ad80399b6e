"""Fewer bits for a model's weights, while they are read (chapter 12)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from nanovllm.worker.kernels import Kernels
from nanovllm.worker.layers import Linear
from nanovllm.worker.model import Decoder
from nanovllm.worker.quantized import Groups, merge, quantize_q4_1, quantize_q8_0

BYTES_PER_NUMBER: dict[str | None, float] = {"int8": 34 / 32, "int4": 22 / 32}  # at most
QUANTIZERS: dict[str, Callable[[Tensor], Groups]] = {"int8": quantize_q8_0, "int4": quantize_q4_1}


def quantize_weights(
    model: Decoder, places: dict[str, Tensor], read: Callable[[str], Tensor], quantization: str, kernels: Kernels
) -> None:
    """Give every linear layer a quantized weight and take out of places what has been read.

    places: {name in the checkpoint: where the tensor goes}; read(name): this rank's share of it.
    """
    for layer in [module for module in model.modules() if isinstance(module, Linear)]:
        address = layer.weight.untyped_storage().data_ptr()
        names = [name for name, place in places.items() if place.untyped_storage().data_ptr() == address]
        parts = []
        for name in names:
            groups = QUANTIZERS[quantization](read(name))
            if not groups.scales.isfinite().all():
                raise ValueError(f"{name} has numbers that are NaN, infinite or too large for a float16 scale")
            parts.append(groups)
        del layer.weight  # no longer a parameter
        layer.weight, layer.product = merge(parts), kernels.quantized_linear
        for name in names:
            del places[name]


def map_embeddings(model: Decoder, table: Tensor) -> None:
    """Look embeddings up in the checkpoint's file: a step reads a few rows of it, so it need not be in memory."""
    dtype = model.embed_tokens.dtype
    del model.embed_tokens  # no longer a parameter
    model.embed_tokens, model.lookup = table, lambda input_ids, table: F.embedding(input_ids, table).to(dtype)
