"""Matrix products by PyTorch's oneDNN, with weights that are laid out for it once (chapter 10).

PyTorch's compiler uses these private operators for weights that do not change.
"""

import torch
from torch import Tensor


def reorder_weight(weight: Tensor) -> Tensor | None:
    """See worker/kernels.py."""
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    except (RuntimeError, AttributeError):  # float16 needs a CPU that computes in it
        return None


def linear(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
