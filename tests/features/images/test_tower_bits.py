"""A tower whose linear layers have 8 bits: what is computed, from its kernels to an answer."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm import LLM
from nanovllm.features.images.tower_kernels import TowerLinear, use_kernels
from nanovllm.features.quantization.formats import MergedWeight, QuantizedWeight, quantize_q8_0, quantized_linear
from nanovllm.worker.cpu.memory import REGION
from nanovllm.worker.cpu.threads import pytorch_threads
from tests.features.images.test_images import GREEDY, OPTIONS, A, B, image_of, prompt_of
from tests.features.images.test_tower_kernels import Layers, kernels_of, random
from tests.image_checkpoints import KINDS, make_image_checkpoint

pytestmark = pytest.mark.compiler
INT8 = OPTIONS | {"tower_quantization": "int8"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_that_of_chapter_12(dtype, bias):
    """And little else is: a convolution that cuts into patches stays as it was."""
    layers = Layers(linear=nn.Linear(70, 45, bias=bias), patches=nn.Conv2d(3, 20, kernel_size=4, stride=4)).to(dtype)
    weight = MergedWeight([QuantizedWeight.of(quantize_q8_0(layers.linear.weight.detach()))])
    x, before = random(2, 7, 70, dtype=dtype), layers.linear
    expected = quantized_linear(x.flatten(0, 1), weight, before.bias)
    use_kernels(layers, kernels_of(1, 16, dtype), "int8")
    assert isinstance(layers.linear, TowerLinear) and isinstance(layers.linear.operand, MergedWeight)
    found = layers.linear(x)
    assert found.shape == (2, 7, 45) and found.dtype == dtype
    assert torch.allclose(found.flatten(0, 1), expected, atol=1e-5 if dtype is torch.float32 else 1e-2)
    assert torch.allclose(found, before(x), atol=2e-2)
    assert isinstance(layers.patches.operand, torch.Tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_an_image(kind, folder_of):
    """Near those of the whole weights, and the same bits with any number of threads."""
    plain, llm = LLM(str(folder_of(kind)), **OPTIONS), LLM(str(folder_of(kind)), **INT8)
    prompt = prompt_of(kind, "in ", A, " fox")
    image = image_of(llm, prompt)
    plain.generate(prompt, GREEDY, use_tqdm=False)  # reads the tower
    whole, tower = (each.engine.model_runner.parts["tower"] for each in (plain, llm))
    assert tower.num_bytes < 0.6 * whole.num_bytes
    assert not len(REGION.left), "memory that weights have left is kept"
    found = []
    for num_threads in (1, 2, 3):
        with pytorch_threads(num_threads):
            found.append(tower._run(image))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    error = (found[0] - whole._run(image)).norm() / found[0].norm()
    assert 0 < error < 0.03
    [cold], [cached] = (llm.generate(prompt, GREEDY, use_tqdm=False) for _ in range(2))
    assert cached.num_cached_tokens > 0 and cold.outputs[0].token_ids == cached.outputs[0].token_ids


def test_a_directory_of_another_tower(folder_of, tmp_path):
    """The same pictures, and K/V that differ: neither engine finds what the other has left."""
    prompt, kept = prompt_of("smolvlm", "two ", B, " gulls"), {"prefix_cache_dir": str(tmp_path)}

    def num_cached(options: dict) -> int:
        llm = LLM(str(folder_of("smolvlm")), **options | kept)
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        llm.engine.tiers.disk.close()
        return output.num_cached_tokens

    assert [num_cached(options) > 0 for options in (OPTIONS, INT8, OPTIONS, INT8)] == [False, False, True, True]


@pytest.mark.nightly
def test_two_ranks(folder_of, processes):
    prompt, folder = prompt_of("smolvlm", "in ", A, " fox"), folder_of("smolvlm")
    llms = LLM(str(folder), **INT8), processes.llm(folder, 2, **INT8)
    [one], [two] = (llm.generate(prompt, GREEDY, use_tqdm=False) for llm in llms)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids


def test_what_cannot_be_had(checkpoint, folder_of, tmp_path):
    """Said when the engine is made, before anybody asks about a picture."""
    with pytest.raises(ValueError, match="sees no images; leave out tower_quantization"):
        LLM(str(checkpoint()), tower_quantization="int8")
    with pytest.raises(ValueError, match="tower_quantization"):
        LLM(str(folder_of("smolvlm")), tower_quantization="int4")
    with pytest.raises(ValueError, match="needs the C kernels of a CPU"):
        LLM(str(folder_of("smolvlm")), **INT8, enforce_eager=True)
    folder = make_image_checkpoint(tmp_path, "smolvlm")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.fc1.weight"))
    weights[name].view(-1)[5] = 1e8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"mlp\.fc1\.weight has numbers that are .* too large for a float16 scale"):
        LLM(str(folder), **INT8)
