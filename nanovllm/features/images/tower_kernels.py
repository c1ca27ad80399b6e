"""A vision tower on the engine's C kernels: the same bits with any number of threads (chapter 10).

transformers' modules stay as they are but for three kinds: linear layers (and convolutions that cut an image into
patches, which are products, too) read reordered weights, or weights of 8 bits (tower_bits.py), attention reads keys
that lie as a KV pool's do, and an activation is computed in one pass. PyTorch does the rest, which gives the same with
any number of threads.
"""

import ctypes
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanovllm.worker.batch import Batch, round_up
from nanovllm.worker.c_calls import FLOAT, INT, PTR, address, args_of
from nanovllm.worker.cpu.c_kernels import BIDIRECTIONAL_ROWS, AttentionStep
from nanovllm.worker.cpu.memory import REGION
from nanovllm.worker.cpu.threads import pytorch_threads
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
OTHER_ACTIVATIONS: tuple[Any, ...] = (
    nn.GELU,
    *(each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()),
)


def use_kernels(model: nn.Module, kernels: Kernels, quantization: str | None = None) -> None:
    """Let a tower compute with these kernels, which are for the size of its heads and bidirectional.

    quantization: "int8" for linear layers of 8 bits; None: all stay in the tower's dtype. Raises ValueError for numbers
    that are too large for 8 bits.
    """
    library = kernels.load_wing(Path(__file__).with_name("activations.c"), {"activate": ActivationArgs})
    for place, module in list(model.named_modules()):
        for name, part in list(module.named_children()):
            setattr(module, name, _replaced(f"{place}.{name}", part, kernels, library, quantization))
        module.tower_kernels = kernels  # attention() asks its module for them
    REGION.close()
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    model.config.vision_config._attn_implementation = NAME  # pyrefly: ignore[missing-attribute]


def _replaced(place: str, module: Any, kernels: Kernels, library: Any, quantization: str | None) -> nn.Module:
    """What computes the same in C, or the module itself. place: its name in the tower."""
    is_linear = type(module) is nn.Linear  # not a class derived from it, whose weight others may read
    if is_linear and quantization == "int8":
        from nanovllm.features.images.tower_bits import in_8_bits

        return in_8_bits(place, module, kernels)
    if is_linear or (isinstance(module, nn.Conv2d | nn.Conv3d) and _cuts_into_patches(module)):
        reordered = kernels.reorder_weight(module.weight.flatten(1))
        if reordered is not None:
            return TowerLinear(module, reordered, reordered.nbytes, kernels.linear)
    if type(module).__name__ in ACTIVATIONS and library is not None:
        return Activation(*ACTIVATIONS[type(module).__name__], kernels, library)
    if isinstance(module, OTHER_ACTIVATIONS):
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

    operand: its weight in the form that product(x, operand, bias) takes.
    """

    def __init__(self, module: Any, operand: Any, num_bytes: int, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = module.weight.new_empty(0)  # transformers' code asks for its dtype
        self.bias = module.bias
        self.kernel_size = module.kernel_size if isinstance(module, nn.Conv2d | nn.Conv3d) else ()
        self.operand = operand
        self.num_bytes = num_bytes
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        num_dims = len(self.kernel_size)
        for dim, size in enumerate(self.kernel_size, start=2):
            x = x.unfold(dim, size, size)  # [N, channels, patches of each dimension ..., numbers of each ...]
        if num_dims:
            x = x.movedim(1, 1 + num_dims).flatten(1 + num_dims)  # [N, patches ..., numbers]
        out = self.product(x.reshape(-1, x.shape[-1]), self.operand, self.bias)
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
        with pytorch_threads(1):
            return self.module(x)


def bidirectional_attention(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Every row of an image sees all of its keys, but for those that are padding.

    q, k and v: [images, heads, rows, head_dim]. mask: None, or [images, 1, rows, rows]: may it be seen? The same for
    all rows of an image. Returns [images, rows, heads, head_dim].
    """
    num, num_heads, num_rows, head_dim = q.shape
    block_size = round_up(num_rows, BLOCK_MULTIPLE)
    if mask is None:
        batch = batch_of(num, num_rows, block_size)
    else:
        assert torch.equal(mask, mask[:, :, :1].expand_as(mask)), "padding is hidden from every row"
        batch = batch_of_seen(mask[:, 0, 0], block_size)
    cache = q.new_empty(2, num, block_size, num_heads, head_dim)
    q, k, v = (rows_of(x) for x in (q, k, v))
    kernels.rotary_and_write(q, k, v, None, (cache[0], cache[1]), batch)
    return kernels.paged_attention(q, cache[0], cache[1], batch, 0).view(num, num_rows, num_heads, head_dim)


def rows_of(x: Tensor) -> Tensor:
    """[images * rows, heads, head_dim] of [images, heads, rows, head_dim]; the heads of a row lie together."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return rows if rows.stride()[1:] == (x.shape[3], 1) else rows.contiguous()


@lru_cache(maxsize=16)
def batch_of(num: int, num_rows: int, block_size: int) -> Batch:
    """So many images of so many rows, each with a block of its own."""
    return batch_of_seen(torch.ones(num, num_rows, dtype=torch.bool, device="cpu"), block_size)


def batch_of_seen(seen: Tensor, block_size: int) -> Batch:
    """The same where a row sees only some. seen: [images, rows]. Only these have a slot, one after another."""
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
    return bidirectional_attention(module.tower_kernels, q, k, v, attention_mask), None
