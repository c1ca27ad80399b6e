"""A pretend GPU: a device written in Python that has a GPU's rules. What runs on CUDA is tested on it without a GPU.

    with pretend_gpu(total_bytes=1 << 30) as gpu:
        LLM(...)            # torch.cuda.is_available() is true, and the engine takes its CUDA path
        gpu.counts          # copies, launches, replays and waits so far

A tensor of the device is a PretendTensor: it holds a tensor in the CPU's memory that nobody else sees, and each
operation on it arrives at PretendGPU.launch(). It enforces what CUDA enforces:

1. All tensors of an operation lie on the device. Numbers, 0-dimensional tensors and indices may come from the CPU.
2. While a graph is recorded, nothing may wait for the device, copy from or to the host, or allocate memory in another
   thread; where the recording is "thread_local", other threads may. A replay runs the recorded operations on the memory
   that they were recorded with. Memory that has been freed since then holds garbage.
3. Memory is counted: torch.cuda.memory_allocated(), max_memory_allocated() and mem_get_info() tell the truth, and an
   allocation that does not fit raises an OutOfMemoryError.
4. A GPU before Ampere (capability below 8.0) multiplies nothing in bfloat16, and flash-attn refuses it. A program of a
   Triton kernel has no more shared memory than the GPU allows, and is launched on the thread's current device.
5. Copies in both directions, launched operations, replays and waits are counted (Counts).
6. PyTorch is the oldest that is admitted, unless a later one is asked for: its mm has no out_dtype.
7. After a fault (PretendGPU.fault) everything fails, as after an illegal access to memory.

New memory holds garbage (NaN in floats, -1 in integers). Triton's kernels run in Triton's interpreter; flash-attn is a
stand-in with the package's own checks (tests/worker/cuda/flash_attn_stand_in.py). There is one stream, and operations
have finished when they return: what a missing synchronization would break does not show here.
tests/worker/cuda/test_pretend_gpu.py compares the device with the CPU, operation by operation.
"""

import importlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import backend_registration

import nanovllm.worker.cuda
from nanovllm.worker.cuda import platform
from nanovllm.worker.cuda.platform import CUDAPlatform
from tests.worker.cuda.triton_interpreter import KERNELS, import_interpreted

aten = torch.ops.aten
NAME = "pretend"
ALIGNMENT = 512  # bytes: what CUDA's allocator rounds up to
GARBAGE = 0xFF

# Operations whose result's size depends on values: on CUDA the host waits for them.
WAITING = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.equal,
    aten.bincount, aten.repeat_interleave, aten._local_scalar_dense, aten.is_set_to, aten.multinomial,
}  # fmt: skip
UNINITIALISED = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.dot, aten.mv, aten.addmv}
SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (9, 0): 227 << 10}  # that a program may have
OLDEST_TORCH = 2, 6
COPIES = {aten.copy_, aten._to_copy, aten._copy_from}


def product_in_float32(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """torch.mm(a, b, out_dtype=), which PyTorch has for CUDA only: of halves, with the sums as they are."""
    assert a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16) and out_dtype == torch.float32
    return a.float() @ b.float()


NOT_ON_CPUS = {aten.mm.dtype: product_in_float32}


@dataclass
class Counts:
    """Since the last reset_counts().

    h2d, d2h     copies from the host to the device, and back
    syncs        times that the host waited for the device; a copy to the host is one of them
    launches     operations that were launched one by one: kernels, and copies inside the device
    replays      graphs that were replayed
    """

    h2d: int = 0
    d2h: int = 0
    syncs: int = 0
    launches: int = 0
    replays: int = 0


class Allocation:
    """Memory of the device, as long as a tensor lies in it. pool: of the graph during whose recording it was made."""

    def __init__(self, gpu: "PretendGPU", storage: torch.UntypedStorage, pool: "GraphPool | None") -> None:
        num_bytes = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        gpu.allocate(num_bytes, pool)
        self.is_recorded = Event()  # set when a graph reads or writes it
        weakref.finalize(self, gpu.free, storage, num_bytes, pool, self.is_recorded, gpu.life).atexit = False


