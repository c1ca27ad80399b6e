"""Tiers as options ask for them."""

import json
import logging
import sqlite3
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.config import EngineConfig
from nanovllm.core.tiers.names import TierNames
from nanovllm.core.tiers.store import BLOCK, STATE
from nanovllm.core.tiers.tiers import Tiers
from nanovllm.features.tiers.directory import CacheDirectory
from nanovllm.features.tiers.disk_store import DiskStore
from nanovllm.features.tiers.fingerprint import file_digest, fingerprint, stamp_of, weight_paths
from nanovllm.features.tiers.index import prepared
from nanovllm.features.tiers.memory_store import MemoryStore
from nanovllm.features.tiers.segment import Space

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

logger = logging.getLogger("nanovllm")

Result = TypeVar("Result")


def check_options(config: EngineConfig) -> None:
    """Raises ValueError for what cannot work, and makes the directory."""
    if not config.enable_prefix_caching:
        raise ValueError("prefix_cache_dir and cpu_cache_bytes need enable_prefix_caching; leave them out without it")
    if config.prefix_cache_dir is not None:
        try:
            prepared(config.prefix_cache_dir)
        except OSError as error:
            raise ValueError(f"prefix_cache_dir: {config.prefix_cache_dir} cannot be used: {error}") from error


def make_tiers(engine: "LLMEngine", directory: Path, weight_stamps: dict[Path, str]) -> Tiers:
    """Of an engine whose runner is prepared. directory: the checkpoint's."""
    from nanovllm.features.tiers.pool_data import PoolData, RanksData

    config, runner, manager = engine.config, engine.model_runner, engine.block_manager
    data: Any = (PoolData if config.tensor_parallel_size == 1 else RanksData)(runner)
    memory = MemoryStore(config.cpu_cache_bytes) if config.cpu_cache_bytes else None
    disk, key = None, b"of one process"
    if config.prefix_cache_dir is not None:
        disk, key = open_disk(engine, runner, data, directory, weight_stamps)
    if engine.kv_events is not None:
        for store, told in ((memory, "CPU"), (None if disk is None else disk.directory, "DISK")):
            if store is not None:
                store.on_stored = partial(engine.kv_events.tier_stored, told)
                store.on_removed = partial(engine.kv_events.tier_removed, told)
    tiers = Tiers(manager, data, TierNames(key, lambda lora_id: engine.known_adapters.digest_of(lora_id)), memory, disk)
    if engine.kv_events is not None and disk is not None:
        disk.directory.on_lost = partial(engine.kv_events.tier_lost, "DISK")
        tiers.on_kept = disk.tell_of
    return tiers


def open_disk(
    engine: "LLMEngine", runner: Any, data: Any, directory: Path, loaded: dict[Path, str]
) -> tuple[DiskStore | None, bytes]:
    """(store, fingerprint). None, with a warning, if the directory can not even be read."""
    config, model = engine.config, engine.model_config
    path = prepared(config.prefix_cache_dir)  # type: ignore[arg-type]

    def opened(is_writable: bool) -> tuple[CacheDirectory, str]:
        kept = CacheDirectory(path, config.prefix_cache_bytes, is_writable)
        key = fingerprint(config, model, runner, directory, lambda file: digest_of(file, loaded.get(file, ""), kept))
        options = config.dtype, config.quantization, config.kv_cache_dtype
        model_name = str(config.model)[-250:]  # so that it fits into a segment's header, whatever it is written in
        about = {"model": model_name, "numbers": [o for o in options if o not in (None, "auto")]}
        text = json.dumps(about)
        spaces = [Space(key, BLOCK, runner.block_size, data.block_bytes, text)]
        spaces += [Space(key, STATE, 0, data.state_bytes, text)] if data.state_bytes else []
        kept.use(spaces)
        return kept, key

    try:
        kept, key = for_writing_or_reading(path, opened)
    except (OSError, sqlite3.Error) as error:
        logger.warning("prefix cache: %s cannot be used: %s", path, error)
        return None, b""
    store = DiskStore(kept)
    weakref.finalize(engine, store.close)  # at exit, too
    return store, bytes.fromhex(key)


def for_writing_or_reading(path: Path, opened: Callable[[bool], Result]) -> Result:
    """opened(True), or opened(False) if the directory cannot be written: another process may have locked its index."""
    try:
        return opened(True)
    except (OSError, sqlite3.OperationalError) as error:
        logger.warning("prefix cache: %s is read, and not written: %s", path, error)
        return opened(False)


def weight_stamps(directory: Path) -> dict[Path, str]:
    """Of a checkpoint's files, before they are loaded."""
    return {path: stamp_of(path) for path in weight_paths(directory)}


def digest_of(path: Path, stamp: str, kept: CacheDirectory) -> str:
    """Of a checkpoint's file, computed once. stamp: of what was loaded. Raises OSError for a file that has changed."""
    where = str(path.resolve())
    assert kept.index is not None
    digest = kept.index.digest(where, stamp) or file_digest(path)
    if stamp_of(path) != stamp:
        raise OSError(f"{path} has changed since its weights were loaded")
    if kept.is_writable:
        kept.index.keep_digest(where, stamp, digest)
    return digest
