"""A vision tower on the engine's C kernels: same bits with any number of threads, and faster (chapter 10).

transformers' modules stay as they are but for three kinds: linear layers (and convolutions that cut an image into
patches, which are products, too) read reordered weights, attention reads keys that lie as a KV pool's do, and an
activation is computed in one pass. PyTorch does the rest, which gives the same with any number of threads.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanovllm.worker.batch import Batch
from nanovllm.worker.c_calls import FLOAT, INT, PTR, address, args_of
from nanovllm.worker.cpu.c_kernels import BIDIRECTIONAL_ROWS, AttentionStep
from nanovllm.worker.kernels import Kernels

NAME = "nanovllm"  # of attention here, among those that transformers knows
BLOCK_MULTIPLE = 64  # an image's keys fill one block, of a multiple of so many slots


class ActivationArgs(ctypes.Structure):
    """activation_args of activations.c."""

    _fields_ = (("num_rows", INT), ("x", PTR), ("size", INT), *args_of(FLOAT, "linear cubic"))


# x * sigmoid(linear * x + cubic * x^3), by the class of transformers or PyTorch. GELU as tanh computes it (arXiv:
# 1606.08415) is one, for (1 + tanh(u)) / 2 = sigmoid(2u).
GELU_TANH = 2 * math.sqrt(2 / math.pi)
ACTIVATIONS = {
    "GELUTanh": (GELU_TANH, GELU_TANH * 0.044715),
    "NewGELUActivation": (GELU_TANH, GELU_TANH * 0.044715),
    "QuickGELUActivation": (1.702, 0.0),
    "SiLUActivation": (1.0, 0.0),
    "SiLU": (1.0, 0.0),
}


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Let a tower compute with these kernels, which are for the size of its heads and bidirectional."""
    library = kernels.load_wing(Path(__file__).with_name("activations.c"), {"activate": ActivationArgs})
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            setattr(module, name, _replaced(part, kernels, library))
        module.tower_attention = BidirectionalAttention(kernels)  # type: ignore[assignment]
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    model.config.vision_config._attn_implementation = NAME  # type: ignore[union-attr]


def _replaced(module: nn.Module, kernels: Kernels, library: Any) -> nn.Module:
    """What computes the same in C, or the module itself."""
    if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
        weight = module.weight.flatten(1)
        is_product = isinstance(module, nn.Linear) or _cuts_into_patches(module)
        reordered = kernels.reorder_weight(weight) if is_product else None
        if reordered is not None:
            kernel_size = () if isinstance(module, nn.Linear) else module.kernel_size
            return TowerLinear(reordered, module.bias, kernel_size, kernels)
    if type(module).__name__ in ACTIVATIONS and library is not None:
        return Activation(*ACTIVATIONS[type(module).__name__], kernels, library)
    if isinstance(module, nn.GELU):
        return OneThread(module)
    return module


def _cuts_into_patches(module: nn.Conv2d | nn.Conv3d) -> bool:
    """Does each number of the image belong to one patch?"""
    has_padding = module.padding != "valid" and any(module.padding)
    return (
        module.kernel_size == module.stride and not has_padding and set(module.dilation) == {1} and module.groups == 1
    )


class TowerLinear(nn.Module):
    """A linear layer, or a convolution whose patches lie side by side: the same product for each of them.

    kernel_size: of the convolution; () of a linear layer.
    """

    def __init__(self, reordered: Tensor, bias: Tensor | None, kernel_size: tuple[int, ...], kernels: Kernels) -> None:
        super().__init__()
        self.weight = reordered  # transformers' code asks for its dtype
        self.bias = bias
        self.kernel_size = kernel_size
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        num_dims = len(self.kernel_size)
        for dim, size in enumerate(self.kernel_size, start=2):
            x = x.unfold(dim, size, size)  # [N, channels, patches of each dimension ..., numbers of each ...]
        if num_dims:
            x = x.movedim(1, 1 + num_dims).flatten(1 + num_dims)  # [N, patches ..., numbers]
        out = self.kernels.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        out = out.view(*x.shape[:-1], -1)
        return out.movedim(-1, 1) if num_dims else out


