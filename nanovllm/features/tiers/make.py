"""Tiers as options ask for them."""

import json
import logging
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig
from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.scheduler import Scheduler, SchedulerOutput
from nanovllm.core.tiers.store import BLOCK, STATE
from nanovllm.core.tiers.tiers import Tiers
from nanovllm.features.tiers.directory import CacheDirectory, prepared
from nanovllm.features.tiers.disk_store import DiskStore
from nanovllm.features.tiers.fingerprint import file_digest, fingerprint, stamp_of, weight_paths
from nanovllm.features.tiers.memory_store import MemoryStore
from nanovllm.features.tiers.segment import Space
from nanovllm.wings import Wing

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

logger = logging.getLogger("nanovllm")
WAIT_S = 0.02  # the longest sleep while blocks are on their way; new requests are noticed after it


class EngineTiers(Tiers, Wing):
    """Those beside an engine."""

    def begin_step(self, scheduler: Scheduler) -> None:
        """If nothing can run without blocks that are on their way, sleep until some arrive, WAIT_S at most."""
        # Those that may not be admitted get no room, nor ask for blocks.
        is_full = len(scheduler.running) == scheduler.max_num_seqs
        scheduler.candidates = self.poll(filter(scheduler.may_be_admitted, scheduler.waiting), is_full)
        if scheduler.waiting and not scheduler.running and scheduler.next_waiting() is None:
            self.wait(WAIT_S)

    def after_schedule(self, output: SchedulerOutput) -> None:
        self.save_evicted()  # before the step overwrites the evicted blocks

    def reset(self) -> None:
        for store in self.stores:
            store.reset()


def prepare(engine: "LLMEngine") -> dict[Path, str]:
    """See wings.BESIDE_AN_ENGINE. Returns a stamp of each of the checkpoint's files, for they may change meanwhile."""
    check_options(engine.config)
    return weight_stamps(engine.directory)


def check_options(config: EngineConfig) -> None:
    """Raises ValueError for what cannot work, and makes the directory."""
    if not config.enable_prefix_caching:
        raise ValueError("prefix_cache_dir and cpu_cache_bytes need enable_prefix_caching; leave them out without it")
    if config.prefix_cache_dir is not None:
        try:
            prepared(config.prefix_cache_dir)
        except OSError as error:
            raise ValueError(f"prefix_cache_dir: {config.prefix_cache_dir} cannot be used: {error}") from error


def attach(engine: "LLMEngine", weight_stamps: dict[Path, str]) -> EngineTiers:
    """The tiers of an engine whose runner is prepared. weight_stamps: see prepare().

    Blocks are hashed with SHA-256, and adapters by their content, so that a hash holds in every process and cannot be
    made to collide.
    """
    from nanovllm.features.tiers.pool_data import PoolData, RanksData

    config, runner, manager = engine.config, engine.model_runner, engine.block_manager
    adapter_digest = engine.known_adapters.digest_of if config.enable_lora else None
    manager.hasher = BlockHasher(manager.block_size, "sha256", adapter_digest)
    data: Any = PoolData(runner) if config.tensor_parallel_size == 1 else RanksData(runner)
    memory = MemoryStore(config.cpu_cache_bytes) if config.cpu_cache_bytes else None
    disk = None if config.prefix_cache_dir is None else open_disk(engine, data, engine.directory, weight_stamps)
    return EngineTiers(manager, data, memory, disk)


def open_disk(engine: "LLMEngine", data: Any, directory: Path, weight_stamps: dict[Path, str]) -> DiskStore | None:
    """None, with a warning, if the directory cannot even be read."""
    config, runner = engine.config, engine.model_runner
    path = prepared(config.prefix_cache_dir)  # pyrefly: ignore[bad-argument-type]
    try:
        kept = open_directory(path, config.prefix_cache_bytes)
        key = fingerprint(config, engine.model_config, runner, directory, partial(digest_of, weight_stamps, kept))
        options = config.dtype, config.round_to, config.kv_cache_dtype
        model_name = str(config.model)[-250:]
        about = json.dumps({"model": model_name, "numbers": [o for o in options if o not in (None, "auto")]})
        spaces = [Space(key, BLOCK, runner.block_size, data.block_bytes, about)]
        if data.state_bytes:
            spaces.append(Space(key, STATE, 0, data.state_bytes, about))
        kept.use(spaces)
    except OSError as error:
        logger.warning("prefix cache: %s cannot be used: %s", path, error)
        return None
    store = DiskStore(kept)
    weakref.finalize(engine, store.close)  # at exit, too
    return store


def open_directory(path: Path, num_bytes: int) -> CacheDirectory:
    """For writing; with a warning for reading, where it cannot be written. Raises OSError."""
    try:
        return CacheDirectory(path, num_bytes)
    except OSError as error:
        logger.warning("prefix cache: %s is read, and not written: %s", path, error)
        return CacheDirectory(path, num_bytes, is_writable=False)


def weight_stamps(directory: Path) -> dict[Path, str]:
    """Stamps of a checkpoint's files, before they are loaded."""
    return {path: stamp_of(path) for path in weight_paths(directory)}


def digest_of(stamps: dict[Path, str], kept: CacheDirectory, path: Path) -> str:
    """The digest of a checkpoint's file, computed once if it can be kept. stamps: of what was loaded.

    Raises OSError if the file has changed.
    """
    where, stamp = str(path.resolve()), stamps.get(path, "")
    known = kept.digest(where, stamp)
    digest = file_digest(path) if known is None else known
    if stamp_of(path) != stamp:
        raise OSError(f"{path} has changed since its weights were loaded")
    if known is None:
        with suppress(OSError):  # the directory is full, locked or read-only: the next engine computes it again
            kept.keep_digest(where, stamp, digest)
    return digest
