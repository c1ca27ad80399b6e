"""What an engine has done so far, as numbers: EngineStats counts, snapshot() gathers the counters of all parts."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

CACHE_STATS = "queries hits misses evictions collisions hit_rate recent_hit_rate evictions_per_s".split()


@dataclass
class EngineStats:
    """Counters since the engine was built. Prefill counts tokens known before their step, decode those computed one by
    one, output those sampled."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_finished_requests: int = 0
    step_time_s: float = 0.0


def snapshot(engine: "LLMEngine") -> dict[str, Any]:
    """See LLM.stats."""
    scheduler, manager = engine.scheduler, engine.block_manager
    cache, states, num_blocks = manager.stats.snapshot(), manager.count_states(), len(manager.blocks)
    return {
        **asdict(engine.stats),
        "num_waiting": len(scheduler.waiting),
        "num_running": len(scheduler.running),
        "num_preemptions": scheduler.num_preemptions,
        "prefix_cache": {name: getattr(cache, name) for name in CACHE_STATS}
        | {"utilization": states["cached"] / num_blocks},
        "kv_pool": {
            "num_blocks": num_blocks,
            "block_size": manager.block_size,
            "num_bytes": engine.kv_pool.num_bytes,
            **{f"num_{state}_blocks": count for state, count in states.items()},
            "usage": states["referenced"] / num_blocks,
        },
    }
