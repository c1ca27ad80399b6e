"""What an engine is assembled from. Each part is made, and its module loaded, only if an option asks for it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.snapshots.manager import make_block_manager as make_manager

if TYPE_CHECKING:
    from nanovllm.core.tiers.tiers import Tiers
    from nanovllm.engine import LLMEngine
    from nanovllm.features.cache_reports.block_times import BlockTimes
    from nanovllm.features.cache_reports.kv_events import KVEvents
    from nanovllm.features.speculation.choose import Speculation


def check_cache_options(config: EngineConfig, directory: Path) -> dict[Path, str]:
    """Check what is kept and told of the prefix cache, before any weight is read. Raises ValueError.

    Returns a stamp of each of the checkpoint's files, if a tier on the disk will have to know what they held.
    """
    if has_kv_events(config):
        from nanovllm.features.cache_reports.config import check_kv_events

        check_kv_events(config)
    if not has_tiers(config):
        return {}
    from nanovllm.features.tiers.assembly import check_options, weight_stamps

    check_options(config)
    return weight_stamps(directory)


def has_tiers(config: EngineConfig) -> bool:
    return config.prefix_cache_dir is not None or config.cpu_cache_bytes > 0


def has_kv_events(config: EngineConfig) -> bool:
    return config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events


def make_runner(config: EngineConfig, model_config: ModelConfig) -> Any:
    """The model runner, or what stands for one in each of several processes."""
    if config.tensor_parallel_size > 1:
        from nanovllm.features.parallel.ranks import ParallelRunner

        return ParallelRunner(config, model_config)
    from nanovllm.worker.model_runner import ModelRunner

    return ModelRunner(config, model_config)


def make_speculation(
    config: EngineConfig, directory: Path, model_config: ModelConfig, tokenizer: Any
) -> "Speculation | None":
    """What proposes draft tokens. Raises ValueError or FileNotFoundError for a draft model that cannot."""
    if config.speculative_config is None:
        return None
    from nanovllm.features.speculation.draft_model import make_speculation

    return make_speculation(config, directory, model_config, tokenizer)


def make_block_manager(config: EngineConfig, pool: Any) -> BlockManager:
    """pool: the KVPool that a model runner has prepared."""
    caching, hash_algo = config.enable_prefix_caching, config.prefix_caching_hash_algo
    kinds = None
    if has_tiers(config) or has_kv_events(config) or config.kv_cache_metrics:
        from nanovllm.core.tiers.watched import WatchedBlockManager, WatchedHybridBlockManager

        kinds = WatchedBlockManager, WatchedHybridBlockManager
    return make_manager(pool, kinds, enable_prefix_caching=caching, hash_algo=hash_algo)


def make_kv_events(engine: "LLMEngine") -> "KVEvents | None":
    if not has_kv_events(engine.config):
        return None
    from nanovllm.features.cache_reports.kv_events import make_kv_events

    return make_kv_events(engine, engine.block_manager)


def make_block_times(config: EngineConfig, manager: Any) -> "BlockTimes | None":
    if not config.kv_cache_metrics:
        return None
    from nanovllm.features.cache_reports.block_times import BlockTimes

    return BlockTimes(manager, config.kv_cache_metrics_sample)


def make_tiers(engine: "LLMEngine", directory: Path, weight_stamps: dict[Path, str]) -> "Tiers | None":
    if not has_tiers(engine.config):
        return None
    from nanovllm.features.tiers.assembly import make_tiers

    return make_tiers(engine, directory, weight_stamps)
