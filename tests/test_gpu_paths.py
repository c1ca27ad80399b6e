"""What can be checked of the GPU paths without a GPU: the choice of kernels, and decode graphs on a stand-in."""

import importlib.util
import random
import re
from importlib.machinery import ModuleSpec

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.worker.cuda import graphs as cuda_graphs
from nanovllm.worker.cuda.graphs import DecodeGraphs
from nanovllm.worker.cuda.kernels import load_cuda_kernels
from nanovllm.worker.kernels import TORCH_KERNELS

BF16 = torch.bfloat16


@pytest.fixture
def installed(monkeypatch):
    """Pretend that flash-attn can be imported; whether Triton can is true or false."""
    names = {"triton", "flash_attn"} if importlib.util.find_spec("triton") else {"flash_attn"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None) if name in names else None)
    return names


@pytest.mark.parametrize(
    ("options", "head_dim", "dtype", "chosen"),
    [
        ({}, 64, BF16, "flash-attn"),
        ({"block_size": 512}, 64, torch.float16, "flash-attn"),
        ({}, 64, torch.float32, "Triton, because flash-attn does not compute in torch.float32"),
        (
            {"block_size": 16},
            64,
            BF16,
            "Triton, because flash-attn needs a block_size that is a multiple of 256, .* 16",
        ),
        ({}, 260, BF16, "Triton, because flash-attn has no heads of 260 dimensions"),
        ({"optimizations": ("triton",)}, 64, BF16, "Triton, because flash-attn is switched off"),
        ({"optimizations": ("flash_attn",)}, 64, BF16, "PyTorch, because triton is switched off"),
    ],
)
def test_choice_of_attention_and_why(installed, caplog, options, head_dim, dtype, chosen):
    if "triton" not in installed:
        pytest.skip("triton is not installed (Linux only)")
    with caplog.at_level("INFO", "nanovllm"):
        kernels, block_size = load_cuda_kernels(EngineConfig(model="-", **options), head_dim, dtype)
    [record] = caplog.records
    assert re.search(chosen, record.message)
    assert block_size == (256 if chosen == "flash-attn" else None)
    assert (kernels is TORCH_KERNELS) == chosen.startswith("PyTorch")


def test_no_triton(installed, caplog):
    installed.discard("triton")
    with caplog.at_level("INFO", "nanovllm"):
        assert load_cuda_kernels(EngineConfig(model="-"), 64, BF16) == (TORCH_KERNELS, None)
    assert "PyTorch, because triton is not installed" in caplog.text


def recorded_on_cpu(forward, pool):
    """Like cuda_graphs.record: the result stays in one place, and replay() computes it from the buffers once more."""
    result = forward()
    return lambda: result.copy_(forward()), result, pool


def test_decode_graphs_compute_what_single_launches_do(checkpoint, monkeypatch):
    """Batches of 1 to 11, which lie on, between and beyond the sizes that were recorded; padding writes nothing."""
    monkeypatch.setattr(cuda_graphs, "record", recorded_on_cpu)
    monkeypatch.setattr(cuda_graphs, "LADDER", [1, 2, 4, 8])
    options = dict(dtype="float32", block_size=4, num_gpu_blocks_override=120, max_num_seqs=11, max_model_len=64)
    plain, graphed = LLM(str(checkpoint()), **options), LLM(str(checkpoint()), **options)
    runner = graphed.engine.model_runner
    with torch.inference_mode():
        graphs = DecodeGraphs(runner._forward, 8, 64, 4, runner.device)
    assert not runner.kv_cache.data.any(), "recording wrote to the cache"
    replayed = []

    def run(batch):
        logits = graphs_run(batch)
        replayed.append((batch.max_query_len, len(batch.seqlens_k), logits is not None))
        return logits

    graphs_run, graphs.run = graphs.run, run
    runner._graphs = graphs
    rng = random.Random(0)
    prompts = [rng.choices(range(10, 300), k=rng.randint(3, 20)) for _ in range(11)]
    params = [SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True) for i in range(11)]
    expected, found = plain.generate(prompts, params), graphed.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    torch.testing.assert_close(runner.kv_cache.data, plain.engine.model_runner.kv_cache.data, atol=1e-5, rtol=0)
    assert {size for _, size, was_replayed in replayed if was_replayed} == set(range(1, 9))
    assert all(was_replayed == (rows == 1 and size <= 8) for rows, size, was_replayed in replayed)
