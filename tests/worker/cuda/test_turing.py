"""A GPU before Ampere, such as the T4 of free notebooks: no bfloat16, PyTorch's attention. And a small one after it.

On a pretend GPU that follows these rules (tests/pretend_gpu.py).
"""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, LoRARequest
from nanovllm.worker.cuda import dtypes
from tests.checkpoints import edit, make_checkpoint
from tests.errors import expect
from tests.features.lora.adapters import make_adapter
from tests.marks import by_night
from tests.pretend_gpu import pretend_gpu
from tests.published_files import FORMATS, publish
from tests.worker.cuda.test_gpu_engine import FLASH, OPTIONS, PYTORCH, TRITON, tokens_of

T4 = (7, 5)
ANY_DTYPE = {name: value for name, value in OPTIONS.items() if name != "dtype"}


@pytest.fixture
def in_bfloat16(copy_of):
    """A copy of the Llama checkpoint whose weights, and whose config.json, are in bfloat16."""
    folder = copy_of("llama")
    to_bfloat16(folder)
    return folder


def to_bfloat16(folder, **changes) -> None:
    weights = {name: x.bfloat16() for name, x in load_file(folder / "model.safetensors").items()}
    save_file(weights | changes, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", dtype="bfloat16")


@pytest.mark.parametrize("optimizations", [PYTORCH, FLASH], ids=["pytorch", "all"])
def test_auto_is_float16(in_bfloat16, caplog, optimizations):
    expected, options = tokens_of(LLM(str(in_bfloat16), enforce_eager=True, **OPTIONS)), ANY_DTYPE | {"block_size": 256}
    with pretend_gpu(capability=T4, with_flash_attn=True), caplog.at_level(logging.INFO, "nanovllm"):
        llm = LLM(str(in_bfloat16), optimizations=optimizations, **options)
        assert llm.engine.model_runner.dtype == torch.float16 and tokens_of(llm) == expected
    assert "a pretend GPU (compute capability 7.5) does not compute in bfloat16: the dtype is float16" in caplog.text
    wanted = "attention: PyTorch, because the Triton kernels need an Ampere GPU or a later one"
    assert (wanted in caplog.text) == (optimizations is FLASH)


def test_a_later_gpu_takes_the_checkpoints_dtype(in_bfloat16):
    with pretend_gpu(capability=(8, 0)):
        assert LLM(str(in_bfloat16), optimizations=(), **ANY_DTYPE).engine.model_runner.dtype == torch.bfloat16


def test_the_gpu_would_refuse_it(in_bfloat16, monkeypatch):
    """What happens without the rule."""
    monkeypatch.setattr(dtypes, "AMPERE", T4)
    with pretend_gpu(capability=T4), pytest.raises(RuntimeError, match="multiplies nothing in bfloat16"):
        tokens_of(LLM(str(in_bfloat16), optimizations=(), **ANY_DTYPE))


def test_bfloat16_is_refused(in_bfloat16, checkpoint):
    with pretend_gpu(capability=T4):
        for folder in (in_bfloat16, checkpoint()):
            text = "7.5) does not compute in bfloat16; choose dtype='float16' or 'float32'"
            expect(text, LLM, str(folder), dtype="bfloat16", **ANY_DTYPE)


@pytest.mark.parametrize("name", [by_night("model.norm.weight"), "model.layers.1.mlp.down_proj.weight"])
def test_weights_beyond_float16(in_bfloat16, caplog, name):
    """Then auto is float32."""
    weight = load_file(in_bfloat16 / "model.safetensors")[name]
    weight[-1] = 1e5
    to_bfloat16(in_bfloat16, **{name: weight})
    expected = tokens_of(LLM(str(in_bfloat16), enforce_eager=True, **OPTIONS))
    with pretend_gpu(capability=T4):
        llm = LLM(str(in_bfloat16), optimizations=(), **ANY_DTYPE)
        assert llm.engine.model_runner.dtype == torch.float32 and tokens_of(llm) == expected
        expect("infinite in torch.float16", LLM, str(in_bfloat16), dtype="float16", optimizations=(), **ANY_DTYPE)
    assert f"{name} has numbers that float16 does not hold: the dtype is float32" in caplog.text


@pytest.mark.parametrize("dtype", [by_night("float16"), "float32"])
def test_attention_fits_in_shared_memory(tmp_path, monkeypatch, dtype):
    """Of a consumer GPU, with heads of 256 dimensions."""
    folder = make_checkpoint(tmp_path / "model", "llama", head_dim=256, num_hidden_layers=1)
    options = OPTIONS | dict(dtype=dtype, optimizations=TRITON)
    expected = tokens_of(LLM(str(folder), enforce_eager=True, **OPTIONS))
    with pretend_gpu(capability=(8, 6)):
        assert tokens_of(LLM(str(folder), **options)) == expected
        from nanovllm.worker.cuda import triton_kernels

        monkeypatch.setattr(triton_kernels, "tile_of", lambda block_dim, itemsize, shared: (128 // itemsize, 2))
        with pytest.raises(RuntimeError, match="out of resource: shared memory"):
            tokens_of(LLM(str(folder), **options))


def test_what_joins_the_model(in_bfloat16, checkpoint, tmp_path):
    """Adapters, drafts and published weights are computed in the same dtype."""
    path = make_adapter(tmp_path / "adapter", in_bfloat16, r=4, target_modules=["q_proj", "down_proj"])
    adapter = LoRARequest("one", 1, str(path))
    plain = tokens_of(LLM(str(in_bfloat16), enforce_eager=True, **OPTIONS))
    adapted = tokens_of(LLM(str(in_bfloat16), enforce_eager=True, enable_lora=True, **OPTIONS), lora_request=adapter)
    published, unpacked = publish(checkpoint("llama"), tmp_path, *FORMATS["awq"])
    edit(published / "config.json", dtype="bfloat16")
    unpacked_tokens = tokens_of(LLM(str(unpacked), enforce_eager=True, **OPTIONS))
    with pretend_gpu(capability=T4):
        options = ANY_DTYPE | dict(optimizations=())
        assert tokens_of(LLM(str(in_bfloat16), enable_lora=True, **options), lora_request=adapter) == adapted != plain
        config = {"model": str(in_bfloat16), "num_speculative_tokens": 1}
        drafting = LLM(str(in_bfloat16), speculative_config=config, **options)
        assert tokens_of(drafting) == plain
        assert tokens_of(LLM(str(published), **options)) == unpacked_tokens
