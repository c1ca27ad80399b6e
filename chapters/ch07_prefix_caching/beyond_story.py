"""The lab's last parts: tiers below the pool, played, and measured on this machine."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from chapters.patching import use_manager
from nanovllm import LLM, SamplingParams
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.store import BLOCK
from nanovllm.core.tiers.tiers import Tiers
from nanovllm.features.tiers.directory import CacheDirectory
from nanovllm.features.tiers.disk_store import DiskStore
from nanovllm.features.tiers.make import EngineTiers
from nanovllm.features.tiers.memory_store import MemoryStore
from nanovllm.features.tiers.pool_data import PoolData
from nanovllm.features.tiers.segment import Space

NUM_BLOCKS = 40  # of the prompt that is measured
MAX_ROUNDS = 5  # the shortest time counts: other programs only add to it
GIB = 1 << 30
SHAPES = {
    "the pool alone": {"memory": 0, "disk": 0},
    "memory, 20": {"memory": 20, "disk": 0},
    "memory, 40": {"memory": 40, "disk": 0},
    "a disk, 80": {"memory": 0, "disk": 80},
    "memory, 20, and a disk, 80": {},
    "a pool of 80 alone": {"pool": 80, "memory": 0, "disk": 0},
}


@dataclass(frozen=True)
class Costs:
    """Seconds. first, further: to read one block, and each one more of a run."""

    first: float
    further: float


@contextmanager
def tiers_below(llm: LLM, folder: Path, num_blocks: int) -> Iterator[EngineTiers]:
    """The engine gets a pool of so many blocks, memory and a disk for a while."""
    engine, size = llm.engine, llm.engine.block_manager.block_size
    data: Any = PoolData(engine.model_runner)
    directory = CacheDirectory(folder, GIB)
    directory.use([Space("0" * 32, BLOCK, size, data.block_bytes)])
    disk = DiskStore(directory)
    manager = BlockManager(num_blocks, size, hash_algo="sha256")
    tiers = EngineTiers(manager, data, MemoryStore(GIB), disk)
    manager.on_event = tiers.on_event
    with ExitStack() as stack:
        stack.callback(disk.close)
        stack.enter_context(use_manager(llm, manager))
        stack.enter_context(patch.dict(engine.wings, tiers=tiers))
        yield tiers


def first_token(llm: LLM, token_ids: list[int]) -> float:
    """Seconds until the first token of the answer."""
    [output] = llm.generate([{"prompt_token_ids": token_ids}], SamplingParams(temperature=0, max_tokens=1), False)
    assert output.metrics.ttft_s is not None
    return output.metrics.ttft_s


def costs_of(tiers: Tiers, store: Any, prompt: list[int], folder: Path) -> Costs:
    """Of a chain that the store has, from there into blocks of the pool."""
    records = tiers.records_of(Sequence(prompt))

    def read(num_blocks: int) -> float:
        drop_from_memory(folder)
        started = time.perf_counter()
        data = store.fetch(records[:num_blocks]).result()
        tiers.data.write([*range(num_blocks)], data)
        seconds = time.perf_counter() - started
        assert len(data) == num_blocks
        return seconds

    first, all_of_it = (min(read(num) for _ in range(MAX_ROUNDS)) for num in (1, len(records)))
    return Costs(first, max(all_of_it - first, 1e-9) / (len(records) - 1))


def drop_from_memory(folder: Path) -> None:
    """What the system keeps of these files in memory, so that the disk is read. Where it cannot be told, it is not."""
    if sys.platform == "linux":
        for path in folder.glob("*.seg"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
