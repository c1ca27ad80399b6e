"""The counters of all parts of an engine, gathered (chapter 11)."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanovllm.core.cache_stats import COUNTERS, PrefixCacheStats
from nanovllm.core.integrity.states import count_blocks

if TYPE_CHECKING:
    from nanovllm.core.tiers.tiers import Tiers
    from nanovllm.engine import LLMEngine

CACHE_STATS = [*COUNTERS, "hit_rate", "recent_hit_rate"]


def snapshot(engine: "LLMEngine") -> dict[str, Any]:
    """See LLM.stats."""
    scheduler, manager = engine.scheduler, engine.block_manager
    now, states, num_blocks = manager.stats.snapshot(), count_blocks(manager), len(manager.blocks)
    cache = {name: getattr(now, name) for name in CACHE_STATS} | {"evictions_per_s": now.evictions / now.seconds}
    counts: dict[str, Any] = {
        **asdict(engine.stats),
        "acceptance_rate": engine.stats.acceptance_rate,
        "tokens_per_step": engine.stats.tokens_per_step,
        "batch_invariant": engine.model_runner.batch_invariant,
        "end_tokens": {token_id: list(who) for token_id, who in sorted(engine.model_config.end_tokens.items())},
        "num_waiting": len(scheduler.waiting),
        "num_running": len(scheduler.running),
        "num_preemptions": scheduler.num_preemptions,
        "prefix_cache": {**cache, "utilization": states["cached"] / num_blocks, "hit_tokens": hit_tokens(engine, now)},
        "kv_pool": {
            "num_blocks": num_blocks,
            "block_size": manager.block_size,
            "num_bytes": engine.kv_pool.num_bytes,
            **{f"num_{state}_blocks": count for state, count in states.items()},
            "usage": states["referenced"] / num_blocks,
        },
    }
    if engine.kv_pool.states is not None:
        counts["states"] = state_counts(engine)
    if "tower" in (parts := engine.model_runner.part_counts):
        counts["images"] = parts["tower"]
    if engine.tiers is not None:
        counts["tiers"] = tier_counts(engine.tiers)
    if engine.block_times is not None:
        counts["block_times"] = engine.block_times.as_dict()
    return counts


def state_counts(engine: "LLMEngine") -> dict[str, int]:
    """Counts of a hybrid model's states (core/snapshots)."""
    snapshots: Any = engine.block_manager.snapshots
    return {
        **engine.kv_pool.states._asdict(),
        "num_running": len(snapshots.states),
        "num_snapshots": len(snapshots.by_hash),
        "num_snapshots_taken": snapshots.num_taken,
    }


def hit_tokens(engine: "LLMEngine", now: PrefixCacheStats) -> dict[str, dict[str, int]]:
    """Tokens whose K/V was found, by where: in the pool, or in a store below it.

    first: of sequences that were admitted for the first time. again: of those that had been preempted; they mostly find
    what they have computed themselves.
    """
    again = now.preempted_hits * engine.block_manager.block_size
    pool_only = {"pool": [now.hits * engine.block_manager.block_size - again, again]}
    found = pool_only if engine.tiers is None else engine.tiers.hit_tokens
    return {medium: {"first": tokens[0], "again": tokens[1]} for medium, tokens in found.items()}


def tier_counts(tiers: "Tiers") -> dict[str, dict[str, int]]:
    """Counts of each store below the pool, by its medium (core/tiers)."""
    hits = {medium: {"hit_tokens": sum(tokens)} for medium, tokens in tiers.hit_tokens.items()}
    return {store.medium: hits[store.medium] | store.counts() for store in tiers.stores}
