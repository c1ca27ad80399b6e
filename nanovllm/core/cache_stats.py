"""PrefixCacheStats: what the prefix cache has done so far, counted in blocks (chapter 7)."""

import time
from collections import deque
from dataclasses import dataclass, field, fields, replace

RECENT_ALLOCATIONS = 1000


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters in blocks. Every full block of an allocation that searched the cache and succeeded is one
    query: a hit or a miss.

    A snapshot stands still, and a later one minus an earlier one is what happened between the two.
    """

    queries: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    collisions: int = 0
    preempted_queries: int = 0  # of these, of sequences that had blocks before and were preempted
    preempted_hits: int = 0
    seconds: float = field(default=0.0, compare=False)  # that the counters cover; set in snapshots
    # (queries, hits) of the last RECENT_ALLOCATIONS allocations since the cache was reset
    recent: deque = field(default_factory=lambda: deque(maxlen=RECENT_ALLOCATIONS), repr=False, compare=False)
    _started: float = field(default_factory=time.perf_counter, repr=False, compare=False)

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.queries, 1)

    @property
    def recent_hit_rate(self) -> float:
        return sum(hits for _, hits in self.recent) / max(sum(queries for queries, _ in self.recent), 1)

    def record(self, queries: int, hits: int, collisions: int, was_preempted: bool = False) -> None:
        """Count one allocation that succeeded."""
        self.queries += queries
        self.hits += hits
        self.misses += queries - hits
        self.collisions += collisions
        if was_preempted:
            self.preempted_queries += queries
            self.preempted_hits += hits
        self.recent.append((queries, hits))

    def snapshot(self) -> "PrefixCacheStats":
        return replace(self, seconds=time.perf_counter() - self._started, recent=self.recent.copy())

    def __sub__(self, earlier: "PrefixCacheStats") -> "PrefixCacheStats":
        """Between two snapshots. What is recent stays that of the later one."""
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in (*COUNTERS, "seconds")})


COUNTERS = [f.name for f in fields(PrefixCacheStats) if f.compare]
