"""The C kernels for CPUs, called through ctypes (chapter 10).

cpu/kernels.c is compiled for one dtype, head size and group size. Where there is no compiler, or anything else fails, a
warning says so and PyTorch's operations do the work.
"""

import ctypes
import logging
import subprocess
from functools import cache

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.batch import Batch, cdiv
from nanovllm.worker.cpu.compiler import compile_library
from nanovllm.worker.cpu.threads import load_pool, num_threads
from nanovllm.worker.kernels import Kernels, Tensors

logger = logging.getLogger("nanovllm")

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
TILE_ROWS = 16  # query rows that the attention kernel computes together
FEW_ROWS = 9  # of a sequence: computed one by one, as decodes are, they fill vectors better than in a tile
ITEMS_PER_THREAD = 4  # threads that are done early find another item
MAX_TILE_NUMBERS = 1 << 17  # of a task's queries: a thread's stack holds four times as many, 2 MiB

PTR, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def args_of(ctype: type, names: str) -> list[tuple[str, type]]:
    return [(name, ctype) for name in names.split()]


class RotaryArgs(ctypes.Structure):
    """rotary_args of cpu/kernels.c."""

    _fields_ = (
        *args_of(PTR, "q k v cos sin slots k_cache v_cache"),
        *args_of(INT, "q_stride k_stride v_stride block_stride num_rows num_kv_heads block_size"),
    )


class AttentionArgs(ctypes.Structure):
    """attention_args of cpu/attention.c."""

    _fields_ = (
        *args_of(PTR, "out q k_cache v_cache tables tasks scratch"),
        *args_of(INT, "q_stride block_stride block_size table_width num_tasks num_kv_heads num_parts most_rows window"),
        ("scale", FLOAT),
    )


class LinearArgs(ctypes.Structure):
    """linear_args of cpu/linear.c."""

    _fields_ = (*args_of(PTR, "out x weights bias ends"), *args_of(INT, "num_weights n k"))


SIGNATURES = {
    "add_rms_norm": [PTR, PTR, PTR, PTR, INT, INT, FLOAT],
    "silu_and_mul": [PTR, PTR, INT, INT],
    "rotary_and_write": [ctypes.POINTER(RotaryArgs)],
    "linear": [ctypes.POINTER(LinearArgs)],
    "paged_attention": [ctypes.POINTER(AttentionArgs)],
}


def load_cpu_kernels(config: ModelConfig, dtype: torch.dtype, in_pairs: bool = True) -> Kernels | None:
    """The kernels for this model, or None, with a warning that gives the reason, where they cannot be had.

    in_pairs: with the instructions of some processors that multiply and add two pairs of bf16. They are fast, and round
    in their own way: without them results have the same bits on every processor.
    """
    group_size = config.num_attention_heads // config.num_key_value_heads
    sizes = {"HEAD_DIM": config.head_dim, "GROUP": group_size, "TILE": TILE_ROWS}
    defines = [f"-DTYPE_{TYPES[dtype]}", *(f"-D{name}={size}" for name, size in sizes.items())]
    defines += [] if in_pairs or dtype != torch.bfloat16 else ["-DNO_PAIRS"]
    try:
        if TILE_ROWS * group_size * config.head_dim > MAX_TILE_NUMBERS:
            raise OSError(f"{group_size} query heads that share a KV head are too many for a thread's stack")
        library = ctypes.CDLL(str(compile_library("kernels.c", defines)))
        PTR.in_dll(library, "parallel_for").value = ctypes.cast(load_pool().parallel_for, PTR).value
        for name, types in SIGNATURES.items():
            getattr(library, name).argtypes = types
            getattr(library, name).restype = None
    # AttributeError, ValueError: the library is another one.
    except (OSError, subprocess.SubprocessError, AttributeError, ValueError) as error:
        silent = (
            f"the C compiler failed: {type(error).__name__}" if isinstance(error, subprocess.SubprocessError) else error
        )
        said = str(getattr(error, "stderr", None) or silent).strip()
        _warn_once(said.splitlines()[0] if said else type(error).__name__)
        return None
    for function in (library.partial_bytes, library.part_keys, library.unit_size, library.reordered_columns):
        function.restype = INT
    library.reordered_columns.argtypes = [INT]
    library.reorder_weight.argtypes = [PTR, PTR, INT, INT]
    return _wrap(library, config)


@cache
def _warn_once(reason: str) -> None:
    remedy = "CC names another compiler, enforce_eager=True needs none"
    logger.warning("C kernels are off, PyTorch's operations are used, which are slower: %s (%s)", reason, remedy)


