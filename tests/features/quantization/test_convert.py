"""How weights get 8 and 4 bits: rounding by search, in PyTorch and in C; which are kept in 8 bits; bad numbers."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributions import Laplace, StudentT

from nanovllm import LLM
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.quantization import importance as calibration
from nanovllm.features.quantization.convert import INT8_SHARE, names_in_8_bits
from nanovllm.features.quantization.formats import Q4_1, Q8_0, QuantizedRows, in_groups
from nanovllm.features.quantization.q4_1_search import quantize_q4_1, search_q4_1
from nanovllm.features.quantization.quantized_kernels import kernels_for
from nanovllm.files.tensor_files import WeightFiles
from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.layers import Linear, RotaryEmbedding
from nanovllm.worker.loader import load_model
from nanovllm.worker.model import Decoder
from tests.checkpoints import VARIANTS
from tests.marks import by_night
from tests.worker.cpu.test_kernels import kernels

DISTRIBUTIONS = {
    "Gaussian": torch.randn,
    "t, 3 degrees": lambda *shape: StudentT(3.0).sample(shape),
    "t, 5 degrees": lambda *shape: StudentT(5.0).sample(shape),
    "Laplace": lambda *shape: Laplace(0.0, 1.0).sample(shape),
}


@pytest.fixture(params=["PyTorch", "C"])
def search(request):
    return search_q4_1 if request.param == "PyTorch" else kernels_for(kernels(torch.float32)).search_q4_1


def errors(groups: QuantizedRows, weight: Tensor, importance: Tensor) -> Tensor:
    """Weighted squared error of each group."""
    return in_groups((groups.dequantize().double() - weight).square() * importance).sum(-1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_error_is_a_fifth_below_that_of_the_gguf_package(search, distribution):
    torch.manual_seed(0)
    weight = DISTRIBUTIONS[distribution](512, 1024) / 30
    packed = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
    theirs = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1))
    ours = search(weight, torch.ones(1024)).dequantize()
    assert (ours - weight).square().mean() < 0.8 * (theirs - weight).square().mean()


def test_error_counts_where_the_inputs_are_large(search):
    torch.manual_seed(0)
    weight, importance = torch.randn(64, 256), torch.randn(256).exp().square()
    weighted, nearest = search(weight, importance), quantize_q4_1(weight)
    assert errors(weighted, weight, importance).sum() < 0.6 * errors(nearest, weight, importance).sum()
    one = torch.full((256,), 1e-4)
    one[40] = 1000  # as the inputs of a few channels are
    found = search(weight, one).dequantize() - weight
    assert (
        found[:, 40].abs().max() < 0.01
        and found.square().mean() < 1.5 * errors(nearest, weight, one * 0 + 1).mean() / 32
    )


def strange_groups() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(14, 32)
    x[0], x[1], x[2], x[3] = 0, 0.75, -1e-30, 6e4
    x[4] *= 1e-7  # a denormal scale
    x[5] *= 1e-42
    x[6] *= 1e4
    x[7, 5] = 1e3
    x[8, :31], x[8, 31] = 2, -2
    x[9] = torch.linspace(-65504, 65504, 32)
    x[10] = x[10].abs() + 100
    x[11], x[11, 3] = 0, 1e-20
    return x


def test_no_group_is_worse_than_with_nearest_rounding(search):
    """Strange groups, alone and in one row with ordinary ones; ordinary ones of every size of the last group."""
    strange = strange_groups()
    for weight in (
        strange,
        torch.cat([strange, torch.randn(14, 50)], dim=1),
        *(torch.randn(3, k) for k in range(1, 67)),
    ):
        for importance in (torch.ones(weight.shape[1]), torch.rand(weight.shape[1]) ** 8 * 1000 + 1e-4):
            groups = search(weight, importance), quantize_q4_1(weight)
            found, nearest = (errors(g, weight, importance) for g in groups)
            assert found.isfinite().all()
            assert (found <= nearest * (1 + 1e-5) + 1e-30).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_fitted_line_beyond_float16_stays_finite(search, sign):
    torch.manual_seed(0)
    weight = sign * (65504 - torch.rand(512, 64) ** 4 * 40_000)
    weight[:, 0] = sign * 65504
    importance = torch.rand(64) ** 6 + 1e-4
    groups = search(weight, importance), quantize_q4_1(weight)
    found, nearest = (errors(g, weight, importance) for g in groups)
    assert found.isfinite().all() and (found <= nearest * (1 + 1e-5)).all()


@pytest.mark.parametrize("n, k", [(1, 32), (7, 20), (16, 96), (33, 100), (300, 1000)])
def test_search_in_c_finds_what_the_one_in_pytorch_finds(n, k):
    torch.manual_seed(n)
    weight, importance = StudentT(4.0).sample((n, k)), torch.randn(k).exp().square()
    search_in_c = kernels_for(kernels(torch.float32)).search_q4_1
    in_c, in_pytorch = (search(weight, importance) for search in (search_in_c, search_q4_1))
    assert (in_c.scales - in_pytorch.scales).abs().gt(1e-3).float().mean() < 0.05  # two ranges may be equally good
    ratio = errors(in_c, weight, importance).sum() / errors(in_pytorch, weight, importance).sum()
    assert ratio == pytest.approx(1, abs=2e-3)


def test_columns_of_a_larger_weight(search):
    """A rank's share of a GGUF file is not copied."""
    torch.manual_seed(0)
    whole = torch.randn(5, 128)
    share, copy = (search(x, torch.ones(64)) for x in (whole[:, 32:96], whole[:, 32:96].clone()))
    assert torch.equal(share.dequantize(), copy.dequantize())