class GraphPool:
    """Memory that graphs have to themselves. peak: its size, as what is freed during a recording is used again.

    stream: on which they are recorded. What is freed on one stream is not used again on another.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.stream: PretendStream | None = None


class PretendStream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None) -> None:
        self.index = GPU.current.index if device is None else torch.device(device).index


class CurrentDevice(threading.local):
    """Of a thread, as its index."""

    index = 0


class PretendTensor(Tensor):
    """A tensor of the device. inner: the same numbers in the CPU's memory."""

    inner: Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, inner: Tensor, allocation: Allocation) -> "PretendTensor":
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=f"{NAME}:0"
        )
        made.inner, made.allocation = inner, allocation
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return GPU.launch(func, args, kwargs or {})

    is_cuda = property(lambda self: True)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert a tensor of the pretend GPU to numpy; call .cpu() first")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **options: Any) -> str:
        return f"PretendTensor({list(self.shape)}, {self.dtype})"


class PretendGPU:
    """The one device there is. Its methods under "torch.cuda" answer what torch.cuda is asked."""

    def __init__(self) -> None:
        self.reset(1 << 30, (9, 0), OLDEST_TORCH)

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def reset(self, total_bytes: int, capability: tuple[int, int], torch_version: tuple[int, int]) -> None:
        self.capability, self.torch_version = capability, torch_version
        self.current = CurrentDevice()
        self.fault: str | None = None
        self.total_bytes, self.counts, self.life = total_bytes, Counts(), object()
        self.allocated = self.max_allocated = self.reserved = 0
        self.pools: weakref.WeakSet[GraphPool] = weakref.WeakSet()
        self.begun: tuple[PretendGraph, int, str] | None = None  # what is recorded, in which thread, which error mode
        self._live: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()

    def reset_counts(self) -> None:
        self.counts = Counts()

    # -- operations -----------------------------------------------------------------------------------------------

    @property
    def recording(self) -> "PretendGraph | None":
        """The graph that this thread records."""
        return self.begun[0] if self.begun is not None and self.begun[1] == threading.get_ident() else None

    def launch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation: check the rules, compute it in the CPU's memory, and write it down if a graph is recorded."""
        if _is_composite(func):
            result = func.decompose(*args, **kwargs)  # in inference mode these arrive whole
            if result is not NotImplemented:
                return result
        packet = func.overloadpacket
        self.check_alive()
        if func is aten.mm.dtype and self.torch_version < (2, 8):
            raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")
        if packet in COPIES and (copied := self._copy(func, args, kwargs)) is not None:
            return copied
        if packet is aten._local_scalar_dense:
            self.read(f"a value was read ({func})")
            return func(args[0].inner)
        if packet in WAITING or (packet in INDEXED and any(_is_mask(i) for i in args[1])):
            self.wait(f"{func} waits for the device: its result's size depends on values")
        if packet in INDEXED:
            args = self._with_indices_here(args)
        self._check_devices(func, args, kwargs)
        if packet in PRODUCTS:
            self.check_dtypes(_tensors((args, kwargs)))
        inner_args, inner_kwargs = _each(_inner, (args, kwargs))
        if "device" in inner_kwargs:
            inner_kwargs["device"] = torch.device("cpu")
        shapes = [x.shape for x in _tensors(inner_args)]
        compute = NOT_ON_CPUS.get(func, func)
        result = compute(*inner_args, **inner_kwargs)
        assert shapes == [x.shape for x in _tensors(inner_args)], f"{func} has resized a tensor: not known here"
        if packet in UNINITIALISED:
            fill_with_garbage(result)
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cpu":
            return result
        if not _is_view(func):
            if self.recording is None:
                self.counts.launches += 1
            else:
                touched = _tensors((inner_args, result))
                self.note(lambda: replayed(compute, inner_args, inner_kwargs, result), touched)
        # A view is what it is a view of, in inference mode, too.
        is_normal = _is_view(func) and not args[0].is_inference()
        with torch.inference_mode(False) if is_normal else nullcontext():
            return self._wrap(result, args)

    def kernel(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A kernel that is no operation of PyTorch's: function, called with the tensors in the CPU's memory."""
        self.check_alive()
        self._check_devices(function, args, kwargs, is_kernel=True)
        inner_args, inner_kwargs = _each(_inner, (args, kwargs))
        result = function(*inner_args, **inner_kwargs)
        self.counts.launches += self.recording is None

        def again() -> None:
            found = function(*inner_args, **inner_kwargs)
            for old, new in zip(_tensors(result), _tensors(found), strict=True):
                old.copy_(new)

        self.note(again, _tensors((inner_args, result)))
        return self._wrap(result, args)

    def check_alive(self) -> None:
        if self.fault is not None:
            raise RuntimeError(self.fault)

    def check_current(self, index: int) -> None:
        if index != self.device.index:
            raise RuntimeError(f"what was launched on GPU {index} takes tensors of GPU {self.device.index}")

    def check_dtypes(self, tensors: list[Tensor]) -> None:
        """Of what is multiplied."""
        if self.capability < (8, 0) and any(x.dtype == torch.bfloat16 for x in tensors):
            raise RuntimeError(f"a GPU of capability {self.capability} multiplies nothing in bfloat16")

    def check_shared(self, num_bytes: int) -> None:
        limit = SHARED_BYTES[self.capability]
        if num_bytes > limit:
            raise RuntimeError(f"out of resource: shared memory, Required: {num_bytes}, Hardware limit: {limit}")

    def note(self, operation: Callable[[], None], tensors: list[Tensor]) -> None:
        """Write an operation down, if a graph is recorded. tensors: in the CPU's memory, all that it touches."""
        if self.recording is None:
            return
        self.recording.operations.append(operation)
        for tensor in tensors:
            allocation = self._live.get(tensor.untyped_storage()._cdata)
            if allocation is not None:
                allocation.is_recorded.set()

    def new(self, inner: Tensor) -> PretendTensor:
        """A tensor of the device that lies in this memory."""
        storage = inner.untyped_storage()
        allocation = self._live.get(storage._cdata)
        if allocation is None:
            pool = None if self.recording is None else self.recording.memory
            allocation = self._live[storage._cdata] = Allocation(self, storage, pool)
        return PretendTensor(inner, allocation)

    def _wrap(self, result: Any, args: Any) -> Any:
        """An operation's result; an argument that it has changed, or passed on, stays the same object."""
        same = {id(arg.inner): arg for arg in _tensors(args) if isinstance(arg, PretendTensor)}

        def wrapped(x: Any) -> Any:
            return (same[id(x)] if id(x) in same else self.new(x)) if isinstance(x, Tensor) else x

        return _each(wrapped, result)

    def _check_devices(self, func: Any, args: Any, kwargs: Any, is_kernel: bool = False) -> None:
        for x in _tensors((args, kwargs)):
            if not isinstance(x, PretendTensor) and (x.dim() > 0 or is_kernel):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and "
                    f"{x.device}! ({getattr(func, 'name', lambda: func)()}, {list(x.shape)})"
                )

    def _with_indices_here(self, args: Any) -> Any:
        """Indices in the CPU's memory are allowed; CUDA copies them, and waits."""

        def here(index: Tensor | None) -> Tensor | None:
            if index is None or isinstance(index, PretendTensor) or index.dim() == 0:
                return index
            return index.to(f"{NAME}:0")

        return (args[0], [here(index) for index in args[1]], *args[2:])

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A copy between host and device; None if it is none."""
        packet, source = func.overloadpacket, args[0]
        if packet is aten._to_copy:
            target_device = kwargs.get("device")
            to_host = target_device is not None and torch.device(target_device).type == "cpu"
            if not isinstance(source, PretendTensor) or not to_host:
                return None
            self.read("a tensor was copied to the host")
            options = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
            return aten._to_copy(source.inner, **options)
        target, source = (args[0], args[1]) if packet is aten.copy_ else (args[1], args[0])
        non_blocking = bool((args[2] if len(args) > 2 else False) or kwargs.get("non_blocking"))
        if isinstance(target, PretendTensor) and not isinstance(source, PretendTensor):
            self._refuse_while_recording("a tensor was copied from the host")
            self.counts.h2d += 1
            if not (non_blocking and self.is_pinned(source)):
                self.counts.syncs += 1
            aten.copy_(target.inner, source)
            return target
        if isinstance(source, PretendTensor) and not isinstance(target, PretendTensor):
            self.read("a tensor was copied to the host")
            aten.copy_(target, source.inner)
            return target
        return None

    def is_pinned(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in {storage._cdata for storage in self.pinned}

    def read(self, what: str) -> None:
        self.wait(what)
        self.counts.d2h += 1

    def wait(self, what: str) -> None:
        self._refuse_while_recording(what)
        self.counts.syncs += 1

    def _refuse_while_recording(self, what: str) -> None:
        self.check_alive()
        if self.recording is not None or (self.begun is not None and self.begun[2] == "global"):
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, pool: GraphPool | None) -> None:
        if self.recording is None and self.begun is not None and self.begun[2] == "global":
            raise RuntimeError("another thread has allocated memory while a graph is recorded")
        if num_bytes > self.total_bytes - self.allocated - self.bytes_of_pools():
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")
        if pool is None:
            self.allocated += num_bytes
            self.reserved = max(self.reserved, self.allocated)
        else:
            pool.live += num_bytes
            pool.peak = max(pool.peak, pool.live)
        self.max_allocated = max(self.max_allocated, self.memory_allocated())

    def free(
        self, storage: torch.UntypedStorage, num_bytes: int, pool: GraphPool | None, is_recorded: Event, life: object
    ) -> None:
        if life is not self.life:  # it was allocated before the last reset()
            return
        if pool is not None:
            pool.live -= num_bytes
            return
        self.allocated -= num_bytes
        if is_recorded.is_set():  # a graph will read it: by then it holds something else
            fill_with_garbage(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))

    def bytes_of_pools(self) -> int:
        return sum(pool.peak for pool in self.pools)

    # -- torch.cuda -----------------------------------------------------------------------------------------------

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocated + sum(pool.live for pool in self.pools)

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.max_allocated

    def memory_reserved(self, device: Any = None) -> int:
        return self.reserved + self.bytes_of_pools()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.max_allocated = self.memory_allocated()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.total_bytes - self.memory_reserved(), self.total_bytes

    def empty_cache(self) -> None:
        self._refuse_while_recording("the allocator's cache was emptied")
        self.reserved = self.allocated

    def synchronize(self, device: Any = None) -> None:
        self.wait("the host waited for the device")


class PretendGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.operations: list[Callable[[], None]] = []
        self.memory = GraphPool()

    def pool(self) -> GraphPool:
        return self.memory

    def replay(self) -> None:
        GPU._refuse_while_recording("a graph was replayed")
        GPU.counts.replays += 1
        for operation in self.operations:
            operation()


@contextmanager
def recording(
    graph: PretendGraph,
    pool: GraphPool | None = None,
    stream: PretendStream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """torch.cuda.graph."""
    assert GPU.begun is None, "one recording at a time"
    GPU.check_current(GPU.current.index if stream is None else stream.index)
    GPU.synchronize()
    if pool is None:
        graph.memory.stream = stream
    else:
        assert pool.stream is stream, "a pool's memory is not used again on another stream"
        graph.memory = pool
    GPU.pools.add(graph.memory)
    GPU.begun = graph, threading.get_ident(), capture_error_mode
    try:
        yield
    finally:
        GPU.begun = None


@contextmanager
def current_device(device: torch.device | int) -> Iterator[None]:
    """torch.cuda.device."""
    before = GPU.current.index
    set_device(device)
    try:
        yield
    finally:
        GPU.current.index = before


def set_device(device: torch.device | int) -> None:
    GPU.current.index = device if isinstance(device, int) else device.index


GPU = PretendGPU()


def replayed(func: Any, args: Any, kwargs: dict[str, Any], results: Any) -> None:
    """Compute an operation once more, into the memory of its first results."""
    found = func(*args, **kwargs)
    for part in _leaves(found):
        if isinstance(part, torch.ScriptObject):  # ranks exchange something: torch.distributed waits for it elsewhere
            torch._C._distributed_c10d.Work.unbox(part).wait()
    for old, new in zip(_tensors(results), _tensors(found), strict=True):
        if old is not new:
            old.copy_(new)


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, PretendTensor) else x


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in _leaves(tree) if isinstance(x, Tensor)]


# Arguments and results are nested tuples, lists and dicts. torch.utils._pytree knows more kinds, and takes most of an
# operation's time.


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(part)
    else:
        yield tree


def _each(function: Callable[[Any], Any], tree: Any) -> Any:
    """Such a tree of function(leaf) for each leaf."""
    if isinstance(tree, dict):
        return {key: _each(function, part) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_each(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@cache
def _is_composite(func: Any) -> bool:
    """Is it made of other operations?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@cache
