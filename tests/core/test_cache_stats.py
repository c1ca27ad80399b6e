"""PrefixCacheStats: counters, snapshots and their difference, the recent hit rate."""

from nanovllm.core import cache_stats
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.integrity.states import count_blocks
from tests.core.by_hand import CacheModel, admit, make, run, sequence


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
    assert manager.reset_prefix_cache()
    assert manager.stats.recent_hit_rate == 0.0, "what was found before says nothing about the empty cache"
    for tokens in ([5, 6], [5, 6, 7]):
        manager.free(admit(manager, tokens))
    assert manager.stats.recent_hit_rate == 1 / 2 and manager.stats.hits == 4


def test_preempted_sequences_are_counted_apart():
    scheduler, model = make(num_blocks=6, block_size=4, max_model_len=24), CacheModel(4)
    for tokens, max_tokens in ((range(11), 6), (range(50, 61), 12)):
        scheduler.add(sequence(tokens, max_tokens=max_tokens))
    while scheduler.has_unfinished():
        run(scheduler, model)
    stats = scheduler.block_manager.stats
    assert scheduler.num_preemptions == 1
    assert stats.queries - stats.preempted_queries == 2 * (11 // 4) and stats.hits == stats.preempted_hits > 0
