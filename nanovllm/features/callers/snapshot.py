"""The counters of all parts of an engine, gathered (chapter 11)."""

from dataclasses import asdict
from typing import Any

from nanovllm.engine import LLMEngine

CACHE_STATS = "queries hits misses evictions collisions hit_rate recent_hit_rate evictions_per_s".split()


def snapshot(engine: LLMEngine) -> dict[str, Any]:
    """See LLM.stats."""
    scheduler, manager = engine.scheduler, engine.block_manager
    now, states, num_blocks = manager.stats.snapshot(), manager.count_states(), len(manager.blocks)
    cache = {name: getattr(now, name) for name in CACHE_STATS}
    return {
        **asdict(engine.stats),
        "acceptance_rate": engine.stats.acceptance_rate,
        "tokens_per_step": engine.stats.tokens_per_step,
        "same_bits": engine.model_runner.same_bits,
        "num_waiting": len(scheduler.waiting),
        "num_running": len(scheduler.running),
        "num_preemptions": scheduler.num_preemptions,
        "prefix_cache": {**cache, "utilization": states["cached"] / num_blocks},
        "kv_pool": {
            "num_blocks": num_blocks,
            "block_size": manager.block_size,
            "num_bytes": engine.kv_pool.num_bytes,
            **{f"num_{state}_blocks": count for state, count in states.items()},
            "usage": states["referenced"] / num_blocks,
        },
    }
