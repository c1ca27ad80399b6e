"""Which kernels an engine on a GPU gets, and what it says about them; without a GPU."""

import importlib.util
import re
from importlib.machinery import ModuleSpec

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.worker.cuda.gpu_kernels import load_cuda_kernels
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
