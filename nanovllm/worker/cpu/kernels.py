"""The C kernels for CPUs: compiled at first use, called through ctypes (chapter 10).

The C compiler of the system makes a shared library of cpu/kernels.c, specialised for dtype, head size and group size,
in a fraction of a second; it is kept in the user's cache folder under a name that says source, flags and processor.
Where there is no compiler, or anything else fails, one log line says so and PyTorch's operations do the work.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import cache_folder
from nanovllm.worker.batch import TILE_ROWS, Batch
from nanovllm.worker.kernels import Kernels, Tensors

logger = logging.getLogger("nanovllm")

SOURCE = Path(__file__).with_name("kernels.c")
INCLUDED = [SOURCE.with_name("attention.c"), SOURCE.with_name("linear.c")]
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# Compiled with -ffast-math, but not linked with it: gcc would then add code that flushes denormals process-wide.
# -fno-tree-slp-vectorize: gcc 12 makes wrong code of short loops over _Float16 with it, and nothing gains from it.
COMPILE = ["-O3", "-march=native", "-ffast-math", "-fno-tree-slp-vectorize", "-fPIC", "-std=gnu11"]
if platform.machine() == "x86_64":
    COMPILE.append("-mprefer-vector-width=512")  # where there are vectors of 512 bits, gcc is shy of them
TASKS_PER_THREAD = 4
ALIGNMENT = 64  # of a vector in C

PTR, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "add_rms_norm": [PTR, PTR, PTR, PTR, INT, INT, FLOAT],
    "silu_and_mul": [PTR, PTR, INT, INT],
    "rotary_and_write": [PTR, INT, PTR, INT, PTR, INT, PTR, PTR, PTR, PTR, PTR, INT, INT, INT, INT],
    "linear": [PTR, PTR, PTR, PTR, INT, INT, INT],
    "paged_attention": [PTR, PTR, INT, PTR, PTR, PTR, INT, PTR, INT, INT, INT, INT, INT, FLOAT, PTR],
}


def load_cpu_kernels(config: ModelConfig, dtype: torch.dtype) -> Kernels | None:
    """The kernels for this model, or None (with the reason logged) where they cannot be had."""
    group_size = config.num_attention_heads // config.num_key_value_heads
    sizes = {"HEAD_DIM": config.head_dim, "GROUP": group_size, "TILE": TILE_ROWS}
    defines = [f"-DTYPE_{TYPES[dtype]}", *(f"-D{name}={size}" for name, size in sizes.items())]
    try:
        library = ctypes.CDLL(str(compile_library(defines)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.info("C kernels are off, PyTorch's operations are used: %s", str(reason).strip().splitlines()[0])
        return None
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes = types
        getattr(library, name).restype = None
    library.bytes_of_a_part.restype = INT
    library.reorder_weight.argtypes = [PTR, PTR, INT, INT]
    return _wrap(library, config)


def compile_library(defines: list[str]) -> Path:
    """Path of the shared library, made if need be. Two processes may make it at once: each renames a whole file."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler:
        raise OSError("there is no C compiler (cc)")
    sources = [path.read_text() for path in (SOURCE, *INCLUDED)]
    key = [*sources, compiler, *COMPILE, *defines, platform.machine(), _processor()]
    path = cache_folder() / "kernels" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for openmp in (["-fopenmp"], []):  # macOS's compiler has no OpenMP
            target, made = f"{folder}/kernels.o", f"{folder}/kernels.so"
            compile_command = [compiler, *COMPILE, *openmp, *defines, "-c", str(SOURCE), "-o", target]
            link_command = [compiler, "-shared", *openmp, target, "-o", made, "-lm"]
            try:
                for command in (compile_command, link_command):
                    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                break
            except subprocess.CalledProcessError:
                if not openmp:
                    raise
        os.replace(made, path)
    return path


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor()


def _wrap(lib: ctypes.CDLL, config: ModelConfig) -> Kernels:
    """The C functions behind the signatures of worker/kernels.py."""
    head_dim, num_kv_heads, num_threads = config.head_dim, config.num_key_value_heads, torch.get_num_threads()
    bytes_of_a_part = lib.bytes_of_a_part()

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

    def rotary_and_write(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensors, kv_layer: Tensors, batch: Batch) -> None:
        strided = (arg for x in (q, k, v) for arg in (x.data_ptr(), x.stride(0)))
        shape = kv_layer[0].shape[1], kv_layer[0].stride(0)
        rest = (*cos_sin, batch.slot_mapping, *kv_layer)
        lib.rotary_and_write(*strided, *(x.data_ptr() for x in rest), q.shape[0], num_kv_heads, *shape)

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        out = q.new_empty(q.shape)
        tasks, tables = batch.row_tiles, batch.block_tables
        num_tasks = len(tasks) * num_kv_heads
        splits = max(1, TASKS_PER_THREAD * num_threads // num_tasks)
        scratch = torch.empty(num_tasks * splits * bytes_of_a_part + ALIGNMENT, dtype=torch.uint8)
        aligned = -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
        queries = out.data_ptr(), q.data_ptr(), q.stride(0)
        caches = k_cache.data_ptr(), v_cache.data_ptr(), tables.data_ptr(), tables.shape[1]
        work = tasks.data_ptr(), len(tasks), num_kv_heads, k_cache.shape[1], k_cache.stride(0), splits
        lib.paged_attention(*queries, *caches, *work, head_dim**-0.5, aligned)
        return out

    def reorder_weight(weight: Tensor) -> Tensor | None:
        reordered = torch.empty_like(weight)
        return reordered if lib.reorder_weight(reordered.data_ptr(), weight.data_ptr(), *weight.shape) else None

    def linear(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
        x, out = x.contiguous(), x.new_empty(x.shape[0], reordered.shape[0])
        bias_ptr = None if bias is None else bias.data_ptr()
        lib.linear(out.data_ptr(), x.data_ptr(), reordered.data_ptr(), bias_ptr, x.shape[0], *reordered.shape)
        return out

    return Kernels(add_rms_norm, silu_and_mul, rotary_and_write, paged_attention, reorder_weight, linear)
