"""Threads of a CPU: how many compute a step, and whose (chapter 10).

The C kernels run on the threads of cpu/pool.c, PyTorch's operations on those of its OpenMP runtime. These spin for
milliseconds after each operation, on cores that the pool and other programs could use. So a step runs on one kind only:
on the pool's threads, or, where PyTorch computes the matrix products, on PyTorch's.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

from nanovllm.files.system import ROOT, cgroup_folders
from nanovllm.worker.cpu.compiler import compile_library
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import Linear, plain_linear

QUOTA_FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}  # of each version of cgroups


@cache
def load_pool() -> ctypes.CDLL:
    """The one pool of this process. Raises what compile_library() raises."""
    pool = ctypes.CDLL(str(compile_library("pool.c", [])))
    pool.set_threads.argtypes = [ctypes.c_uint32, ctypes.c_void_p]
    pool.set_threads.restype = None
    pool.get_threads.argtypes = []
    pool.get_threads.restype = ctypes.c_uint32
    pool.set_threads(num_threads(), None)
    return pool


def num_threads() -> int:
    """As many as PyTorch would take (OMP_NUM_THREADS, torch.set_num_threads), but not more than there are CPUs.

    Not for use within a step, in which PyTorch may have only one: see num_pool_threads().
    """
    return min(torch.get_num_threads(), num_cpus())


def num_pool_threads() -> int:
    """How many threads compute a job of the C kernels now."""
    return load_pool().get_threads()


def num_cpus() -> int:
    """CPUs that this process may use: its affinity (taskset), or the CPU quota of its cgroup (containers) if less."""
    num_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_allowed, cgroup_quota(ROOT) or num_allowed)


@cache
def cgroup_quota(root: Path) -> int | None:
    """CPUs' worth of time that this process's cgroup, and those above it, grant; rounded up. None: no limit.

    root: of the file system.
    """
    quotas = []
    for version, folder in cgroup_folders("cpu", root):
        with suppress(OSError, ValueError):  # no such file; "max"
            text = " ".join((folder / file).read_text("utf-8") for file in QUOTA_FILES[version])
            quota, period = map(int, text.split())
            if quota > 0:  # -1: no limit
                quotas.append(-(-quota // period))
    return min(quotas, default=None)


@contextmanager
def pytorch_threads(number: int) -> Iterator[None]:
    """PyTorch computes with so many threads, whatever the program has told it."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    try:
        torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)


def step_threads(model: nn.Module, kernels: Kernels) -> Callable[[], AbstractContextManager]:
    """Makes what each step of this model runs in."""
    if kernels is TORCH_KERNELS:
        return nullcontext
    return partial(one_kind_of_threads, on_pytorchs=pytorch_multiplies(model))


def pytorch_multiplies(model: nn.Module) -> bool:
    """Whether a weight is left to PyTorch, where the kernels are C's: these multiply quantized ones, too."""
    products = {module.product for module in model.modules() if isinstance(module, Linear)}
    return not products.isdisjoint({plain_linear, TORCH_KERNELS.linear})


@contextmanager
def one_kind_of_threads(on_pytorchs: bool) -> Iterator[None]:
    """A step runs on PyTorch's threads, or on the pool's beside a single one of PyTorch's.

    On PyTorch's, the pool hands its jobs to their runtime: GOMP_parallel is how compiled OpenMP code begins one.
    """
    before = torch.get_num_threads()
    parallel = getattr(_openmp(), "GOMP_parallel", None) if on_pytorchs else None
    load_pool().set_threads(num_threads(), parallel)
    if on_pytorchs or not hasattr(_openmp(), "omp_set_num_threads"):
        yield
        return
    # Of this thread only: torch.set_num_threads() would change what other threads of the program get, too.
    try:
        _openmp().omp_set_num_threads(1)
        yield
    finally:
        _openmp().omp_set_num_threads(before)


@cache
def _openmp() -> ctypes.CDLL:
    """PyTorch's library; functions of what it is linked to, its OpenMP runtime among them, are found in it."""
    return ctypes.CDLL(torch._C.__file__)
