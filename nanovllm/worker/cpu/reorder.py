"""Weights in the order in which their matrix product reads them (chapter 10)."""

import torch.nn.functional as F
from torch import nn

from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import Linear


def reorder_weights(model: nn.Module, kernels: Kernels) -> None:
    """Lay every weight out once in the order in which its matrix product reads it. Quantized ones are already."""
    for layer in [module for module in model.modules() if isinstance(module, Linear) and module.product is F.linear]:
        for candidate in (kernels, TORCH_KERNELS):
            reordered = candidate.reorder_weight(layer.weight)
            if reordered is not None:
                del layer.weight  # no longer a parameter: only its own product can read it
                layer.weight, layer.product = reordered, candidate.linear
                break
