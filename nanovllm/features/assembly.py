"""What an engine is assembled from. Each part is made, and its module loaded, only if an option asks for it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.block_manager import BlockManager

if TYPE_CHECKING:
    from nanovllm.core.tiers.tiers import Tiers
    from nanovllm.engine import LLMEngine
    from nanovllm.features.cache_reports.block_times import BlockTimes
    from nanovllm.features.cache_reports.kv_events import KVEvents
    from nanovllm.features.images.prompt_images import PromptImages
    from nanovllm.features.speculation.choose import Speculation


def has_tiers(config: EngineConfig) -> bool:
    return config.prefix_cache_dir is not None or config.cpu_cache_bytes > 0


def has_kv_events(config: EngineConfig) -> bool:
    events: Any = config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def check_cache_options(config: EngineConfig, directory: Path) -> dict[Path, str]:
    """Check what is kept and told of the prefix cache, before any weight is read. Raises ValueError.

    Returns a stamp of each of the checkpoint's files, if a tier on the disk will have to know what they held.
    """
    if has_kv_events(config):
        from nanovllm.features.cache_reports.kv_events_config import check_kv_events

        check_kv_events(config)
    if not has_tiers(config):
        return {}
    from nanovllm.features.tiers.assembly import check_options, weight_stamps

    check_options(config)
    return weight_stamps(directory)


def make_runner(config: EngineConfig, model_config: ModelConfig) -> Any:
    """The model runner, or what stands for one in each of several processes."""
    if config.tensor_parallel_size > 1:
        from nanovllm.features.parallel.ranks import ParallelRunner

        return ParallelRunner(config, model_config)
    from nanovllm.worker.model_runner import ModelRunner

    return ModelRunner(config, model_config)


def use_processors_template(tokenizer: Any, place: Path, model_config: ModelConfig) -> None:
    """A model that sees images is used with a processor, whose chat template comes before its tokenizer's."""
    if model_config.images is None:
        return
    from nanovllm.features.chat_template.files import take_processors_template

    take_processors_template(tokenizer, place)


def largest_image(engine: "LLMEngine") -> "PromptImages | None":
    """For the step by which a GPU's memory is measured, if the model sees images."""
    if engine.model_config.images is None or not engine.model_runner.measures_memory:
        return None
    from nanovllm.features.images.requests import largest_image

    return largest_image(engine)


def make_speculation(
    config: EngineConfig, directory: Path, model_config: ModelConfig, tokenizer: Any
) -> "Speculation | None":
    """What proposes draft tokens. Raises ValueError or FileNotFoundError for a draft model that cannot."""
    if config.speculative_config is None:
        return None
    from nanovllm.features.speculation.draft_model import make_speculation

    return make_speculation(config, directory, model_config, tokenizer)


def make_block_manager(pool: Any, **options: Any) -> BlockManager:
    """pool: the KVPool that a model runner has prepared. options: of BlockManager."""
    snapshots = None
    if pool.states is not None:
        from nanovllm.core.snapshots.cache import SnapshotCache

        snapshots = SnapshotCache(max_running=pool.states.max_running, max_snapshots=pool.states.max_snapshots)
    return BlockManager(pool.num_blocks, pool.block_size, snapshots=snapshots, **options)


def make_kv_events(engine: "LLMEngine") -> "KVEvents | None":
    """For those who follow what the pool holds."""
    if not has_kv_events(engine.config):
        return None
    from nanovllm.features.cache_reports.kv_events import make_kv_events

    return make_kv_events(engine)


def make_block_times(config: EngineConfig) -> "BlockTimes | None":
    """How long cached blocks live, lie idle and wait for their next use."""
    if not config.kv_cache_metrics:
        return None
    from nanovllm.features.cache_reports.block_times import BlockTimes

    return BlockTimes(config.kv_cache_metrics_sample)


def make_tiers(engine: "LLMEngine", directory: Path, weight_stamps: dict[Path, str]) -> "Tiers | None":
    """What keeps K/V below the pool. directory: the checkpoint's. weight_stamps: of check_cache_options()."""
    if not has_tiers(engine.config):
        return None
    from nanovllm.features.tiers.assembly import make_tiers

    return make_tiers(engine, directory, weight_stamps)