def _is_view(func: Any) -> bool:
    """Does the operation compute nothing: is its result another look at its argument?"""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def fill_with_garbage(x: Tensor) -> None:
    if x.numel():
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(x.untyped_storage()).fill_(GARBAGE)


def _made(func: Any) -> Callable[..., PretendTensor]:
    """A function that makes a tensor, for a device of this name."""

    def make(*args: Any, **kwargs: Any) -> PretendTensor:
        device = kwargs.pop("device", None)
        assert torch.device(device).index in (None, 0), f"there is one pretend GPU, and no {device}"
        kwargs.pop("pin_memory", None)
        inner = func(*args, **kwargs, device="cpu")
        made = GPU.new(inner)  # raises where it does not fit
        if func.overloadpacket in UNINITIALISED:
            fill_with_garbage(inner)
        GPU.counts.launches += GPU.recording is None
        GPU.note(lambda: replayed(func, args, {**kwargs, "device": "cpu"}, inner), (inner,))
        return made

    return make


MAKERS = (
    "empty.memory_format empty_strided arange arange.start arange.start_step zeros ones full scalar_tensor eye linspace"
).split()


class _Module:
    """What PyTorch asks the module of a device, torch.pretend."""

    def __init__(self) -> None:
        self._is_in_bad_fork = lambda: False
        self.manual_seed_all = lambda seed: None
        self.get_rng_state = lambda device: torch.empty(0, dtype=torch.uint8)  # torch.random.fork_rng asks every device
        self.set_rng_state = lambda state, device: None
        self.is_available = lambda: True
        self.device_count = lambda: 1
        self.current_device = lambda: 0
        self.get_amp_supported_dtype = lambda: [torch.bfloat16]