class Activation(nn.Module):
    """x * sigmoid(linear * x + cubic * x^3), in place: x is what a linear layer has just made."""

    def __init__(self, linear: float, cubic: float, kernels: Kernels, library: Any) -> None:
        super().__init__()
        self.factors = linear, cubic
        self.kernels = kernels
        self.library = library

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        linear, cubic = self.factors
        args = ActivationArgs(
            num_rows=rows, x=address(x, self.kernels.dtype, x.shape), size=size, linear=linear, cubic=cubic
        )
        self.library.activate(args)
        return x


class OneThread(nn.Module):
    """An activation that PyTorch computes: the numbers that fill no vector are those at the end of a thread's share."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.module(x)
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True)
class BidirectionalAttention:
    """Attention in which every row of a picture sees all of its keys."""

    kernels: Kernels

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q, k and v: [pictures, heads, rows, head_dim]. mask: None, or [pictures, 1, rows, rows]: may it be seen?

        Returns [pictures, rows, heads, head_dim].
        """
        num, num_heads, num_rows, head_dim = q.shape
        block_size = -(-num_rows // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
        seen = None if mask is None else mask[:, 0, 0]  # a row that is padding is seen by none
        batch = batch_of(num, num_rows, block_size) if seen is None else batch_of_seen(seen, block_size)
        cache = q.new_empty(2, num, block_size, num_heads, head_dim)
        q, k, v = (rows_of(x) for x in (q, k, v))
        self.kernels.rotary_and_write(q, k, v, None, (cache[0], cache[1]), batch)
        return self.kernels.paged_attention(q, cache[0], cache[1], batch, 0).view(num, num_rows, num_heads, head_dim)


def rows_of(x: Tensor) -> Tensor:
    """[pictures * rows, heads, head_dim] of [pictures, heads, rows, head_dim]; the heads of a row lie together."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return rows if rows.stride()[1:] == (x.shape[3], 1) else rows.contiguous()


@lru_cache(maxsize=16)
def batch_of(num: int, num_rows: int, block_size: int) -> Batch:
    """So many pictures of so many rows, each with a block of its own."""
    return batch_of_seen(torch.ones(num, num_rows, dtype=torch.bool, device="cpu"), block_size)


def batch_of_seen(seen: Tensor, block_size: int) -> Batch:
    """The same where a row sees only some. seen: [pictures, rows]. Only these have a slot, one after another."""
    num, num_rows = seen.shape
    first_slots = torch.arange(num, device="cpu")[:, None] * block_size
    slots = torch.where(seen, first_slots + seen.cumsum(1) - 1, -1).flatten()
    num_keys = seen.sum(1).tolist()
    tasks = [
        (b * num_rows + i, min(BIDIRECTIONAL_ROWS, num_rows - i), b, num_keys[b])
        for b in range(num)
        for i in range(0, num_rows, BIDIRECTIONAL_ROWS)
    ]
    tables = torch.arange(num, dtype=torch.int32, device="cpu").view(num, 1)
    batch = Batch(
        input_ids=slots,
        positions=slots,
        slot_mapping=slots,
        cu_seqlens_q=torch.arange(num + 1, dtype=torch.int32, device="cpu") * num_rows,
        seqlens_k=torch.tensor(num_keys, dtype=torch.int32, device="cpu"),
        block_tables=tables,
        logits_rows=slots[:0],
        max_query_len=num_rows,
        max_key_len=max(num_keys),
    )
    batch.attn_metadata[AttentionStep] = AttentionStep.of_tasks(
        torch.tensor(tasks, dtype=torch.int64, device="cpu"), tables
    )
    return batch


def attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """In the form in which transformers' modules call attention."""
    assert scaling == q.shape[-1] ** -0.5, "the kernel's own scale"
    return module.tower_attention(q, k, v, attention_mask), None
