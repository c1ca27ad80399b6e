"""Kernels: what a decoder layer computes, as functions that can be swapped (chapter 10).

The functions in this file are plain PyTorch, for any device, but for reorder_weight and linear: oneDNN, on a CPU.
cpu/c_kernels.py has the same in C, tested against them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.worker.attention import paged_attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.sampler import SamplingBatch, choose_tokens

Pair = tuple[Tensor, Tensor]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Kernels:
    """One implementation of each of these functions.

    Each function of the reference documents what it computes: most are below, paged_attention is in attention.py and
    choose_tokens in sampler.py. The reference has no value for these fields:

    lookup(input_ids, reordered) -> embeddings [T, k]
        Rows of a reordered weight: of an output head that is the embedding table, too. None: there is no such function.
    library, dtype, recorder
        The compiled C library, the dtype of its numbers, and the Recorder through which it is called (c_calls.py). None
        if PyTorch does the work.
    load_wing(source, signatures) -> library or None
        A wing's C file, compiled for the same dtype. signatures: {function: its struct of arguments}. None, after a
        warning, if that fails; then the wing computes in PyTorch.
    made
        What wings have made of these kernels: see made_once().
    """

    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float, float], Pair]
    silu_and_mul: Callable[[Tensor], Tensor]
    rotary_and_write: Callable[[Tensor, Tensor, Tensor, Pair | None, Pair, Batch], None]
    paged_attention: Callable[[Tensor, Tensor, Tensor, Batch, int], Tensor]
    reorder_weight: Callable[..., Tensor | None]
    linear: Callable[..., Tensor]
    gated_linear: Callable[[Tensor, Any], Tensor]
    choose_tokens: Callable[[Tensor, SamplingBatch], Tensor]
    lookup: Callable[[Tensor, Tensor], Tensor] | None = None
    library: Any = None
    dtype: Any = None
    recorder: Any = None
    load_wing: Callable[..., Any] = lambda source, signatures: None
    made: dict[Callable[["Kernels"], Any], Any] = field(default_factory=dict, init=False, repr=False, compare=False)


def made_once(make: Callable[[Kernels], Made]) -> Callable[[Kernels], Made]:
    """make(kernels), called once for each Kernels. The result is kept in them, so it goes when their engine goes."""

    def kept(kernels: Kernels) -> Made:
        if make not in kernels.made:
            kernels.made[make] = make(kernels)
        return kernels.made[make]

    return kept


def add_rms_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Pair:
    """Add hidden to residual, in residual's memory, and normalize the sum. Returns (normed, residual).

    normed is residual / rms(residual) * (offset + weight) over the last dimension (arXiv:1910.07467). residual: None:
    hidden takes its place. All are [T, size], or [T, heads, head_dim].
    """
    residual = hidden if residual is None else residual.add_(hidden)
    x = residual
    if offset:
        weight = weight.float() + offset
        x = residual.float()
    normed = F.rms_norm(x, weight.shape, weight, eps)
    return normed.to(hidden.dtype), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [T, size], for gate_up [T, 2 * size], of experts. What other layers need is gated_linear()."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_linear(x: Tensor, gate_up: Any) -> Tensor:
    """silu_and_mul(), [T, size], of the product of x with a GatedLinear's weight.

    In C, this is one pass if linear() multiplies, and size is a multiple of 32.
    """
    return silu_and_mul(gate_up.product(x, gate_up.weight, gate_up.bias))


def rotary_and_write(q: Tensor, k: Tensor, v: Tensor, cos_sin: Pair | None, kv_layer: Pair, batch: Batch) -> None:
    """Rotate q [T, num_heads, head_dim] and k [T, num_kv_heads, head_dim] in place, and store k and v.

    cos_sin: of rotary embedding (arXiv:2104.09864); None: nothing is rotated. k and v go to batch.slot_mapping, except
    where the slot is -1.
    """
    if cos_sin is not None:
        cos, sin = cos_sin
        rotate_heads(q, k, cos, sin)
    rows, slots = batch.written
    if rows is not None:
        k, v = k[rows], v[rows]
    for cache, new in zip(kv_layer, (k, v), strict=True):
        cache[slots // cache.shape[1], slots % cache.shape[1]] = new


def rotate_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate each head of q and k in place: its first 2 * cos.shape[1] numbers, which is all of them in most models."""
    for x in (q, k):
        x = x[..., : 2 * cos.shape[1]]
        x.copy_(rotate(x, cos, sin))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Number i of a head's first half and number i of its second are one pair. cos and sin: [T, half of x's last]."""
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


# PyTorch's oneDNN, with weights that are laid out for it once. PyTorch's compiler uses these private operators for
# weights that do not change; where there are none (on a GPU, in float16), a weight stays as it is.


def reorder_weight(
    weight: Tensor, out_dtype: torch.dtype | None = None, stays: bool = False, parts: Any = None
) -> Tensor | None:
    """The weight in the memory layout that linear() reads, made once; None if linear() can't take this weight.

    out_dtype: of linear(). stays: the weight is read in every step, so it may lie where that is fastest. parts: (first
    row, rows) one after another, if they are still in their files and weight has only the shape; then None, too, if a
    number is not finite.
    """
    if out_dtype not in (None, weight.dtype) or parts is not None:  # the operator rounds, and wants a weight as a whole
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    except (RuntimeError, AttributeError):  # float16 needs a CPU that computes in it
        return None


def linear(x: Tensor, reordered: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + b, [T, rows of W]. out_dtype: of the result, float32, or None for the dtype of x. See cpu/reorder.py."""
    return torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")


TORCH_KERNELS = Kernels(
    add_rms_norm=add_rms_norm,
    silu_and_mul=silu_and_mul,
    rotary_and_write=rotary_and_write,
    paged_attention=paged_attention,
    reorder_weight=reorder_weight,
    linear=linear,
    gated_linear=gated_linear,
    choose_tokens=choose_tokens,
)
