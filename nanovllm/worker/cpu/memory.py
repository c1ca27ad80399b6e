"""Memory on a CPU: how much there is, and page faults out of the way (chapters 3 and 10).

The first access to a page costs more than computing with what is written to it: the system finds and clears the page,
and in a virtual machine the host does so once more.
"""

import ctypes
from contextlib import suppress
from threading import Lock, Thread

import torch
from torch import Tensor

from nanovllm.checks.exits import Worker, finish_at_exit
from nanovllm.files.system import available_bytes
from nanovllm.worker.c_calls import address
from nanovllm.worker.kv_cache import lazy_zeros

MAX_POOL_BYTES = 4 << 30
HUGE_PAGE = 2 << 20  # bytes
REGION_BYTES = 64 << 20
KEPT_BYTES = 16 << 20  # that loading may have freed before they go back to the system
ALIGNMENT = 64  # bytes: a line of the cache, and the longest vector
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
MAX_MMAP_THRESHOLD = 32 << 20


def free_bytes(utilization: float) -> int:
    """What the KV pool may take on a CPU: half of the available memory times `utilization`, 4 GiB at most."""
    return min(MAX_POOL_BYTES, int(available_bytes() * 0.5 * utilization))


class WeightRegion:
    """Memory of which the weights of a model take one piece after another, so that they share huge pages.

    Each piece keeps the memory around it alive. So does the region itself, until close().
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.left = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> Tensor:
        with self.lock:
            if num_bytes > len(self.left):
                size = max(num_bytes, REGION_BYTES)
                self.left = lazy_zeros((size,), torch.uint8, what="the weights", remedy="quantization takes fewer bits")
            taken = self.left[:num_bytes]
            self.left = self.left[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
            return taken

    def close(self) -> None:
        """A model has all its weights: its memory goes with them, whatever comes next."""
        with self.lock:
            self.left = torch.empty(0, dtype=torch.uint8, device="cpu")


REGION = WeightRegion()


def memory_for_weight(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros [size] for a weight that every step reads from front to back.

    In huge pages, which a processor reads faster: it looks up 2 MiB at a time where they are, not 4 KiB, and asks for
    what comes next across the borders of small pages.
    """
    return REGION.take(size * dtype.itemsize).view(dtype)


def prefault(parts: list[Tensor]) -> Thread:
    """Clear the beginning of each part, up to the next border of huge pages, in a thread; join it before they are used.

    The rest is brought in as it is used, one huge page at a time.
    """

    def clear() -> None:
        for part in parts:
            begin = address(part, part.dtype, parts[0].shape)
            num_bytes = min(HUGE_PAGE - begin % HUGE_PAGE, part.nbytes)
            ctypes.memset(begin, 0, num_bytes)  # other threads run meanwhile

    thread = Worker(target=clear, daemon=True)
    thread.start()
    finish_at_exit(thread)  # if Ctrl-C keeps its caller from joining it
    return thread


def keep_freed_memory() -> None:
    """Have malloc keep large buffers that are freed: the next step needs buffers of the same sizes (glibc only)."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError: Windows' libraries all have names
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def give_freed_memory_back() -> None:
    """What malloc has kept of buffers that are freed goes back to the system (glibc only)."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
