"""PrefixCacheStats: what the prefix cache has done so far, counted in blocks (chapter 7)."""

import time
from collections import deque
from dataclasses import dataclass, field, replace

RECENT_ALLOCATIONS = 1000


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters in blocks. Every full block of an allocation that succeeded is one query: a hit or a miss.

    A snapshot stands still, and a later one minus an earlier one is what happened between the two.
    """

    queries: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    collisions: int = 0
    seconds: float = field(default=0.0, compare=False)  # that the counters cover; set in snapshots
    recent_queries: int = 0  # of the last RECENT_ALLOCATIONS allocations
    recent_hits: int = 0
    _recent: deque[tuple[int, int]] = field(default_factory=deque, repr=False, compare=False)
    _started: float = field(default_factory=time.perf_counter, repr=False, compare=False)

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.queries, 1)

    @property
    def recent_hit_rate(self) -> float:
        return self.recent_hits / max(self.recent_queries, 1)

    def record(self, queries: int, hits: int, collisions: int) -> None:
        """Count one allocation that succeeded."""
        self.queries += queries
        self.hits += hits
        self.misses += queries - hits
        self.collisions += collisions
        self._recent.append((queries, hits))
        oldest = self._recent.popleft() if len(self._recent) > RECENT_ALLOCATIONS else (0, 0)
        self.recent_queries += queries - oldest[0]
        self.recent_hits += hits - oldest[1]

    def snapshot(self) -> "PrefixCacheStats":
        return replace(self, seconds=time.perf_counter() - self._started, _recent=deque())

    def __sub__(self, earlier: "PrefixCacheStats") -> "PrefixCacheStats":
        """Between two snapshots. What is recent stays that of the later one."""
        counters = ("queries", "hits", "misses", "evictions", "collisions", "seconds")
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in counters})