def test_weights_that_have_4_bits_come_back(search):
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (64, 8, 16), dtype=torch.uint8)
    codes[..., 0], codes[..., 1] = 0x0F, 0xF0  # both ends are there, as in every file
    groups = QuantizedRows(Q4_1, 256, codes, torch.rand(64, 8).half() / 100 + 0.001, torch.randn(64, 8).half() / 30)
    weight = groups.dequantize()
    again = search(weight.bfloat16(), torch.rand(256) + 0.1)
    assert (again.dequantize() - weight).square().mean() < (weight.bfloat16() - weight).square().mean()
    assert (again.codes == groups.codes).float().mean() > 0.99


IN_PYTORCH = "llama", "qwen3.5-moe"  # by day, without the C kernels: a plain model, and one with all kinds of layers


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("variant", "in_c"),
    [
        *((variant, True) for variant in VARIANTS),
        *((variant, False) if variant in IN_PYTORCH else by_night(variant, False) for variant in VARIANTS),
    ],
)
def test_importance_is_the_mean_square_of_what_a_layer_is_given(checkpoint, variant, in_c, monkeypatch):
    folder = checkpoint(variant)
    config = ModelConfig.from_directory(folder)
    # The embedding of padding, 1, is 0: a norm makes much of what rounding leaves there, and other experts are chosen.
    batch = calibration.random_batch(config.vocab_size)
    batch = replace(batch, input_ids=batch.input_ids.where(batch.input_ids != 1, 2))
    monkeypatch.setattr(calibration, "random_batch", lambda vocab_size: batch)
    model = load_model(folder, config, torch.float32, torch.device("cpu"))
    whole = dict(Decoder(config).checkpoint_tensors())
    with torch.inference_mode():
        importance = calibration.measure_importance(
            model,
            WeightFiles(folder, config, whole, False).read,
            config,
            Decoder,
            load_cpu_kernels(config, torch.float32) if in_c else TORCH_KERNELS,
        )
        seen: dict[Linear, Tensor] = {}
        for layer in calibration.linears_of(model):
            layer.product = calibration.measuring_product(layer, seen, TORCH_KERNELS)
        batch = replace(batch, logits_rows=torch.arange(len(batch.input_ids)))
        rotary = RotaryEmbedding(config, calibration.SEQ_LEN, torch.float32, torch.device("cpu"))
        sizes = calibration.NUM_SEQS, calibration.SEQ_LEN, config.num_key_value_heads, config.head_dim
        pool = type("Pool", (), {"layers": torch.zeros(config.num_hidden_layers, 2, *sizes)})
        model.logits(model(batch, rotary, pool, TORCH_KERNELS))
    num_experts = config.num_experts * len(config.expert_layers)
    num_layers = 2 * config.num_hidden_layers + 2 * (config.num_hidden_layers - len(config.expert_layers)) + 1
    num_experts += len(config.expert_layers) * bool(config.shared_expert_intermediate_size)
    assert importance.keys() == seen.keys() and len(seen) == num_layers + 2 * num_experts
    for layer, expected in seen.items():
        assert torch.allclose(importance[layer], expected / expected.mean() + calibration.LEAST_IMPORTANCE, rtol=1e-3)


