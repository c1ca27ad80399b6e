"""What an engine is assembled from, by its options and by what its requests ask for. Nothing is loaded before that."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.block_manager import BlockManager, broadcast

if TYPE_CHECKING:
    from nanovllm.core.tiers.tiers import Tiers
    from nanovllm.features.cache_reports.block_times import BlockTimes
    from nanovllm.features.cache_reports.kv_events import KVEvents
    from nanovllm.features.grammar.grammar import GrammarCompiler
    from nanovllm.features.lora.registry import KnownAdapters
    from nanovllm.outputs import RequestOutput
    from nanovllm.request import Request


WAIT_S = 0.02  # for blocks, at a time: then the engine hears of other requests


def make_runner(config: EngineConfig, model_config: ModelConfig) -> Any:
    """The model runner, or what stands for one in each of several processes."""
    if config.tensor_parallel_size > 1:
        from nanovllm.features.parallel.ranks import ParallelRunner

        return ParallelRunner(config, model_config)
    from nanovllm.worker.model_runner import ModelRunner

    return ModelRunner(config, model_config)


def make_block_manager(pool: Any, **options: Any) -> BlockManager:
    """For the pools that a model runner has made: a KVPool of worker/kv_cache.py. options: of BlockManager."""
    snapshots = None
    if pool.states is not None:
        from nanovllm.core.snapshots.cache import SnapshotCache

        snapshots = SnapshotCache(max_running=pool.states.max_running, max_snapshots=pool.states.max_snapshots)
    return BlockManager(pool.num_blocks, pool.block_size, snapshots=snapshots, **options)


class Features:
    """known_adapters: those that requests have named. grammars: a compiler of what answers must fit. tiers: below the
    pool, or None. kv_events: for who follows the pool's hashes, or None. block_times: of cached blocks, or
    None."""

    tiers: "Tiers | None" = None
    kv_events: "KVEvents | None" = None
    block_times: "BlockTimes | None" = None

    def __init__(self, config: EngineConfig, model_config: ModelConfig, tokenizer: Any, directory: Path) -> None:
        """directory: the checkpoint's, of which no weight is read yet.

        Raises ValueError for options that do not go together, or a directory that cannot be used.
        """
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self.has_tiers = config.prefix_cache_dir is not None or config.cpu_cache_bytes > 0
        if self.has_tiers:
            from nanovllm.features.tiers.assembly import check_options, weight_stamps

            check_options(config)
            self.weight_stamps = weight_stamps(directory)
        events: Any = config.kv_events_config
        self.has_kv_events = events is not None and events.enable_kv_cache_events
        if self.has_kv_events:
            from nanovllm.features.cache_reports.config import check_kv_events

            check_kv_events(config)

    @cached_property
    def known_adapters(self) -> "KnownAdapters":
        from nanovllm.features.lora.registry import KnownAdapters

        return KnownAdapters(self.model_config, self.config)

    def adapter_digest(self, lora_id: int) -> str:
        """Of the content of the adapter that has this number in this process."""
        return self.known_adapters.digest_of(lora_id)

    @cached_property
    def grammars(self) -> "GrammarCompiler":
        from nanovllm.features.grammar.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)

    def with_output_kind(self, request: "Request") -> "Request":
        """The same; step() gives what its output_kind asks for."""
        from nanovllm.features.callers.output_kind import OutputFilter
        from nanovllm.sampling_params import RequestOutputKind

        request.stream &= request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        if request.params.output_kind is RequestOutputKind.DELTA and request.stream:
            request.output_filter = OutputFilter(RequestOutputKind.DELTA)
        return request

    def as_asked(self, outputs: "list[RequestOutput]", requests: "list[Request]") -> "list[RequestOutput]":
        """A step's outputs as their requests want them, once nothing can take the step back."""
        filters = {r.request_id: r.output_filter for r in requests if r.output_filter is not None}
        taken = ((f.take(o) if (f := filters.get(o.request_id)) else o) for o in outputs) if filters else outputs
        return [output for output in taken if output is not None]

    @cached_property
    def beam_search(self) -> Callable[..., Any]:
        from nanovllm.features.beam_search.search import beam_search

        return beam_search

    def scheduler_options(self, directory: Path) -> dict[str, Any]:
        """What the scheduler is given for them. directory: the checkpoint's."""
        options: dict[str, Any] = {"long_prefill_token_threshold": self.config.long_prefill_token_threshold}
        if self.config.enable_lora:
            options["may_run"] = self.known_adapters.may_run
        if self.config.speculative_config is not None:
            from nanovllm.features.speculation.draft_model import make_speculation

            options["speculation"] = make_speculation(self.config, directory, self.model_config, self.tokenizer)
        return options

    def make_block_manager(self, runner: Any, pool: Any, directory: Path) -> BlockManager:
        """With all that listens to it. directory: the checkpoint's."""
        caching, hash_algo = self.config.enable_prefix_caching, self.config.prefix_caching_hash_algo
        manager = make_block_manager(pool, enable_prefix_caching=caching, hash_algo=hash_algo)
        if self.has_kv_events:
            from nanovllm.features.cache_reports.kv_events import make_kv_events

            self.kv_events = make_kv_events(self, manager)
        if self.config.kv_cache_metrics:
            from nanovllm.features.cache_reports.block_times import BlockTimes

            self.block_times = BlockTimes(self.config.kv_cache_metrics_sample)
        if self.has_tiers:
            from nanovllm.features.tiers.assembly import make_tiers

            self.tiers = make_tiers(self, runner, manager, directory)
        listeners = self.tiers, self.block_times, self.kv_events  # the last one tells others of all that happened
        manager.on_event = broadcast(*(listener.on_event for listener in listeners if listener is not None))
        return manager

    def wait_for_blocks(self) -> None:
        """Requests wait and a step has nothing to compute: blocks must be on their way from another tier."""
        if self.tiers is None or not self.tiers.wait(WAIT_S):
            raise AssertionError("requests wait and none can be scheduled")

    def reset_tiers(self, is_wanted: bool) -> bool:
        """If so, forget what is kept beside the pool. True, as reset_prefix_cache()."""
        for store in self.tiers.stores if self.tiers is not None and is_wanted else ():
            store.reset()
        return True