def _wrap(lib: ctypes.CDLL, config: ModelConfig) -> Kernels:
    """The C functions behind the signatures of worker/kernels.py."""
    head_dim, num_kv_heads = config.head_dim, config.num_key_value_heads
    partial_bytes, part_keys, many_items = lib.partial_bytes(), lib.part_keys(), ITEMS_PER_THREAD * num_threads()
    scratch = torch.empty(0, dtype=torch.uint8)

    def add_rms_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensors:
        size, normed = hidden.shape[-1], torch.empty_like(hidden)
        added = None if residual is None else hidden.data_ptr()
        residual = hidden if residual is None else residual
        pointers = normed.data_ptr(), residual.data_ptr(), added, weight.data_ptr()
        lib.add_rms_norm(*pointers, hidden.numel() // size, size, eps)
        return normed, residual

    def silu_and_mul(gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        lib.silu_and_mul(out.data_ptr(), gate_up.data_ptr(), rows, size)
        return out

    def rotary_and_write(
        q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensors | None, kv_layer: Tensors, batch: Batch
    ) -> None:
        k_cache, v_cache = kv_layer
        cos, sin = (None, None) if cos_sin is None else (x.data_ptr() for x in cos_sin)
        args = RotaryArgs(
            q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), cos=cos, sin=sin,
            slots=batch.slot_mapping.data_ptr(), k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(),
            q_stride=q.stride(0), k_stride=k.stride(0), v_stride=v.stride(0), block_stride=k_cache.stride(0),
            num_rows=q.shape[0], num_kv_heads=num_kv_heads, block_size=k_cache.shape[1],
        )  # fmt: skip
        lib.rotary_and_write(args)

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        nonlocal scratch
        out = q.new_empty(q.shape)
        (tasks, most_rows), tables = row_tiles(batch), batch.block_tables
        num_items = len(tasks) * num_kv_heads
        # Whether the parts of a row's keys are computed side by side or not, the result has the same bits.
        num_parts = cdiv(batch.max_key_len, part_keys) if num_items < many_items else 1
        num_bytes = num_items * num_parts * most_rows * partial_bytes if num_parts > 1 else 0
        if len(scratch) < num_bytes:
            scratch = torch.empty(num_bytes, dtype=torch.uint8)
        args = AttentionArgs(
            out=out.data_ptr(), q=q.data_ptr(), k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(),
            tables=tables.data_ptr(), tasks=tasks.data_ptr(), scratch=scratch.data_ptr(),
            q_stride=q.stride(0), block_stride=k_cache.stride(0), block_size=k_cache.shape[1],
            table_width=tables.shape[1], num_tasks=len(tasks), num_kv_heads=num_kv_heads, num_parts=num_parts,
            most_rows=most_rows, window=window, scale=head_dim**-0.5,
        )  # fmt: skip
        lib.paged_attention(args)
        return out

    def reorder_weight(weight: Tensor) -> Tensor | None:
        n, k = weight.shape
        reordered = weight.new_empty(lib.reordered_columns(n), k)[:n]
        return reordered if lib.reorder_weight(reordered.data_ptr(), weight.data_ptr(), n, k) else None

    def linear(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
        weight, end = PTR(reordered.data_ptr()), INT(x.shape[0])
        return products(lib, x, ctypes.addressof(weight), ctypes.addressof(end), 1, bias, *reordered.shape)

    own = add_rms_norm, silu_and_mul, rotary_and_write, paged_attention, reorder_weight, linear
    return Kernels(*own, library=lib)


def products(
    lib: ctypes.CDLL, x: Tensor, weights: int, ends: int, num_weights: int, bias: Tensor | None, n: int, k: int
) -> Tensor:
    """y = x W^T + b, [rows, n]. The rows up to ends[i] meet weights[i]: addresses of num_weights numbers each."""
    x, out = x.contiguous(), x.new_empty(x.shape[0], n)
    bias_ptr = None if bias is None else bias.data_ptr()
    lib.linear(LinearArgs(out.data_ptr(), x.data_ptr(), weights, bias_ptr, ends, num_weights, n, k))
    return out


def row_tiles(batch: Batch) -> tuple[Tensor, int]:
    """[tiles, 4]: first row, number of rows (TILE_ROWS at most), sequence, keys that the first row sees.

    And the largest of the numbers of rows.
    """
    if "row_tiles" not in batch.plans:
        tiles, row = [], 0
        for b, (num_rows, num_keys) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
            size = TILE_ROWS if num_rows > FEW_ROWS else 1
            for i in range(0, num_rows, size):
                tiles.append((row + i, min(size, num_rows - i), b, num_keys - num_rows + i + 1))
            row += num_rows
        batch.plans["row_tiles"] = torch.tensor(tiles), max((tile[1] for tile in tiles), default=0)
    return batch.plans["row_tiles"]
