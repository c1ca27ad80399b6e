"""How long one sequence may be, with what the machine has room for (chapter 3)."""

import logging

from nanovllm.config import EngineConfig

logger = logging.getLogger("nanovllm")


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
