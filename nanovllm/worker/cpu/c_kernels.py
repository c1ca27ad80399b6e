"""The C kernels for CPUs, called through ctypes (chapter 10).

cpu/kernels.c is compiled for one dtype, cpu/heads.c for one head size and group size, too. A wing's C is a library of
its own, compiled as kernels.c is when the wing is first used: load_wing(). Where there is no compiler, or anything else
fails, a warning says so and PyTorch's operations do the work.
"""

import ctypes
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.batch import Batch, cdiv, round_up
from nanovllm.worker.c_calls import FLOAT, INT, PTR, Recorder, address, address_or_null, args_of, out_address
from nanovllm.worker.cpu.compiler import compile_library, pairs_pay
from nanovllm.worker.cpu.memory import memory_for_weight
from nanovllm.worker.cpu.threads import load_pool, num_pool_threads
from nanovllm.worker.exact import log_of
from nanovllm.worker.kernels import Kernels, Pair
from nanovllm.worker.layers import Linear
from nanovllm.worker.sampler import SamplingBatch

logger = logging.getLogger("nanovllm")

CANNOT, NOT_FINITE = 0, 1  # what reorder_rows() of linear.c says
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
TASK_ROWS = 16  # query rows of a task of attention, at most: computed together
BIDIRECTIONAL_ROWS = 96  # the same for an image's patches, of which each head is a query head of its own
FEW_ROWS = 9  # of a sequence: computed one by one, as decodes are, they fill vectors better than in a tile
WHOLE_BLOCKS = 32  # columns: a multiple of linear.c's COLS, whatever the processor
ITEMS_PER_THREAD = 4  # threads that are done early find another item
MAX_SCRATCH_BYTES = 256 << 20  # of a step: what attention to the parts of long contexts leaves to be added up
TILE_K = 32  # of cpu/amx.h: numbers of a query, in a tile
# Of a task's queries, padded to whole tiles: a thread's stack holds four times as many, 2 MiB, or eight times where
# cpu/attention_amx.c computes; on Windows, where it is smaller, half of one.
MAX_TILE_NUMBERS = 1 << (15 if sys.platform == "win32" else 17)


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
    """attention_step of cpu/attention.h: what the layers of a step share."""

    _fields_ = (*args_of(PTR, "tables tasks scratch"), *args_of(INT, "table_width num_tasks num_parts most_rows"))

    @classmethod
    def build(cls, batch: Batch, lib: ctypes.CDLL, num_kv_heads: int) -> "AttentionStep":
        tasks, most_rows = tasks_of(batch)
        tables = batch.block_tables
        num_items = len(tasks) * num_kv_heads
        num_parts = cdiv(batch.max_key_len, lib.part_keys())
        num_bytes = num_items * num_parts * most_rows * lib.partial_bytes()
        scratch = None
        # Whether the parts of a row's keys are computed side by side or not, the result has the same bits.
        if num_parts == 1 or num_items >= ITEMS_PER_THREAD * num_pool_threads() or num_bytes > MAX_SCRATCH_BYTES:
            num_parts = 1
        else:
            scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return cls.of_tasks(tasks, tables, scratch, num_parts=num_parts, most_rows=most_rows)

    @classmethod
    def of_tasks(
        cls, tasks: Tensor, tables: Tensor, scratch: Tensor | None = None, *, num_parts: int = 1, most_rows: int = 0
    ) -> "AttentionStep":
        """tasks: as tasks_of() makes them. tables: a batch's. most_rows: used with several parts only."""
        step = cls(
            tables=address(tables, torch.int32, tables.shape),
            tasks=address(tasks, torch.int64, (len(tasks), 4)),
            scratch=None if scratch is None else address(scratch, torch.uint8, scratch.shape),
            table_width=tables.shape[1], num_tasks=len(tasks), num_parts=num_parts, most_rows=most_rows,
        )  # fmt: skip
        step.kept = tables, tasks, scratch  # as long as the step
        return step


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


class DrawArgs(ctypes.Structure):
    """draw_args of cpu/sampling.c."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "token_ids logits rows temperature top_k top_p log_min_p noise"),
        ("size", INT),
    )


class GatherArgs(ctypes.Structure):
    """gather_args of cpu/rows.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out table rows"), ("size", INT))


