"""EngineConfig: options that no engine can have, those included that only the checkpoint or the pool rules out."""

import pytest

from nanovllm import LLM
from tests.errors import expect


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(max_model_length=5), "LLM has no argument 'max_model_length' (found 5); did you mean 'max_model_len'?"),
        (dict(dtype="int8"), "dtype must be one of"),
        (dict(max_num_seqs=0), "max_num_seqs must be a whole number between 1 and 2147483647"),
        (dict(block_size=-1), "block_size must be a whole number"),
        (dict(gpu_memory_utilization=90), "gpu_memory_utilization must be a number between"),
        (dict(prefix_caching_hash_algo="md5"), "prefix_caching_hash_algo must be one of xxh64, sha256"),
        (dict(enable_prefix_caching="no"), "enable_prefix_caching must be True or False"),
        (dict(max_model_len=100_000), "max_model_len=100000 is more than the model's 512 positions"),
        (dict(max_model_len=512, num_gpu_blocks_override=5), "does not fit in the KV pool of 5 blocks x 16 tokens"),
        (dict(max_model_len=512, kv_cache_memory_bytes=100_000), "does not fit in the KV pool"),
        (dict(max_num_batched_tokens=2**31), "max_num_batched_tokens must be a whole number between 1 and 2147483647"),
        (dict(seed=10**400), "seed must be a whole number between"),
        (dict(kv_cache_memory_bytes=2**63), "kv_cache_memory_bytes must be a whole number between"),
        (dict(kv_cache_memory_bytes=2**62), "the size of the KV pool in blocks must be"),
        (dict(num_gpu_blocks_override=2**20, block_size=2**31 - 1), "of memory for the KV pool"),
        (dict(num_gpu_blocks_override=2**31 - 1, block_size=2**31 - 1), "the size of the KV pool in bytes must be"),
        (dict(num_gpu_blocks_override=2**25), "the size of the KV pool in blocks must be a whole number between 1 and"),
        (dict(prefix_caching_hash_algo=["xxh64"]), "prefix_caching_hash_algo must be one of"),
        (dict(optimizations=5), "optimizations must be a list of names"),
        (dict(optimizations=("magic",)), "optimizations must be one of reordered_weights"),
        (dict(model=""), "model must be a checkpoint's directory or a hub id, found ''"),
        (dict(model=None), "model must be a checkpoint's directory"),
        (dict(kv_cache_memory_bytes=10), "one block of 16 tokens needs"),
        (dict(num_gpu_blocks_override=1, block_size=1), "does not fit in the KV pool"),
    ],
)
def test_engine_options(checkpoint, options, text):
    expect(text, LLM, **{"model": str(checkpoint())} | options)
