"""Weights in the order in which their matrix product reads them (chapter 10)."""

from collections.abc import Iterable

from torch import Tensor

from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import Linear
from nanovllm.worker.model import Decoder


def reorder_weight(layer: Linear, kernels: Kernels, parts: Iterable[tuple[int, Tensor]] | None = None) -> bool:
    """Lay a weight out once in the order in which its matrix product reads it. Returns whether that was possible.

    parts: of the weight, see Kernels.
    """
    for candidate in (kernels, TORCH_KERNELS):
        reordered = candidate.reorder_weight(layer.weight, layer.out_dtype, stays=True, parts=parts)
        if reordered is not None:
            del layer.weight  # no longer a parameter: only its own product can read it
            layer.weight = reordered
            layer.product = candidate.linear
            return True
    return False


def look_up_in_head(model: Decoder, kernels: Kernels) -> None:
    """Where the output head is the embedding table, too, have embeddings read from it in its new order."""
    if kernels.lookup is not None and model.lm_head.product is kernels.linear:
        del model.embed_tokens  # no longer a parameter: there is one matrix in memory, not two
        model.embed_tokens = model.lm_head.weight
        model.lookup = kernels.lookup