class LinearArgs(ctypes.Structure):
    """linear_args of cpu/linear.c."""

    _fields_ = (
        ("num_rows", INT),
        *args_of(PTR, "out out_floats x weights bias ends order"),
        *args_of(INT, "num_weights n k gated"),
    )


SIGNATURES: dict[str, type[ctypes.Structure]] = {
    "add_rms_norm": NormArgs,
    "silu_and_mul": SiluArgs,
    "rotary_and_write": RotaryArgs,
    "linear": LinearArgs,
    "paged_attention": AttentionArgs,
    "most_likely": ChoiceArgs,
    "draw": DrawArgs,
    "gather_rows": GatherArgs,
    "gather_reordered": GatherArgs,
}
# What loading a library may raise. AttributeError, ValueError: it is another one.
FAILURES = (OSError, subprocess.SubprocessError, AttributeError, ValueError)
HEADS = "rotary_and_write", "paged_attention", "partial_bytes", "part_keys", "unit_size"  # of heads.c


def load_cpu_kernels(
    config: ModelConfig,
    dtype: torch.dtype,
    everywhere: bool = False,
    kv_int8: bool = False,
    bidirectional: bool = False,
) -> Kernels | None:
    """The kernels for this model, or None, with a warning that gives the reason, where they cannot be had.

    everywhere: results have the same bits on every processor. So no instructions for pairs or matrices of bf16, which
    some processors have: they are fast, and round in their own way. kv_int8: the KV cache holds codes of 8 bits
    (cpu/kv_cache.h). bidirectional: all rows of a task of attention see the same keys. Whoever asks for that makes the
    AttentionStep, of up to BIDIRECTIONAL_ROWS rows a task.
    """
    group_size = group_of(config)
    dtype_defines, head_defines = defines_of(config, dtype, everywhere, kv_int8, bidirectional)
    try:
        load_pool()
        if task_rows(bidirectional) * group_size * round_up(config.head_dim, TILE_K) > MAX_TILE_NUMBERS:
            raise OSError(f"{group_size} query heads that share a KV head are too many for a thread's stack")
        sources = ("kernels.c", "heads.c")
        defines = (dtype_defines, dtype_defines + head_defines)
        with ThreadPoolExecutor() as compilers:  # side by side: a first start takes 3 s instead of 4
            library, heads = compilers.map(load_library, sources, defines)
        for name in HEADS:  # from here on, the functions of both libraries are found in one
            setattr(library, name, getattr(heads, name))
        declare(library, SIGNATURES)
    except FAILURES as error:
        _warn_once(reason_of(error))
        return None
    for function in (library.partial_bytes, library.part_keys, library.unit_size, library.reordered_size):
        function.restype = INT
    library.reordered_size.argtypes = [INT, INT]
    library.bits_depend_on.restype = ctypes.c_char_p
    library.reorder_rows.argtypes = [PTR, PTR, INT, INT, INT]
    kernels = _wrap(library, config, dtype, torch.int8 if kv_int8 else dtype)
    return replace(kernels, load_wing=partial(load_wing, dtype_defines))


def load_library(source: str | Path, defines: list[str]) -> ctypes.CDLL:
    """A source file's library, which hands its work to the one pool of this process. Raises one of FAILURES."""
    library = ctypes.CDLL(str(compile_library(source, defines)))
    PTR.in_dll(library, "parallel_for").value = ctypes.cast(load_pool().parallel_for, PTR).value
    return library


def declare(library: ctypes.CDLL, signatures: dict[str, type[ctypes.Structure]]) -> None:
    """Say of functions that they take a pointer to such a struct, and return nothing."""
    for name, args in signatures.items():
        getattr(library, name).argtypes = [ctypes.POINTER(args)]
        getattr(library, name).restype = None


def load_wing(defines: list[str], source: Path, signatures: dict[str, type[ctypes.Structure]]) -> "ctypes.CDLL | None":
    """The library of a wing's C file: Kernels.load_wing() in worker/kernels.py. defines: those of kernels.c."""
    try:
        library = load_library(source, defines)
        declare(library, signatures)
    except FAILURES as error:
        _warn_once(reason_of(error))
        return None
    return library


