"""Which kernels an engine on a GPU gets, and what it says about them; without a GPU."""

import importlib.util
import re
import sys
from types import ModuleType

import pytest
import torch

import nanovllm.worker.cuda
from nanovllm.config import EngineConfig
from nanovllm.worker.cuda.gpu_kernels import load_cuda_kernels
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from tests.pretend_gpu import pretend_gpu
from tests.worker.cuda.triton_interpreter import KERNELS

BF16 = torch.bfloat16


@pytest.fixture
def gpu():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (Linux only)")
    with pretend_gpu(with_flash_attn=True) as gpu:
        yield gpu


def load(gpu, head_dim: int = 64, dtype: torch.dtype = BF16, **options) -> tuple[Kernels, int | None]:
    return load_cuda_kernels(EngineConfig(model="-", **options), head_dim, dtype, gpu.device)


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
def test_choice_of_attention_and_why(gpu, caplog, options, head_dim, dtype, chosen):
    with caplog.at_level("INFO", "nanovllm"):
        kernels, block_size = load(gpu, head_dim, dtype, **options)
    [record] = caplog.records
    assert re.search(chosen, record.message)
    assert block_size == (256 if chosen == "flash-attn" else None)
    assert (kernels is TORCH_KERNELS) == chosen.startswith("PyTorch")


def no_compiler(*args: object) -> None:
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize("lacks", ["Triton", "a compiler"])
def test_triton_does_not_work(gpu, monkeypatch, caplog, lacks):
    """Its package is missing, or what it needs at its first launch: PyTorch does the work, and a warning says why."""
    with monkeypatch.context() as patch:
        if lacks == "Triton":
            patch.delattr(nanovllm.worker.cuda, "triton_kernels")
            patch.setitem(sys.modules, KERNELS, None)
        else:
            patch.setattr(sys.modules[KERNELS], "write_kv", no_compiler)
        assert load(gpu) == (TORCH_KERNELS, None)
    reason = "ModuleNotFoundError: " if lacks == "Triton" else "RuntimeError: Failed to find C compiler"
    assert f"attention: PyTorch, because Triton does not work here ({reason}" in caplog.text


@pytest.mark.parametrize("package", [None, ModuleType("flash_attn")], ids=["not installed", "another package"])
def test_flash_attn_that_cannot_be_imported(gpu, monkeypatch, caplog, package):
    """flash-attn 4 has the package's name, and not the function."""
    with monkeypatch.context() as patch, caplog.at_level("INFO", "nanovllm"):
        patch.setitem(sys.modules, "flash_attn", package)
        _, block_size = load(gpu)
    assert block_size is None
    assert "Triton, because flash-attn cannot be imported (" in caplog.text
