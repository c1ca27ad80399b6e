"""BlockTimes: how long cached blocks live, lie idle and wait for their next use, as vLLM's kv_cache_metrics has it.

    allocated        hit            hit                        evicted
        |-------------|--------------|----------------------------|
        |<-------------------- lifetime ------------------------->|
                      |< reuse gap ->|<-- idle before eviction -->|

Idle times near 0 say that the pool is too small: blocks go soon after their last use. A prompt that comes again after
a longer gap than that is computed again.
"""

import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from nanovllm.core.block_manager import BlockEvent
from nanovllm.features.callers.metrics import Distribution
from nanovllm.wings import Wing

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

# Upper bounds of vLLM's buckets, in seconds.
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
NAMES = "kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds".split()


def prepare(engine: "LLMEngine") -> None:
    """See wings.BESIDE_AN_ENGINE: there is nothing to check."""


def attach(engine: "LLMEngine", prepared: None) -> "BlockTimes":
    return BlockTimes(engine.config.kv_cache_metrics_sample)


class BlockTimes(Wing):
    """A listener. sample: the share of blocks that are observed; each is chosen when it is allocated."""

    def __init__(self, sample: float, now: Callable[[], float] = time.perf_counter) -> None:
        self.sample, self.now = sample, now
        self.lifetime, self.idle, self.reuse_gap = Distribution(BUCKETS), Distribution(BUCKETS), Distribution(BUCKETS)
        self._random = Random(0)  # its own: the caller may have seeded the global one
        self._uses: dict[int, list[float]] = {}  # block_id -> when it was allocated, and when it was hit last

    def on_event(self, event: BlockEvent) -> None:
        """See BlockManager.on_event."""
        if event.kind == "clear":
            self._uses.clear()
            return
        uses = self._uses.get(event.block_id)
        if event.kind == "allocate":
            self._uses.pop(event.block_id, None)
            if self._random.random() < self.sample:
                self._uses[event.block_id] = [self.now()]
        elif uses is None:
            return
        elif event.kind == "hit":
            now = self.now()
            if len(uses) > 1:
                self.reuse_gap.observe(now - uses[1])
            uses[1:] = [now]
        elif event.kind == "evict":
            now = self.now()
            self.lifetime.observe(now - uses[0])
            self.idle.observe(now - uses[-1])

    def as_dict(self) -> dict[str, dict[str, Any]]:
        times = self.lifetime, self.idle, self.reuse_gap
        return {name: each.as_dict() for name, each in zip(NAMES, times, strict=True)}