def reason_of(error: BaseException) -> str:
    """One line that says why there are no C kernels."""
    is_compilers = isinstance(error, subprocess.SubprocessError)
    silent = f"the C compiler failed: {type(error).__name__}" if is_compilers else error
    lines = str(getattr(error, "stderr", None) or silent).strip().splitlines()
    # Above an error in a header, compilers say what included it.
    at_a_line = [line for line in lines if re.search(r":\d+: .*error:", line)]
    return [*at_a_line, *lines, type(error).__name__][0]


def group_of(config: ModelConfig) -> int:
    """Query heads that share a KV head."""
    return config.num_attention_heads // config.num_key_value_heads


def task_rows(bidirectional: bool) -> int:
    """Query rows of a task of attention, at most."""
    return BIDIRECTIONAL_ROWS if bidirectional else TASK_ROWS


def defines_of(
    config: ModelConfig, dtype: torch.dtype, everywhere: bool, kv_int8: bool = False, bidirectional: bool = False
) -> tuple[list[str], list[str]]:
    """(what both files are compiled with for a model, what cpu/heads.c is compiled with besides)."""
    dtype_defines = [f"-DTYPE_{TYPES[dtype]}"]
    if dtype == torch.bfloat16:
        dtype_defines += ["-DEVERYWHERE"] * everywhere + ["-DNO_PAIRS"] * (everywhere or not pairs_pay())
    sizes = {"HEAD_DIM": config.head_dim, "GROUP": group_of(config), "TASK_ROWS": task_rows(bidirectional)}
    if config.rotary_dim != config.head_dim:
        sizes["ROTARY_DIM"] = config.rotary_dim
    head_defines = [f"-D{name}={size}" for name, size in sizes.items()]
    head_defines += ["-DKV_INT8"] * kv_int8 + ["-DBIDIRECTIONAL"] * bidirectional
    head_defines += ["-DNO_PAIRS"] * (config.head_dim % 2)  # the last number of a head would be half a pair
    return dtype_defines, head_defines


@cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "C kernels are off, PyTorch's operations are used, which are slower: %s (CC names another compiler, "
        "XDG_CACHE_HOME another folder for what it makes, enforce_eager=True needs neither)",
        reason,
    )


