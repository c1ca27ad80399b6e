"""The KV cache: the size of its pool, and where a slot lies in it."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.worker.kv_cache import KVCache, num_blocks_for_pool
from tests.errors import expect

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # K and V, layers, tokens, KV heads, head_dim, float32


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({}, 10),
        (dict(max_num_seqs=2), 2 * 3),  # that many sequences of 40 tokens cannot use more
        (dict(num_gpu_blocks_override=77), 77),
        (dict(kv_cache_memory_bytes=5 * BLOCK_BYTES - 1), 4),
        (dict(kv_cache_memory_bytes=500 * BLOCK_BYTES), 500),
    ],
)
def test_num_blocks(checkpoint, options, num_blocks):
    """Of free memory for 10 blocks and a half."""
    sizes = ModelConfig.from_directory(checkpoint()), 16, 4, 40, BLOCK_BYTES * 21 // 2
    assert num_blocks_for_pool(EngineConfig(model="-", **options), *sizes) == num_blocks


def test_memory_that_is_used_up_before_the_pool_gets_any(checkpoint):
    sizes = ModelConfig.from_directory(checkpoint()), 16, 4, 40
    expect("0.9 is 3.0 MB too little even without", num_blocks_for_pool, EngineConfig(model="-"), *sizes, -3_000_000)


def test_layout(checkpoint):
    cache = KVCache(ModelConfig.from_directory(checkpoint()), 3, 16, torch.float32, torch.device("cpu"))
    assert cache.num_bytes == 3 * BLOCK_BYTES and not cache.data.any()
    cache.layers[1][0][2, 5] = 7.0  # K of layer 1, block 2, sixth token
    assert bool((cache.data[0, 1, 2, 5] == 7).all()) and int((cache.data == 7).sum()) == 2 * 16


def test_pool_decides_max_model_len_when_nobody_else_does(checkpoint):
    llm = LLM(str(checkpoint()), num_gpu_blocks_override=5)
    assert llm.engine.scheduler.max_model_len == 80
    expect("at most 79 fit", llm.generate, [[5] * 80])
    assert len(llm.generate([[5] * 79])[0].outputs[0].token_ids) == 1