def register() -> torch.library.Library:
    """Tell PyTorch of the device, once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    for name in MAKERS:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, _made(func), "PrivateUse1")
    library.impl("_copy_from", lambda *args: GPU.launch(aten._copy_from.default, args, {}), "PrivateUse1")
    return library


_library: torch.library.Library | None = None


class InterpretedKernel:
    """kernel[grid](...) of a Triton kernel that its interpreter runs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            GPU.check_current(GPU.current.index)
            if "BLOCK_N" in kwargs:  # it multiplies: tiles of q, and of K and V for each stage
                GPU.check_dtypes(_tensors(args))
                rows = kwargs["BLOCK_M"] + 2 * kwargs["BLOCK_N"] * kwargs["num_stages"]
                GPU.check_shared(rows * kwargs["BLOCK_D"] * args[1].element_size())
            self.kernel[grid](*args, **kwargs)

        return lambda *args, **kwargs: GPU.kernel(run, *args, **kwargs)


@cache
def interpreted_triton_kernels() -> ModuleType:
    made = import_interpreted()
    made._attention_kernel = InterpretedKernel(made._attention_kernel)
    made._write_kernel = InterpretedKernel(made._write_kernel)
    made.shared_bytes = lambda device: SHARED_BYTES[GPU.capability]  # which Triton's driver is asked for
    return made