def _wrap(lib: ctypes.CDLL, config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> Kernels:
    """The C functions behind the signatures of worker/kernels.py. dtype: in C it is called num (cpu/vectors.h)."""
    recorder = Recorder()
    head_dim, num_kv_heads = config.head_dim, config.num_key_value_heads
    kv_head_dim = head_dim + (2 if kv_dtype == torch.int8 else 0)  # the scale of a head's codes follows them

    def cache_addresses(k_cache: Tensor, v_cache: Tensor) -> dict[str, int]:
        shape = len(k_cache), k_cache.shape[1], num_kv_heads, kv_head_dim
        if k_cache.stride(0) != v_cache.stride(0):
            raise TypeError("a function in C reads keys and values whose blocks are equally far apart")
        return {"k_cache": address(k_cache, kv_dtype, shape, 1), "v_cache": address(v_cache, kv_dtype, shape, 1)}

    def add_rms_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Pair:
        shape, size = hidden.shape, hidden.shape[-1]
        normed = hidden.new_empty(shape)
        if residual is None:
            residual, delta, apart = hidden, None, len(shape) - 1
        else:  # both lie alike
            delta, apart = address(hidden, dtype, shape), 0
        args = NormArgs(
            num_rows=shape[0], out=address(normed, dtype, shape), residual=address(residual, dtype, shape, apart),
            delta=delta, weight=address(weight, dtype, (size,)), num_heads=shape[1:-1].numel(),
            row_stride=residual.stride(0), head_stride=residual.stride(1) if len(shape) == 3 else 0, size=size,
            eps=eps, offset=offset,
        )  # fmt: skip
        recorder.call(lib.add_rms_norm, args)
        return normed, residual

    def silu_and_mul(gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        args = SiluArgs(
            num_rows=rows, out=address(out, dtype, (rows, size)),
            gate_up=address(gate_up, dtype, (rows, 2 * size)), size=size,
        )  # fmt: skip
        recorder.call(lib.silu_and_mul, args)
        return out

    def rotary_and_write(q: Tensor, k: Tensor, v: Tensor, cos_sin: Pair | None, kv_layer: Pair, batch: Batch) -> None:
        rows = len(q)
        k_cache, v_cache = kv_layer
        kv_shape = (rows, num_kv_heads, head_dim)
        cos = sin = None
        if cos_sin is not None:
            cos, sin = (address(x, dtype, (rows, config.rotary_dim // 2)) for x in cos_sin)
        args = RotaryArgs(
            num_rows=rows, q=address(q, dtype, (rows, config.num_attention_heads, head_dim), 1),
            k=address(k, dtype, kv_shape, 1), v=address(v, dtype, kv_shape, 1), cos=cos, sin=sin,
            slots=address(batch.slot_mapping, torch.int64, (rows,)), **cache_addresses(k_cache, v_cache),
            q_stride=q.stride(0), k_stride=k.stride(0), v_stride=v.stride(0), block_stride=k_cache.stride(0),
            num_kv_heads=num_kv_heads, block_size=k_cache.shape[1],
        )  # fmt: skip
        recorder.call(lib.rotary_and_write, args)

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        out = q.new_empty(q.shape)
        step = batch.metadata(AttentionStep, lib, num_kv_heads)
        shape = len(q), config.num_attention_heads, head_dim
        args = AttentionArgs(
            num_rows=len(q), out=address(out, dtype, shape), q=address(q, dtype, shape, 1),
            **cache_addresses(k_cache, v_cache), step=ctypes.addressof(step),
            q_stride=q.stride(0), block_stride=k_cache.stride(0), block_size=k_cache.shape[1],
            num_kv_heads=num_kv_heads, window=window, scale=head_dim**-0.5,
        )  # fmt: skip
        recorder.call(lib.paged_attention, args)
        return out

    def reorder_weight(
        weight: Tensor,
        out_dtype: torch.dtype | None = None,
        stays: bool = False,
        parts: Iterable[tuple[int, Tensor]] | None = None,
    ) -> Tensor | None:
        n, k = weight.shape
        room = lib.reordered_size(n, k)
        reordered = memory_for_weight(room, dtype) if stays else weight.new_empty(room)
        to = address(reordered, dtype, (room,))
        for first_row, rows in [(0, weight)] if parts is None else parts:
            done = lib.reorder_rows(to, address(rows, dtype, (len(rows), k)), first_row, len(rows), k)
            if done == CANNOT or (done == NOT_FINITE and parts is not None):
                return None
        return reordered[: n * k].view(n, k)

    def linear(
        x: Tensor, reordered: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None, gated: bool = False
    ) -> Tensor:
        n, k = reordered.shape
        weights = PTR(address(reordered, dtype, (n, k), room=lib.reordered_size(n, k)))
        return products(
            lib, recorder, dtype, x, weights=weights, ends=None, num_weights=1, bias=bias, n=n, k=k,
            out_dtype=out_dtype, gated=gated,
        )  # fmt: skip

    def gated_linear(x: Tensor, gate_up: Linear) -> Tensor:
        weight, bias = gate_up.weight, gate_up.bias
        if gate_up.product is linear and len(weight) // 2 % WHOLE_BLOCKS == 0:
            return linear(x, weight, bias, gated=True)
        return silu_and_mul(gate_up.product(x, weight, bias))

    def lookup(input_ids: Tensor, reordered: Tensor) -> Tensor:
        return gather(
            lib.gather_reordered, recorder, dtype, reordered, input_ids, room=lib.reordered_size(*reordered.shape)
        )

    def choose_tokens(logits: Tensor, batch: SamplingBatch) -> Tensor:
        num_rows, vocab_size = logits.shape
        num_drawn = len(batch.random_rows)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device="cpu")
        into = address(token_ids, torch.int64, (num_rows,))
        read = address(logits, torch.float32, (num_rows, vocab_size))
        if num_drawn < num_rows:
            recorder.call(lib.most_likely, ChoiceArgs(num_rows=num_rows, token_ids=into, logits=read, size=vocab_size))
        if num_drawn > 0:
            log_min_p = log_of(batch.min_p)
            args = DrawArgs(
                num_rows=num_drawn, token_ids=into, logits=read,
                rows=address(batch.random_rows, torch.int64, (num_drawn,)),
                temperature=address(batch.temperature, torch.float32, (num_drawn,)),
                top_k=address(batch.top_k, torch.int64, (num_drawn,)),
                top_p=address(batch.top_p, torch.float32, (num_drawn,)),
                log_min_p=address(log_min_p, torch.float32, (num_drawn,)),
                noise=address(batch.noise, torch.float64, (num_drawn,)), size=vocab_size,
            )  # fmt: skip
            recorder.call(lib.draw, args)
        return token_ids

    return Kernels(
        add_rms_norm=add_rms_norm,
        silu_and_mul=silu_and_mul,
        rotary_and_write=rotary_and_write,
        paged_attention=paged_attention,
        reorder_weight=reorder_weight,
        linear=linear,
        gated_linear=gated_linear,
        lookup=lookup,
        choose_tokens=choose_tokens,
        library=lib,
        dtype=dtype,
        recorder=recorder,
    )


def gather(
    function: Callable[[ctypes.Structure], None],
    recorder: Recorder,
    dtype: torch.dtype,
    table: Tensor,
    rows: Tensor,
    room: int = 0,
) -> Tensor:
    """Copies of these rows of a table: [len(rows), the table's width].

    function: gather_rows or gather_reordered of cpu/rows.c. dtype: of the library's numbers. room: numbers that the
    table has to have, where that is more than its shape says.
    """
    num_rows, size = len(rows), table.shape[1]
    out = table.new_empty(num_rows, size)
    args = GatherArgs(
        num_rows=num_rows, out=address(out, dtype, (num_rows, size)),
        table=address(table, dtype, (len(table), size), room=room),
        rows=address(rows, torch.int64, (num_rows,)), size=size,
    )  # fmt: skip
    args.kept = table, rows, out  # as long as the arguments
    recorder.call(function, args)
    return out


def products(
    lib: ctypes.CDLL,
    recorder: Recorder,
    dtype: torch.dtype,
    x: Tensor,
    *,
    weights: Any,
    ends: int | None,
    num_weights: int,
    bias: Tensor | None,
    n: int,
    k: int,
    order: int | None = None,
    out_dtype: torch.dtype | None = None,
    gated: bool = False,
) -> Tensor:
    """y = x W^T + b, [rows, n], or, gated, silu_and_mul(y), [rows, n // 2]. The rows up to ends[i] meet
    weights[order[i]], the last weight meets the rest.

    dtype: of the library's numbers. weights: addresses of num_weights weights, as a ctypes object. ends: the address of
    as many numbers; None if one weight meets all rows. order: the same; None: as they are. out_dtype: float32, or
    None: dtype.
    """
    x = x.contiguous()
    rows = len(x)
    out_size = n // 2 if gated else n
    out = x.new_empty(rows, out_size, dtype=out_dtype)
    args = LinearArgs(
        num_rows=rows, **out_address(out, dtype, (rows, out_size)), x=address(x, dtype, (rows, k)),
        weights=ctypes.addressof(weights), bias=address_or_null(bias, dtype, (n,)), ends=ends, order=order,
        num_weights=num_weights, n=out_size, k=k, gated=gated,
    )  # fmt: skip
    args.kept = weights  # as long as the arguments
    recorder.call(lib.linear, args)
    return out


def tasks_of(batch: Batch) -> tuple[Tensor, int]:
    """Of attention, [tasks, 4]: first row, number of rows (TASK_ROWS at most), sequence, keys that the first row sees.

    And the largest of the numbers of rows.
    """
    tasks: list[int] = []
    row = most_rows = 0
    for b, (num_rows, num_keys) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
        size = TASK_ROWS if num_rows > FEW_ROWS else 1
        for i in range(0, num_rows, size):
            tasks += row + i, min(size, num_rows - i), b, num_keys - num_rows + i + 1
        row += num_rows
        most_rows = max(most_rows, min(size, num_rows))
    return torch.tensor(tasks, dtype=torch.int64, device="cpu").view(-1, 4), most_rows
