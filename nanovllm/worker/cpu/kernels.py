"""The C kernels for CPUs, called through ctypes (chapter 10).

cpu/kernels.c is compiled for one dtype, head size and group size. Where there is no compiler, or anything else fails, a
warning says so and PyTorch's operations do the work.
"""

import ctypes
import logging
import subprocess
from functools import cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.lora.adapter_rows import AdapterRows, LoRAWeights, RowGroups, Weights
from nanovllm.features.quantization.formats import FORMATS, Q4_1, Groups, MergedWeight, in_groups
from nanovllm.worker.batch import FEW_ROWS, TILE_ROWS, Batch
from nanovllm.worker.cpu.compiler import compile_library
from nanovllm.worker.cpu.threads import load_pool, num_threads
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels, Tensors

logger = logging.getLogger("nanovllm")

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
PARTS_PER_THREAD = 4  # threads that are done early find another part
MAX_TILE_NUMBERS = 1 << 17  # of a task's queries: a thread's stack holds three times as many, 1.5 MiB

PTR, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _fields(ctype: type, names: str) -> list[tuple[str, type]]:
    return [(name, ctype) for name in names.split()]


class RotaryArgs(ctypes.Structure):
    """rotary_args of cpu/kernels.c."""

    _fields_ = (
        *_fields(PTR, "q k v cos sin slots k_cache v_cache"),
        *_fields(INT, "q_stride k_stride v_stride block_stride num_rows num_kv_heads block_size"),
    )


class AttentionArgs(ctypes.Structure):
    """attention_args of cpu/attention.c."""

    _fields_ = (
        *_fields(PTR, "out q k_cache v_cache tables tasks scratch"),
        *_fields(INT, "q_stride block_stride block_size table_width num_tasks num_kv_heads num_parts window"),
        ("scale", FLOAT),
    )


class LinearArgs(ctypes.Structure):
    """linear_args of cpu/linear.c."""

    _fields_ = (*_fields(PTR, "out x weights bias ends"), *_fields(INT, "num_weights n k"))


class AdapterArgs(ctypes.Structure):
    """adapter_args of cpu/adapters.c."""

    _fields_ = (
        *_fields(PTR, "y x a b ranks part_ends tasks"),
        *_fields(INT, "num_parts max_rank n k padded_k x_stride"),
    )


class QuantizedPart(ctypes.Structure):
    """quantized_part of cpu/quantized.c. format: its place in FORMATS."""

    _fields_ = (("blocks", PTR), *_fields(INT, "block_bytes format n"))


class QuantizedArgs(ctypes.Structure):
    """quantized_args of cpu/quantized.c."""

    _fields_ = (
        *_fields(PTR, "out x bias groups weights ends"),
        *_fields(INT, "num_weights num_parts num_blocks n k x_stride"),
    )


class SearchArgs(ctypes.Structure):
    """search_args of cpu/quantize.c."""

    _fields_ = (*_fields(PTR, "codes scales minimums weight importance"), *_fields(INT, "n k"))


SIGNATURES = {
    "add_rms_norm": [PTR, PTR, PTR, PTR, INT, INT, FLOAT],
    "silu_and_mul": [PTR, PTR, INT, INT],
    "rotary_and_write": [ctypes.POINTER(RotaryArgs)],
    "linear": [ctypes.POINTER(LinearArgs)],
    "paged_attention": [ctypes.POINTER(AttentionArgs)],
    "quantized_linear": [ctypes.POINTER(QuantizedArgs)],
    "add_adapters": [ctypes.POINTER(AdapterArgs), INT],
    "weighted_sum": [PTR, PTR, PTR, PTR, INT, INT, INT],
    "search_q4_1": [ctypes.POINTER(SearchArgs)],
}


def load_cpu_kernels(config: ModelConfig, dtype: torch.dtype) -> Kernels | None:
    """The kernels for this model, or None, with a warning that gives the reason, where they cannot be had."""
    group_size = config.num_attention_heads // config.num_key_value_heads
    sizes = {"HEAD_DIM": config.head_dim, "GROUP": group_size, "TILE": TILE_ROWS}
    defines = [f"-DTYPE_{TYPES[dtype]}", *(f"-D{name}={size}" for name, size in sizes.items())]
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
    library.partial_bytes.restype = library.x_groups_bytes.restype = INT
    library.x_groups_bytes.argtypes = [INT]
    library.reorder_weight.argtypes = [PTR, PTR, INT, INT]
    return _wrap(library, config)


@cache
def _warn_once(reason: str) -> None:
    remedy = "CC names another compiler, enforce_eager=True needs none"
    logger.warning("C kernels are off, PyTorch's operations are used, which are slower: %s (%s)", reason, remedy)


