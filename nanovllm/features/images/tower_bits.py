"""LLM(tower_quantization="int8"): the tower's linear layers in 8 bits, as chapter 12 has them (Q8_0)."""

from torch import nn

from nanovllm.features.images.tower_kernels import TowerLinear
from nanovllm.features.quantization.convert import check_numbers
from nanovllm.features.quantization.formats import MergedWeight, QuantizedWeight, quantize_q8_0
from nanovllm.features.quantization.quantized_kernels import kernels_for
from nanovllm.worker.kernels import Kernels


def in_8_bits(name: str, linear: nn.Linear, kernels: Kernels) -> TowerLinear:
    """The same layer. name: in the tower, for errors. Raises ValueError for numbers that are too large."""
    weight = linear.weight.detach()
    check_numbers(f"{name}.weight", weight)
    quantized = QuantizedWeight.of(quantize_q8_0(weight))
    return TowerLinear(
        linear, MergedWeight([quantized]), quantized.blocks.nbytes, kernels_for(kernels).quantized_linear
    )
