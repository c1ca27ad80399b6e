"""The C kernels for CPUs, called through ctypes (chapter 10).

cpu/kernels.c is compiled for one dtype, cpu/heads.c for one head size and group size, too. Where there is no compiler,
or anything else fails, a warning says so and PyTorch's operations do the work.
"""

import ctypes
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.batch import Batch, cdiv
from nanovllm.worker.cpu.compiler import compile_library, pairs_pay
from nanovllm.worker.cpu.threads import load_pool, num_threads
from nanovllm.worker.kernels import Kernels, Tensors

logger = logging.getLogger("nanovllm")

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
TILE_ROWS = 16  # query rows that the attention kernel computes together
FEW_ROWS = 9  # of a sequence: computed one by one, as decodes are, they fill vectors better than in a tile
ITEMS_PER_THREAD = 4  # threads that are done early find another item
# Of a task's queries: a thread's stack holds four times as many, 2 MiB; on Windows, where it is smaller, half of one.
MAX_TILE_NUMBERS = 1 << (15 if sys.platform == "win32" else 17)

PTR, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def args_of(ctype: type, names: str) -> list[tuple[str, type]]:
    return [(name, ctype) for name in names.split()]


class NormArgs(ctypes.Structure):
    """norm_args of cpu/kernels.c. What a layer calls has such a struct, with the number of rows in front."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "out residual delta weight"),
        *args_of(INT, "num_heads row_stride head_stride size"),
        *args_of(FLOAT, "eps offset"),
    )


class SiluArgs(ctypes.Structure):
    """silu_args of cpu/kernels.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out gate_up"), ("size", INT))


class RotaryArgs(ctypes.Structure):
    """rotary_args of cpu/heads.c."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "q k v cos sin slots k_cache v_cache"),
        *args_of(INT, "q_stride k_stride v_stride block_stride num_kv_heads block_size"),
    )


class AttentionStep(ctypes.Structure):
    """attention_step of cpu/attention.h."""

    _fields_ = (*args_of(PTR, "tables tasks scratch"), *args_of(INT, "table_width num_tasks num_parts most_rows"))


class AttentionArgs(ctypes.Structure):
    """attention_args of cpu/attention.h."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "out q k_cache v_cache step"),
        *args_of(INT, "q_stride block_stride block_size num_kv_heads window"),
        ("scale", FLOAT),
    )


class ChoiceArgs(ctypes.Structure):
    """choice_args of cpu/rows.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "token_ids logits"), ("size", INT))


class LinearArgs(ctypes.Structure):
    """linear_args of cpu/linear.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out x weights bias ends"), *args_of(INT, "num_weights n k"))


SIGNATURES = {
    "add_rms_norm": NormArgs,
    "silu_and_mul": SiluArgs,
    "rotary_and_write": RotaryArgs,
    "linear": LinearArgs,
    "paged_attention": AttentionArgs,
    "most_likely": ChoiceArgs,
}
HEADS = "rotary_and_write", "paged_attention", "partial_bytes", "part_keys", "unit_size"  # of heads.c


