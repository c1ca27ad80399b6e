"""What hybrid layers compute, as functions that can be swapped: PyTorch's, or the C kernels' (chapters 10 and 16)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nanovllm.features.hybrid.delta_rule import add_gated, delta_net, multiply_by_gate
from nanovllm.worker.kernels import Kernels, made_once


@dataclass(frozen=True)
class HybridKernels:
    """See delta_rule.py."""

    delta_net: Callable[..., Tensor] = delta_net
    multiply_by_gate: Callable[[Tensor, Tensor], Tensor] = multiply_by_gate
    add_gated: Callable[[Tensor, Tensor, Tensor], Tensor] = add_gated


@made_once
def kernels_for(kernels: Kernels) -> HybridKernels:
    if kernels.library is None:
        return HybridKernels()
    from nanovllm.features.hybrid.hybrid_c_kernels import in_c

    return HybridKernels(*in_c(kernels))
