"""Weights in the order in which their matrix product reads them (chapter 10)."""

from torch import nn

from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import Linear, plain_linear


def reorder_weights(model: nn.Module, kernels: Kernels) -> None:
    """Lay every weight out once in the order in which its matrix product reads it. Quantized ones are already."""
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in [layer for layer in layers if layer.product is plain_linear]:
        for candidate in (kernels, TORCH_KERNELS):
            reordered = candidate.reorder_weight(layer.weight, layer.out_dtype)
            if reordered is not None:
                del layer.weight  # no longer a parameter: only its own product can read it
                layer.weight = reordered
                layer.product = candidate.linear
                break