def load_cpu_kernels(
    config: ModelConfig, dtype: torch.dtype, everywhere: bool = False, kv_int8: bool = False
) -> Kernels | None:
    """The kernels for this model, or None, with a warning that gives the reason, where they cannot be had.

    everywhere: results have the same bits on every processor. So no instructions for pairs or matrices of bf16, which
    some processors have: they are fast, and round in their own way. kv_int8: the KV cache holds codes of 8 bits
    (cpu/kv_cache.h).
    """
    group_size = group_of(config)
    of_dtype, of_heads = defines_of(config, dtype, everywhere, kv_int8)
    try:
        if TILE_ROWS * group_size * config.head_dim > MAX_TILE_NUMBERS:
            raise OSError(f"{group_size} query heads that share a KV head are too many for a thread's stack")
        sources, defines = ("kernels.c", "heads.c"), (of_dtype, of_dtype + of_heads)
        with ThreadPoolExecutor() as compilers:  # side by side: a first start takes 3 s instead of 4
            library, heads = (ctypes.CDLL(str(path)) for path in compilers.map(compile_library, sources, defines))
        for each in (library, heads):
            PTR.in_dll(each, "parallel_for").value = ctypes.cast(load_pool().parallel_for, PTR).value
        for name in HEADS:
            setattr(library, name, getattr(heads, name))
        for name, args in SIGNATURES.items():
            getattr(library, name).argtypes = [ctypes.POINTER(args)]
            getattr(library, name).restype = None
    # AttributeError, ValueError: the library is another one.
    except (OSError, subprocess.SubprocessError, AttributeError, ValueError) as error:
        silent = (
            f"the C compiler failed: {type(error).__name__}" if isinstance(error, subprocess.SubprocessError) else error
        )
        said = str(getattr(error, "stderr", None) or silent).strip()
        _warn_once(said.splitlines()[0] if said else type(error).__name__)
        return None
    for function in (library.partial_bytes, library.part_keys, library.unit_size, library.reordered_size):
        function.restype = INT
    library.reordered_size.argtypes = [INT, INT]
    library.bits_depend_on.restype = ctypes.c_char_p
    library.reorder_weight.argtypes = [PTR, PTR, INT, INT]
    return _wrap(library, config)


def group_of(config: ModelConfig) -> int:
    """Query heads that share a KV head."""
    return config.num_attention_heads // config.num_key_value_heads


def defines_of(
    config: ModelConfig, dtype: torch.dtype, everywhere: bool, kv_int8: bool = False
) -> tuple[list[str], list[str]]:
    """(what both files are compiled with for a model, what cpu/heads.c is compiled with besides)."""
    of_dtype = [f"-DTYPE_{TYPES[dtype]}"]
    if dtype == torch.bfloat16:
        of_dtype += ["-DEVERYWHERE"] * everywhere + ["-DNO_PAIRS"] * (everywhere or not pairs_pay())
    sizes = {"HEAD_DIM": config.head_dim, "GROUP": group_of(config), "TILE": TILE_ROWS}
    if config.rotary_dim != config.head_dim:
        sizes["ROTARY_DIM"] = config.rotary_dim
    return of_dtype, [f"-D{name}={size}" for name, size in sizes.items()] + ["-DKV_INT8"] * kv_int8


@cache
def _warn_once(reason: str) -> None:
    remedy = "CC names another compiler, enforce_eager=True needs none"
    logger.warning("C kernels are off, PyTorch's operations are used, which are slower: %s (%s)", reason, remedy)


