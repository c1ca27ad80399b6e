"""ModelRunner: its dtype, and a step that has nothing to write."""

import pytest
import torch

from nanovllm import LLM
from tests.checkpoints import edit
from tests.parity import check, greedy, make_prompts


def test_dtype_auto_is_the_checkpoints(broken):
    assert LLM(str(broken), num_gpu_blocks_override=64).engine.model_runner.dtype is torch.float32
    edit(broken / "config.json", dtype="bfloat16")
    assert LLM(str(broken), num_gpu_blocks_override=64).engine.model_runner.dtype is torch.bfloat16


@pytest.mark.parametrize("num_tokens", [16, 32])
def test_fully_cached_prompt_computes_one_token_and_writes_nothing(checkpoint, num_tokens):
    """A prompt that is a multiple of the block size: with every block cached there are zero tokens left to query."""
    folder = checkpoint("llama")
    llm = LLM(str(folder), dtype="float32", block_size=16, num_gpu_blocks_override=32)
    prompt = make_prompts(1, seed=5)[0] * num_tokens
    [cold] = llm.generate([prompt], greedy(1))
    before = llm.engine.model_runner.kv_cache.data.clone()
    computed = llm.stats()["num_prefill_tokens"]
    [warm] = llm.generate([prompt], greedy(1))
    assert llm.stats()["num_prefill_tokens"] - computed == 1
    assert warm.num_cached_tokens == num_tokens - 1
    assert torch.equal(before, llm.engine.model_runner.kv_cache.data)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    check(llm, folder, [prompt])