def flash_attn() -> ModuleType:
    """A package of this name whose one function is the stand-in."""
    from tests.worker.cuda.flash_attn_stand_in import flash_attn_varlen_func

    made = ModuleType("flash_attn")
    made.__spec__ = ModuleSpec("flash_attn", None)

    def attend(*args: Any, **kwargs: Any) -> Any:
        assert GPU.capability >= (8, 0), "FlashAttention only supports Ampere GPUs or newer."
        return GPU.kernel(flash_attn_varlen_func, *args, **kwargs)

    made.flash_attn_varlen_func = attend
    return made


@contextmanager
def modules_replaced(modules: dict[str, Any]) -> Iterator[None]:
    """Meanwhile these are what is imported. What others import meanwhile stays (patch.dict would take it away)."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


class PretendPlatform(CUDAPlatform):
    """That of a GPU, on the pretend device."""

    def __init__(self) -> None:
        self.device = GPU.device


@contextmanager
def pretend_gpu(
    total_bytes: int = 1 << 30,
    with_flash_attn: bool = False,
    with_triton: bool = True,
    num_gpus: int = 1,
    capability: tuple[int, int] = (9, 0),
    torch_version: tuple[int, int] = OLDEST_TORCH,
) -> Iterator[PretendGPU]:
    """Meanwhile there is a GPU, with so much memory. num_gpus: as many are counted, for ranks; a process has one.

    with_triton: its interpreter takes a second to import. capability: (7, 5) is a T4, whose rules then hold.
    torch_version: what later ones have brought is not there.
    """
    global _library
    if _library is None:
        _library = register()
    GPU.reset(total_bytes, capability, torch_version)
    cuda = {
        "is_available": lambda: True, "device_count": lambda: num_gpus,
        "current_device": lambda: GPU.current.index, "set_device": set_device, "device": current_device,
        "Stream": PretendStream, "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: "a pretend GPU",
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="a pretend GPU", major=capability[0], minor=capability[1], total_memory=total_bytes,
            multi_processor_count=1,
        ), "CUDAGraph": PretendGraph, "graph": recording,
    }  # fmt: skip
    for name in ("memory_allocated max_memory_allocated memory_reserved reset_peak_memory_stats mem_get_info "
                 "empty_cache synchronize").split():  # fmt: skip
        cuda[name] = getattr(GPU, name)
    with ExitStack() as patches:
        for name, value in cuda.items():
            patches.enter_context(patch.object(torch.cuda, name, value))
        patches.enter_context(patch.object(platform, "CUDAPlatform", PretendPlatform))
        patches.enter_context(patch.object(Tensor, "pin_memory", pinned_copy))
        if torch_version < (2, 8):
            overloads = [name for name in aten.mm.overloads() if not name.startswith("dtype")]
            patches.enter_context(patch.object(aten.mm, "overloads", lambda: overloads))
        modules: dict[str, Any] = {"flash_attn": flash_attn() if with_flash_attn else None}
        if with_triton and importlib.util.find_spec("triton") is not None:
            modules[KERNELS] = interpreted_triton_kernels()
            patches.enter_context(patch.object(nanovllm.worker.cuda, "triton_kernels", modules[KERNELS], create=True))
        patches.enter_context(modules_replaced(modules))
        yield GPU


def pytest_configure(config: Any) -> None:
    """`pytest -p tests.pretend_gpu`: there is one as long as pytest runs. What asks for a real one runs on it."""
    torch.set_num_threads(1)  # tensors of tests are tiny: threads would only wait for each other
    stack = ExitStack()
    stack.enter_context(pretend_gpu())
    config.add_cleanup(stack.close)


def pinned_copy(x: Tensor, device: Any = None) -> Tensor:
    """Tensor.pin_memory()."""
    assert not isinstance(x, PretendTensor), "cannot pin a tensor of the device"
    copy = x.clone()
    GPU.pinned.add(copy.untyped_storage())
    return copy


def be_a_rank() -> None:
    """In a process that an engine starts for a rank: a pretend GPU as long as it lives, and gloo in NCCL's place."""
    import torch.distributed as dist

    pretending = pretend_gpu()
    pretending.__enter__()
    torch.cuda.set_device = lambda device: None  # there is one in this process
    join = dist.init_process_group
    dist.init_process_group = lambda backend, **options: join("gloo", **options)
    _kept.append(pretending)


_kept: list[Any] = []  # what is collected would end