def _wrap(lib: ctypes.CDLL, config: ModelConfig) -> Kernels:
    """The C functions behind the signatures of worker/kernels.py."""
    head_dim, num_kv_heads = config.head_dim, config.num_key_value_heads

    def add_rms_norm(
        hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0
    ) -> Tensors:
        normed, added = hidden.new_empty(hidden.shape), None if residual is None else hidden.data_ptr()
        residual = hidden if residual is None else residual
        pointers = normed.data_ptr(), residual.data_ptr(), added, weight.data_ptr()
        head_stride = residual.stride(1) if residual.dim() == 3 else 0
        sizes = hidden.shape[1:-1].numel(), residual.stride(0), head_stride, hidden.shape[-1]
        lib.add_rms_norm(NormArgs(hidden.shape[0], *pointers, *sizes, eps, offset))
        return normed, residual

    def silu_and_mul(gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        lib.silu_and_mul(SiluArgs(rows, out.data_ptr(), gate_up.data_ptr(), size))
        return out

    def rotary_and_write(
        q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensors | None, kv_layer: Tensors, batch: Batch
    ) -> None:
        k_cache, v_cache = kv_layer
        cos, sin = (None, None) if cos_sin is None else (x.data_ptr() for x in cos_sin)
        args = RotaryArgs(
            num_rows=q.shape[0], q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), cos=cos, sin=sin,
            slots=batch.slot_mapping.data_ptr(), k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(),
            q_stride=q.stride(0), k_stride=k.stride(0), v_stride=v.stride(0), block_stride=k_cache.stride(0),
            num_kv_heads=num_kv_heads, block_size=k_cache.shape[1],
        )  # fmt: skip
        lib.rotary_and_write(args)

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        out, step = q.new_empty(q.shape), attention_step(lib, num_kv_heads, batch)
        args = AttentionArgs(
            num_rows=q.shape[0], out=out.data_ptr(), q=q.data_ptr(),
            k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(), step=ctypes.addressof(step),
            q_stride=q.stride(0), block_stride=k_cache.stride(0), block_size=k_cache.shape[1],
            num_kv_heads=num_kv_heads, window=window, scale=head_dim**-0.5,
        )  # fmt: skip
        lib.paged_attention(args)
        return out

    def reorder_weight(weight: Tensor) -> Tensor | None:
        n, k = weight.shape
        reordered = weight.new_empty(lib.reordered_size(n, k))[: n * k].view(n, k)  # its memory is larger
        return reordered if lib.reorder_weight(reordered.data_ptr(), weight.data_ptr(), n, k) else None

    def linear(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
        return products(lib, x, PTR(reordered.data_ptr()), None, 1, bias, *reordered.shape)

    def most_likely(logits: Tensor) -> list[int]:
        token_ids = (INT * len(logits))()
        lib.most_likely(ChoiceArgs(len(logits), ctypes.addressof(token_ids), logits.data_ptr(), logits.shape[1]))
        return list(token_ids)

    own = add_rms_norm, silu_and_mul, rotary_and_write, paged_attention, reorder_weight, linear, most_likely
    return Kernels(*own, library=lib)


def products(
    lib: ctypes.CDLL, x: Tensor, weights: Any, ends: int | None, num_weights: int, bias: Tensor | None, n: int, k: int
) -> Tensor:
    """y = x W^T + b, [rows, n]. The rows up to ends[i] meet weights[i], the last weight meets the rest.

    weights: addresses of num_weights weights, as a ctypes object. ends: the address of as many numbers; None if one
    weight meets all rows.
    """
    x, out = x.contiguous(), x.new_empty(x.shape[0], n)
    pointers = out.data_ptr(), x.data_ptr(), ctypes.addressof(weights), None if bias is None else bias.data_ptr(), ends
    args = LinearArgs(x.shape[0], *pointers, num_weights, n, k)
    args.kept = weights  # as long as the arguments
    lib.linear(args)
    return out


def attention_step(lib: ctypes.CDLL, num_kv_heads: int, batch: Batch) -> AttentionStep:
    """What the layers of a step have in common, worked out by the first of them."""
    if "attention_step" not in batch.plans:
        (tasks, most_rows), tables = row_tiles(batch), batch.block_tables
        num_items, num_parts, scratch = len(tasks) * num_kv_heads, cdiv(batch.max_key_len, lib.part_keys()), None
        # Whether the parts of a row's keys are computed side by side or not, the result has the same bits.
        if num_parts == 1 or num_items >= ITEMS_PER_THREAD * num_threads():
            num_parts = 1
        else:
            scratch = torch.empty(num_items * num_parts * most_rows * lib.partial_bytes(), dtype=torch.uint8)
        pointers = (None if x is None else x.data_ptr() for x in (tables, tasks, scratch))
        step = AttentionStep(*pointers, tables.shape[1], len(tasks), num_parts, most_rows)
        step.kept = tables, tasks, scratch  # as long as the step
        batch.plans["attention_step"] = step
    return batch.plans["attention_step"]


def row_tiles(batch: Batch) -> tuple[Tensor, int]:
    """[tiles, 4]: first row, number of rows (TILE_ROWS at most), sequence, keys that the first row sees.

    And the largest of the numbers of rows.
    """
    if "row_tiles" not in batch.plans:
        tiles, row, most_rows = list[int](), 0, 0
        for b, (num_rows, num_keys) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
            size = TILE_ROWS if num_rows > FEW_ROWS else 1
            for i in range(0, num_rows, size):
                tiles += row + i, min(size, num_rows - i), b, num_keys - num_rows + i + 1
            row, most_rows = row + num_rows, max(most_rows, min(size, num_rows))
        batch.plans["row_tiles"] = torch.tensor(tiles, dtype=torch.int64).view(-1, 4), most_rows
    return batch.plans["row_tiles"]