def test_random_tokens_are_of_the_vocabulary_and_low_ids_more_often():
    for vocab_size in (1, 5, 320, 151_936):
        ids = calibration.random_batch(vocab_size).input_ids
        assert ids.min() >= 0 and ids.max() < vocab_size
    assert (ids < 8000).float().mean() > 0.4 and (ids > 100_000).any()


def test_importance_of_inputs_that_are_all_zero_or_not_numbers_is_even():
    for mean_squares in (torch.zeros(3), torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([1.0, torch.inf, 2.0])):
        importance = calibration.relative(mean_squares)
        assert importance.isfinite().all() and (importance > 0).all()


def sizes_of(config: ModelConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        return dict(Decoder(config).checkpoint_tensors())


@pytest.fixture
def config(checkpoint) -> ModelConfig:
    """Of Qwen2.5-0.5B's shape."""
    sizes = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, vocab_size=151_936)
    heads = dict(num_attention_heads=14, num_key_value_heads=2, head_dim=64)
    return replace(ModelConfig.from_directory(checkpoint("qwen2")), **sizes, **heads)


def test_what_is_kept_in_8_bits(config):
    """Keys and values; the MLP of the first and the last layer; then down_proj, from the ends to the middle."""
    names = names_in_8_bits(sizes_of(config), 24)
    kinds = {kind: sorted(int(n.split(".")[2]) for n in names if kind in n) for kind in "k_ v_ up_ gate_ down_".split()}
    assert kinds["k_"] == kinds["v_"] == list(range(24))
    assert kinds["up_"] == kinds["gate_"] == [0, 23]
    assert {0, 1, 2, 22, 23} <= set(kinds["down_"]) and 12 not in kinds["down_"]
    assert sum(map(len, kinds.values())) == len(names)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_kv_heads", [2, 14])
def test_what_is_kept_in_8_bits_fits_the_memory_bar(config, tied, num_kv_heads):
    places = sizes_of(replace(config, tie_word_embeddings=tied, num_key_value_heads=num_kv_heads))
    names = names_in_8_bits(places, 24)
    total = sum(p.numel() for n, p in places.items() if p.dim() == 2 and (tied or "embed" not in n))
    assert 0.9 * INT8_SHARE < sum(places[name].numel() for name in names) / total <= INT8_SHARE


def test_formats_of_a_quantized_model(checkpoint, caplog):
    for quantization in ("int8", "int4"):
        caplog.clear()
        llm = LLM(str(checkpoint()), dtype="float32", quantization=quantization)
        runner = llm.engine.model_runner
        formats = [[part.format for part in layer.weight.parts] for layer in calibration.linears_of(runner.model)]
        if quantization == "int8":
            assert formats == [[Q8_0]] * len(formats)
        else:
            assert [Q4_1, Q8_0] in formats and formats[-1] == [Q4_1]  # q beside k and v; the head
        said = [record.levelname for record in caplog.records if "perplexity" in record.message]
        assert said == ["WARNING"] * (quantization == "int4")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("number", [float("nan"), float("-inf"), 1e6])
@pytest.mark.parametrize(
    "name", [f"model.layers.{x}_proj.weight" for x in ("1.self_attn.v", "0.mlp.up")] + ["lm_head.weight"]
)
def test_numbers_that_no_scale_holds_are_an_error_that_names_the_tensor(broken, name, number, quantization):
    weights = load_file(broken / "model.safetensors")
    weights[name][3, 5] = number
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} has numbers that are NaN, infinite or too large"):
        LLM(str(broken), dtype="float32", quantization=quantization)


@pytest.mark.nightly
def test_memory_share_of_the_demo_model(demo_checkpoint: Path):
    config = ModelConfig.from_directory(demo_checkpoint)
    numbers = sum(place.numel() for place in sizes_of(config).values())
    for quantization, share in (("int8", 0.535), ("int4", 0.34)):
        in_c = kernels(torch.bfloat16)
        model = load_model(
            demo_checkpoint, config, torch.bfloat16, torch.device("cpu"), quantization=quantization, kernels=in_c
        )
        held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        assert held < share * 2 * numbers
