"""How many blocks the KV pool gets, and how long one sequence may be, with the room that there is (chapter 3)."""

import logging
from numbers import Integral
from typing import Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import check_number
from nanovllm.config import EngineConfig

logger = logging.getLogger("nanovllm")

MAX_NUM_BLOCKS = 2**22  # each is a Python object of the block manager


def num_blocks_for_pool(
    config: EngineConfig, model: ModelConfig, block_size: int, itemsize: int, max_model_len: int, free_bytes: int
) -> int:
    """Blocks of the pool. itemsize: bytes of a number. free_bytes: memory that may be used for it, as it was measured.

    Raises ValueError when not one block fits, or more are asked for than any machine holds.
    """
    block_bytes = block_size * model.kv_bytes_per_token(itemsize)
    pool_bytes = free_bytes if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    num_blocks = pool_bytes // block_bytes
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif num_blocks < 1:
        raise ValueError(
            f"the KV pool gets {pool_bytes / 1e6:.1f} MB and one block of {block_size} tokens needs "
            f"{block_bytes / 1e6:.1f} MB; free some memory or raise kv_cache_memory_bytes"
        )
    elif config.kv_cache_memory_bytes is None:
        # No more than max_num_seqs sequences of max_model_len can use; more would only keep cached prefixes longer.
        num_blocks = min(num_blocks, config.max_num_seqs * -(-max_model_len // block_size))
    check_number("the size of the KV pool in bytes", num_blocks * block_bytes, Integral)
    return check_number("the size of the KV pool in blocks", num_blocks, Integral, 1, MAX_NUM_BLOCKS)


def check_pool(config: EngineConfig, num_blocks: int, block_size: int, max_model_len: int) -> int:
    """The tokens that one sequence may have in this pool, max_model_len at most.

    Raises ValueError if the caller has asked for more than the pool holds.
    """
    num_tokens = num_blocks * block_size
    if num_tokens >= max_model_len:
        return max_model_len
    if config.max_model_len is not None or num_tokens < 2:
        raise ValueError(
            f"one sequence of max_model_len={max_model_len} tokens does not fit in the KV pool of "
            f"{num_blocks} blocks x {block_size} tokens; lower max_model_len or enlarge the pool "
            "(kv_cache_memory_bytes, num_gpu_blocks_override)"
        )
    logger.info("max_model_len %d -> %d: what the KV pool holds", max_model_len, num_tokens)
    return num_tokens


def log_pool(runner: Any) -> None:
    """Say how large the pool of a ModelRunner is, and which bits it promises."""
    size = f"{runner.num_blocks * runner.block_size} tokens, {runner.kv_cache.num_bytes / 1e6:.1f} MB"
    blocks = f"{runner.num_blocks} blocks of {runner.block_size}"
    logger.info("KV pool: %s = %s in %s; max_model_len %d", blocks, size, runner.kv_dtype, runner.max_model_len)
    logger.info("The same bits in any company: %s", runner.same_bits)
