"""Matrix products by PyTorch's oneDNN, with weights that are laid out for it once (chapter 10).

PyTorch's compiler uses these private operators for weights that do not change.
"""

import torch
from torch import Tensor


def reorder_weight(weight: Tensor, out_dtype: torch.dtype | None = None, stays: bool = False) -> Tensor | None:
    """See worker/kernels.py."""
    if out_dtype not in (None, weight.dtype):  # the operator rounds what it computes
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    except (RuntimeError, AttributeError):  # float16 needs a CPU that computes in it
        return None


def linear(x: Tensor, reordered: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """See worker/kernels.py."""
    return torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
