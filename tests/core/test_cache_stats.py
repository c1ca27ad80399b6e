"""PrefixCacheStats: counters, snapshots and their difference, the recent hit rate."""

from nanovllm.core import cache_stats
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.integrity.states import count_blocks
from tests.core.by_hand import admit


def test_statistics():
    manager = BlockManager(4, 2)
    manager.free(admit(manager, [1, 2, 3, 4, 5]))
    before = manager.stats.snapshot()
    seq = admit(manager, [1, 2, 9, 9])
    assert count_blocks(manager) == {"cached": 3, "referenced": 2, "unreferenced": 1, "free": 1}
    manager.free(seq)
    admit(manager, [7] * 7)  # takes all four blocks, three of them cached
    after = manager.stats.snapshot()
    assert (after.queries, after.hits, after.misses, after.evictions) == (7, 1, 6, 3)
    assert after.hit_rate == 1 / 7
    change = after - before
    assert (change.queries, change.hits, change.misses, change.evictions) == (5, 1, 4, 3)
    assert change.seconds > 0
    assert before.queries == 2, "a snapshot stands still"


def test_recent_hit_rate_forgets(monkeypatch):
    monkeypatch.setattr(cache_stats, "RECENT_ALLOCATIONS", 3)
    manager = BlockManager(8, 2)
    for tokens in ([1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3]):
        manager.free(admit(manager, tokens))
    assert manager.stats.hit_rate == 3 / 4 and manager.stats.recent_hit_rate == 1.0