def _wrap(lib: ctypes.CDLL, config: ModelConfig) -> Kernels:
    """The C functions behind the signatures of worker/kernels.py."""
    head_dim, num_kv_heads = config.head_dim, config.num_key_value_heads
    partial_bytes, most_parts = lib.partial_bytes(), PARTS_PER_THREAD * num_threads()

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
        out = q.new_empty(q.shape)
        tasks, tables = batch.row_tiles, batch.block_tables
        num_tasks, scratch = tasks.shape[0], None
        # Sums depend on where they are cut in the last bits: a decode is cut alike with guesses and without.
        num_parts = max(1, most_parts // ((1 if num_tasks <= FEW_ROWS else num_tasks) * num_kv_heads))
        if num_parts > 1:
            scratch = torch.empty(num_tasks * num_kv_heads * num_parts * partial_bytes, dtype=torch.uint8)
        args = AttentionArgs(
            out=out.data_ptr(), q=q.data_ptr(), k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(),
            tables=tables.data_ptr(), tasks=tasks.data_ptr(), scratch=None if scratch is None else scratch.data_ptr(),
            q_stride=q.stride(0), block_stride=k_cache.stride(0), block_size=k_cache.shape[1],
            table_width=tables.shape[1], num_tasks=num_tasks, num_kv_heads=num_kv_heads, num_parts=num_parts,
            window=window, scale=head_dim**-0.5,
        )  # fmt: skip
        lib.paged_attention(args)
        return out

    def reorder_weight(weight: Tensor) -> Tensor | None:
        reordered = torch.empty_like(weight)
        return reordered if lib.reorder_weight(reordered.data_ptr(), weight.data_ptr(), *weight.shape) else None

    def linear(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
        weight, end = PTR(reordered.data_ptr()), INT(x.shape[0])
        return products(x, ctypes.addressof(weight), ctypes.addressof(end), 1, bias, *reordered.shape)

    def products(x: Tensor, weights: int, ends: int, num_weights: int, bias: Tensor | None, n: int, k: int) -> Tensor:
        x, out = x.contiguous(), x.new_empty(x.shape[0], n)
        bias_ptr = None if bias is None else bias.data_ptr()
        lib.linear(LinearArgs(out.data_ptr(), x.data_ptr(), weights, bias_ptr, ends, num_weights, n, k))
        return out

    scratch = torch.empty(0)

    def quantized_linear(x: Tensor, weight: MergedWeight, bias: Tensor | None) -> Tensor:
        parts, end = PTR(parts_of(weight)), INT(x.shape[0])
        return quantized_products(x, ctypes.addressof(parts), ctypes.addressof(end), 1, bias, weight)

    def quantized_products(
        x: Tensor, weights: int, ends: int, num_weights: int, bias: Tensor | None, alike: MergedWeight
    ) -> Tensor:
        """alike: a weight with the sizes of all of them."""
        nonlocal scratch
        parts, num_blocks, n = alike.kernel_args
        scratch_bytes = lib.x_groups_bytes(x.shape[1])
        if scratch.numel() < scratch_bytes:  # zeros: a tile computes with rows that nobody has written, too
            scratch = torch.zeros(scratch_bytes, dtype=torch.uint8)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty(x.shape[0], n)
        args = QuantizedArgs(
            out=out.data_ptr(), x=x.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            groups=scratch.data_ptr(), weights=weights, ends=ends, num_weights=num_weights, num_parts=len(parts),
            num_blocks=num_blocks, n=n, k=x.shape[1], x_stride=x.stride(0),
        )  # fmt: skip
        lib.quantized_linear(args)
        return out

    def grouped_linear(x: Tensor, weights: Weights, groups: RowGroups) -> Tensor:
        first = weights.linears[0]
        if first.product is not linear and first.product is not quantized_linear:
            return TORCH_KERNELS.grouped_linear(x, weights, groups)
        is_quantized = first.product is quantized_linear
        if weights.kernel_args is None:
            address_of = parts_of if is_quantized else Tensor.data_ptr
            weights.kernel_args = torch.tensor([address_of(layer.weight) for layer in weights.linears])
        met = weights.kernel_args[groups.met]
        pointers = met.data_ptr(), groups.ends.data_ptr(), len(met)
        if is_quantized:
            return quantized_products(x, *pointers, None, first.weight)
        return products(x, *pointers, None, *first.weight.shape)

    def weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        out = x.new_empty(len(places), x.shape[1])
        pointers = out.data_ptr(), x.data_ptr(), places.data_ptr(), weights.contiguous().data_ptr()
        lib.weighted_sum(*pointers, *places.shape, x.shape[1])
        return out

    def search_q4_1(weight: Tensor, importance: Tensor) -> Groups:
        k, groups = weight.shape[1], in_groups(weight).contiguous()
        n, num_groups, group_size = groups.shape
        importance = F.pad(importance, (0, -k % group_size))
        codes = torch.empty(n, num_groups, group_size // 2, dtype=torch.uint8)
        scales, minimums = torch.empty(2, n, num_groups)
        pointers = (x.data_ptr() for x in (codes, scales, minimums, groups, importance))
        lib.search_q4_1(SearchArgs(*pointers, n, num_groups * group_size))
        return Groups(Q4_1, k, codes, scales.half(), minimums.half())

    def add_adapters(y: Tensor, x: Tensor, rows: AdapterRows, weights: LoRAWeights) -> None:
        part_ends, x = (INT * len(weights.out_sizes))(*accumulate(weights.out_sizes)), x.contiguous()
        tensors = y, x, weights.a, weights.b, weights.ranks
        pointers = *(tensor.data_ptr() for tensor in tensors), ctypes.addressof(part_ends), rows.tiles.data_ptr()
        _, num_parts, max_rank, padded_k = weights.a.shape
        args = AdapterArgs(*pointers, num_parts, max_rank, y.shape[1], x.shape[1], padded_k, x.stride(0))
        lib.add_adapters(args, len(rows.tiles))

    for_all_weights = add_rms_norm, silu_and_mul, rotary_and_write, paged_attention, reorder_weight, linear
    return Kernels(*for_all_weights, quantized_linear, search_q4_1, grouped_linear, weighted_sum, add_adapters)


def parts_of(weight: MergedWeight) -> int:
    """Where the weight's parts lie, as C reads them; made once, with its number of blocks and of outputs."""
    if weight.kernel_args is None:
        formats = list(FORMATS.values())
        parts = [
            QuantizedPart(p.blocks.data_ptr(), p.blocks.stride(0), formats.index(p.format), p.shape[0])
            for p in weight.parts
        ]
        num_blocks = sum(len(p.blocks) for p in weight.parts)
        weight.kernel_args = (QuantizedPart * len(parts))(*parts), num_blocks, sum(p.n for p in parts)
    return ctypes.addressof(weight.kernel_args[0])
