"""A vision tower's C kernels against what PyTorch and transformers compute."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from nanovllm.features.images import tower_kernels
from nanovllm.features.images.tower_kernels import ACTIVATIONS, bidirectional_attention, use_kernels
from nanovllm.worker.cpu import c_kernels
from nanovllm.worker.cpu.c_kernels import BIDIRECTIONAL_ROWS, load_cpu_kernels
from nanovllm.worker.cpu.threads import pytorch_threads

pytestmark = pytest.mark.compiler
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def kernels_of(num_heads: int, head_dim: int, dtype: torch.dtype):
    sizes = dict(num_attention_heads=num_heads, num_key_value_heads=num_heads, head_dim=head_dim, rotary_dim=head_dim)
    found = load_cpu_kernels(SimpleNamespace(**sizes), dtype, bidirectional=True)
    assert found is not None
    return found


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("num", "num_heads", "num_rows", "head_dim"), [(3, 2, 1, 16), (2, 3, 300, 72), (1, 2, 97, 80)])
def test_attention(num, num_heads, num_rows, head_dim, dtype):
    """Of whole images, and of those whose rows are padding here and there; also where a number is not finite."""
    attend = partial(bidirectional_attention, kernels_of(num_heads, head_dim, dtype))
    assert num_rows % BIDIRECTIONAL_ROWS, "a tile that is not full"
    q, k, v = random(3, num, num_heads, num_rows, head_dim, dtype=dtype)
    mask = random(num, 1, 1, num_rows) > -0.5
    mask[..., -1] = True
    for seen in (None, mask.expand(num, 1, num_rows, num_rows)):
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=seen).transpose(1, 2)
        assert torch.allclose(attend(q, k, v, seen).float(), expected, atol=CLOSE[dtype])
    v[0, 0, -1] = torch.inf
    assert not attend(q, k, v, None)[0, :, 0].isfinite().any()
    assert attend(q, k, v, None)[:, :, 1:].isfinite().all()


@pytest.mark.parametrize("head_dim", [24, 25])
def test_attention_where_pairs_of_bf16_pay(monkeypatch, head_dim):
    """As on AMD's processors, also for heads of an odd size: of theirs, a cache of pairs would lose the last number."""
    monkeypatch.setattr(c_kernels, "pairs_pay", lambda: True)
    q, k, v = random(3, 2, 2, 40, head_dim, dtype=torch.bfloat16)
    found = bidirectional_attention(kernels_of(2, head_dim, torch.bfloat16), q, k, v, None)
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float()).transpose(1, 2)
    assert torch.allclose(found.float(), expected, atol=CLOSE[torch.bfloat16])


class Layers(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.config = SimpleNamespace(vision_config=SimpleNamespace())
        for name, layer in layers.items():
            setattr(self, name, layer)


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "gelu_new", "quick_gelu", "silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(name, dtype):
    x = torch.cat([random(5, 173) * 3, torch.linspace(-200, 200, 173)[None]]).to(dtype)
    layers = Layers(act=ACT2FN[name])
    expected = layers.act(x.float())
    use_kernels(layers, kernels_of(1, 16, dtype))
    is_ours = isinstance(layers.act, tower_kernels.Activation)
    assert is_ours == (type(ACT2FN[name]).__name__ in ACTIVATIONS) == (name != "gelu")
    assert torch.allclose(layers.act(x.clone()).float(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "silu", "quick_gelu", "gelu", "mish", "tanh"])
def test_activations_on_any_number_of_threads(name):
    """PyTorch cuts so many numbers into shares, and computes those at a share's end in another way."""
    layers, found = Layers(act=ACT2FN[name]), []
    use_kernels(layers, kernels_of(1, 16, torch.float32))
    for num_threads in (1, 2, 3):
        with pytorch_threads(num_threads):
            found.append(layers.act(random(1001, 173)))
            assert torch.get_num_threads() == num_threads
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_and_products(dtype):
    """A convolution whose patches lie side by side is a product; one whose patches overlap stays PyTorch's."""
    layers = Layers(
        flat=nn.Conv2d(3, 20, kernel_size=4, stride=4, padding="valid"),
        deep=nn.Conv3d(3, 20, kernel_size=(2, 4, 4), stride=(2, 4, 4), bias=False),
        overlapping=nn.Conv2d(3, 20, kernel_size=4, stride=2),
        padded=nn.Conv2d(3, 20, kernel_size=4, stride=4, padding=1),
        linear=nn.Linear(30, 21),
    ).to(dtype)
    inputs = {name: random(2, 3, 16, 12, dtype=dtype) for name in ("flat", "overlapping", "padded")}
    inputs |= {"deep": random(2, 3, 4, 16, 12, dtype=dtype), "linear": random(2, 7, 30, dtype=dtype)}
    expected = {name: getattr(layers, name)(x) for name, x in inputs.items()}
    use_kernels(layers, kernels_of(1, 16, dtype))
    ours = {name for name in inputs if isinstance(getattr(layers, name), tower_kernels.TowerLinear)}
    assert ours == {"flat", "deep", "linear"}
    for name, x in inputs.items():
        found = getattr(layers, name)(x)
        assert found.shape == expected[name].shape
        assert torch.allclose(found, expected[name], atol=CLOSE[dtype])
