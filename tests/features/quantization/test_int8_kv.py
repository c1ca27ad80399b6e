"""Keys and values of 8 bits: what is stored, attention to it against a dense twin, and what is refused."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
from tests.checkpoints import SMALL, reference_model
from tests.errors import expect
from tests.worker.cpu.test_kernels import TOLERANCE, dense_attention, ragged_batch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16  # as the tiny checkpoints have them


def kernels(dtype: torch.dtype):
    sizes = dict(num_key_value_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, rotary_dim=HEAD_DIM)
    config = SimpleNamespace(num_attention_heads=NUM_HEADS, **sizes)
    found = load_cpu_kernels(config, dtype, kv_int8=True)
    assert found is not None
    return found


def rounded(x: Tensor) -> Tensor:
    """What int8 leaves of heads [..., head_dim]: the scale is the largest magnitude / 127, rounded up to bf16."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    up = scale.bfloat16().float()
    up = torch.where(up < scale, (up.view(torch.int32) + (1 << 16)).view(torch.float32), up)
    return torch.where(up > 0, (x.float() / up.clamp_min(1e-38)).round() * up, 0)


def write(found, k: Tensor, v: Tensor) -> Tensor:
    """K and V [num_blocks, block_size, num_kv_heads, head_dim] as the kernel stores them: [2, ..., head_dim + 2]."""
    caches = torch.zeros(2, *k.shape[:3], HEAD_DIM + 2, dtype=torch.int8)
    batch = SimpleNamespace(slot_mapping=torch.arange(k.shape[0] * k.shape[1]), written=None)
    no_queries = k.new_zeros(k.shape[0] * k.shape[1], NUM_HEADS, HEAD_DIM)
    found.rotary_and_write(no_queries, k.flatten(0, 1), v.flatten(0, 1), None, tuple(caches), batch)
    return caches


@pytest.mark.compiler
@pytest.mark.parametrize(("window", "block_size"), [(0, 16), (9, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype, window, block_size):
    torch.manual_seed(0)
    found = kernels(dtype)
    batch, num_blocks = ragged_batch(block_size)
    k, v = (torch.randn(2, num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM) * torch.rand(NUM_KV_HEADS, 1) * 3).to(dtype)
    v[1, 2] = 0  # a scale that is 0
    q = torch.randn(len(batch.input_ids), NUM_HEADS, HEAD_DIM).to(dtype)
    out = found.paged_attention(q, *write(found, k, v), batch, window)
    expected = dense_attention(q, rounded(k), rounded(v), batch, window)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.compiler
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_lost(number):
    """A row that sees it is NaN; a row before it is as it was."""
    torch.manual_seed(0)
    found = kernels(torch.float32)
    batch, num_blocks = ragged_batch(16, [(0, 20)])
    k, v = torch.randn(2, num_blocks, 16, NUM_KV_HEADS, HEAD_DIM)
    q = torch.randn(20, NUM_HEADS, HEAD_DIM)
    sound = found.paged_attention(q, *write(found, k, v), batch, 0)
    v[int(batch.block_tables[0, 0]), 10, :, 3] = number
    out = found.paged_attention(q, *write(found, k, v), batch, 0)
    assert torch.equal(out[:10], sound[:10]) and not out[10:, :, 3].isfinite().any()


@pytest.mark.compiler
def test_half_the_memory(checkpoint):
    sizes = [LLM(str(checkpoint()), dtype="bfloat16", **SMALL, kv_cache_dtype=kind) for kind in ("auto", "int8")]
    whole, half = (llm.stats()["kv_pool"]["num_bytes"] for llm in sizes)
    head_dim = ModelConfig.from_directory(checkpoint()).head_dim
    assert half / whole == (head_dim + 2) / (2 * head_dim)


# Where large biases are -> (kind of checkpoint, {layer: their size}).
BIASES: dict[str, tuple[str, dict[int, float]]] = {
    "all layers": ("qwen2", {0: 300.0, 1: 150.0}),
    "one layer": ("qwen2", {1: 200.0}),
    "of a Llama, negative": ("llama-biases", {0: -100.0, 1: 100.0}),
}


def give_biases(folder: Path, sizes: dict[int, float]) -> None:
    """To one number of each key in these layers, and a smaller one to another."""
    weights = load_file(folder / "model.safetensors")
    for layer, size in sizes.items():
        heads = weights[f"model.layers.{layer}.self_attn.k_proj.bias"].view(NUM_KV_HEADS, HEAD_DIM)
        heads[:, 5] = size
        heads[0, 14] = size / 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def error_of_keys(folder: Path) -> float:
    """What rounding leaves out of transformers' keys, relative to what they are without their biases."""
    model, errors = reference_model(folder), []
    projected: dict[int, Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        projection = layer.self_attn.k_proj
        projection.register_forward_hook(
            lambda module, inputs, y, number=number: projected.update({number: y - module.bias})
        )
    ids = torch.randint(4, 320, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    for number, rest in projected.items():
        keys = cache.layers[number].keys[0].transpose(0, 1)  # [tokens, heads, head_dim]
        off, rest = (rounded(keys) - keys), rest.view(-1, NUM_KV_HEADS, HEAD_DIM)
        errors += [float(off[:, head].norm() / rest[:, head].norm()) for head in range(NUM_KV_HEADS)]
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5


@pytest.mark.compiler
@pytest.mark.parametrize("where", BIASES)
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=["", "int8 weights"])
def test_large_biases_of_keys_are_told(copy_of, caplog, where, options):
    variant, sizes = BIASES[where]
    folder = copy_of(variant)
    give_biases(folder, sizes)
    LLM(str(folder), **SMALL, kv_cache_dtype="int8", **options)
    [said] = re.findall(r"int8 keys cost .* rounding error is (\d+) %", caplog.text)
    assert int(said) == pytest.approx(100 * error_of_keys(folder), rel=0.2) and int(said) > 5


@pytest.mark.compiler
def test_of_other_keys_nothing_is_told(checkpoint, copy_of, caplog):
    for variant in ("llama", "qwen2", "qwen3", "qwen3.5"):
        LLM(str(checkpoint(variant)), **SMALL, kv_cache_dtype="int8")
    folder = copy_of("qwen2")
    give_biases(folder, {0: 10.0})
    LLM(str(folder), **SMALL, kv_cache_dtype="int8")
    give_biases(folder, {0: 300.0})
    LLM(str(folder), **SMALL)
    assert "int8 keys" not in caplog.text


def test_what_is_refused(checkpoint):
    for name in ("fp8", "fp8_e4m3"):
        expect(f"kv_cache_dtype='{name}' is not supported; 'int8'", LLM, str(checkpoint()), kv_cache_dtype=name)
    expect("kv_cache_dtype must be", LLM, str(checkpoint()), kv_cache_dtype="int3")
    expect("needs the C kernels", LLM, str(checkpoint()), kv_cache_dtype="int8", enforce_eager=True)
