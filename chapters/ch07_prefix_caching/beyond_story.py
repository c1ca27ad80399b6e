"""The lab's last parts: tiers below the pool, played, and measured on this machine."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from rich.table import Table

from chapters.ch07_prefix_caching.beyond import ORDERS, PLACES, played
from chapters.ch07_prefix_caching.beyond_drawing import draw_visits
from chapters.patching import use_manager
from chapters.story import Story
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


def tell_tiers(story: Story) -> None:
    story.part("Beyond memory: who still has it?")
    order, half = next(iter(ORDERS)), 12
    story.say(
        "Four people talk with a model in turn, six times each, and each time send all that was said before. The pool "
        "has room for 20 blocks of 4 tokens, memory for 20, a disk for 80; all that they say takes 59. After twelve "
        "requests the process ends and another begins. The last requests: = found in the pool, m in memory, d on the "
        "disk, + computed, · not full."
    )
    story.show(draw_visits(played(order, half), 14))
    story.say(
        "The table shows where the K/V of the prompt tokens of all 24 requests came from, with different sizes "
        "in blocks:"
    )
    table = Table("below a pool of 20", *PLACES, "computed if the process goes on")
    for title, sizes in SHAPES.items():
        totals, going_on = played(order, half, **sizes).totals(), played(order, **sizes).totals()
        table.add_row(title, *(str(totals[place]) for place in PLACES), str(going_on["computed"]))
    story.show(table)


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


def tell_costs(story: Story, llm: LLM) -> None:
    story.part("Beyond memory: when reading beats computing")
    size, num_blocks = llm.engine.block_manager.block_size, len(llm.engine.block_manager.blocks)
    with TemporaryDirectory() as folder, tiers_below(llm, Path(folder), NUM_BLOCKS + 1) as tiers:
        prompt, other = ([first + i for i in range(NUM_BLOCKS * size + 1)] for first in (1000, 5000))
        waits = {"computed": [first_token(llm, [7 + r, *prompt[1:]]) for r in range(MAX_ROUNDS)]}  # no beginning alike
        waits |= {medium: [] for medium in tiers.hit_tokens}
        first_token(llm, prompt)
        stores: Any = tiers.stores
        memory, disk = stores
        for _ in range(MAX_ROUNDS):
            waits["pool"].append(first_token(llm, prompt))
            first_token(llm, other)  # evicts it, so memory gets it
            waits["memory"].append(first_token(llm, prompt))
            disk.flush()
            memory.reset()
            tiers.manager.reset_prefix_cache()
            drop_from_memory(Path(folder))
            waits["disk"].append(first_token(llm, prompt))
        first_token(llm, other)
        costs = {store.medium: costs_of(tiers, store, prompt, Path(folder)) for store in tiers.stores}
        block_bytes: int = PoolData(llm.engine.model_runner).block_bytes
    computing = min(waits["computed"]) / len(prompt)
    token_bytes = block_bytes // size
    story.say(
        f"The same model, blocks of {size} tokens. K and V of a token take {token_bytes:,} bytes in float32. A prompt "
        f"of {len(prompt)} tokens, {NUM_BLOCKS} full blocks and a token more, by where these blocks are found; "
        "the shortest of five times:"
    )
    table = Table("found", "first token after (measured)")
    for medium, times in waits.items():
        name = "nowhere" if medium == "computed" else medium
        table.add_row(name, f"{min(times) * 1e3:.0f} ms (measured)")
    story.show(table)
    story.say(
        "The table shows a tier's room, in bytes and in tokens; how long a token's K and V take from there into the "
        "pool; and how many are read while one is computed. The network's times come from its rate, without the wait "
        "for the first byte:"
    )
    table = Table("tier", "room", "tokens", "ms a token", "read while one is computed (measured)")
    rows: list[tuple[str, int, float]] = [
        ("memory", GIB, costs["memory"].further / size),
        ("disk", 10 * GIB, costs["disk"].further / size),
        ("network, 10 Gbit/s", 0, token_bytes * 8 / 10e9),
        ("network, 100 Mbit/s", 0, token_bytes * 8 / 100e6),
    ]
    room = f"{num_blocks * block_bytes / GIB:.2f} GiB"
    table.add_row("pool", room, f"{num_blocks * size:,}", "0", "all (measured)")
    for name, num_bytes, seconds in rows:
        sizes = (f"{num_bytes / GIB:.2f} GiB", f"{num_bytes // token_bytes:,}") if num_bytes else ("", "")
        table.add_row(name, *sizes, f"{seconds * 1e3:.3f}", f"{computing / seconds:,.1f} (measured)")
    story.show(table)
    of_disk = costs["disk"]
    story.say(f"Computing takes {computing * 1e3:.2f} milliseconds a token.", measured=True)
    story.say(f"Reading from the disk takes {of_disk.further / size * 1e3:.3f} milliseconds a token.", measured=True)
    story.say(f"The first block of a run takes {of_disk.first * 1e3:.2f} milliseconds.", measured=True)
    rate = token_bytes / computing / 1e6
    story.say(f"Break-even: a store that delivers {rate:.0f} MB a second is as fast as computing.", measured=True)
    rate = 10_000 * (128 << 10) / 1e9
    story.say(f"A GPU that computes 10,000 tokens a second, at 128 KiB of K and V a token: {rate:.2f} GB a second.")


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
