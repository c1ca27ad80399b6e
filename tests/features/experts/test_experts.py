"""Experts: the router, the rows grouped by expert, and the grouped products against a loop."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.experts.layer import Experts, Router
from nanovllm.features.experts.rows import ExpertKernels, ExpertRows, ExpertWeights, kernels_for, route, sort_by_expert
from nanovllm.features.quantization.formats import MergedWeight, QuantizedWeight, quantize_q8_0, quantized_linear
from nanovllm.features.quantization.q4_1_search import search_q4_1
from nanovllm.features.quantization.quantized_kernels import kernels_for as quantized_kernels_for
from nanovllm.worker.layers import Linear
from tests.checkpoints import assert_greedy, edit, make_checkpoint
from tests.errors import expect
from tests.worker.cpu.test_kernels import kernels

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("in_c", [False, True])
def test_route(in_c, normalize):
    scores = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    choose = kernels_for(kernels(torch.bfloat16)).route if in_c else route
    weights, chosen = choose(scores.bfloat16(), 3, normalize)
    assert weights.dtype == torch.float32
    for row, row_weights, row_chosen in zip(scores.bfloat16().double(), weights, chosen, strict=True):
        probabilities = row.exp() / row.exp().sum()
        best = sorted(range(6), key=lambda e: -row[e])[:3]
        assert row_chosen.tolist() == best
        expected = probabilities[best] / (probabilities[best].sum() if normalize else 1)
        torch.testing.assert_close(row_weights.double(), expected, atol=1e-6, rtol=0)


def test_a_route_in_c():
    """Many experts; equal scores: the first ones; a row with NaN has weights that are NaN, and experts that exist."""
    choose = kernels_for(kernels(torch.float32)).route
    scores = torch.randn(50, 130, generator=torch.Generator().manual_seed(0)) * 5
    found, expected = choose(scores, 8, True), route(scores, 8, True)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0], atol=1e-6, rtol=1e-5)
    assert choose(torch.zeros(1, 130), 8, False)[1].tolist() == [list(range(8))]
    scores[3, 7] = torch.nan
    weights, chosen = choose(scores, 8, True)
    assert weights[3].isnan().all() and sorted(chosen[3].unique().tolist()) == sorted(chosen[3].tolist())
    assert chosen[3].min() >= 0 and chosen[3].max() < 130 and not weights[4].isnan().any()


@pytest.mark.parametrize("how", ["PyTorch", "C"])
def test_sort_by_expert(how):
    chosen = torch.tensor([[3, 0], [0, 5], [3, 5], [3, 0]])
    sort = sort_by_expert if how == "PyTorch" else kernels_for(kernels(torch.float32)).sort_by_expert
    groups = sort(chosen, 8)
    assert groups.order.tolist() == [0, 3, 5, 1, 2, 4, 6, 7] and groups.ends.tolist() == [3, 6, 8, 8, 8, 8, 8, 8]
    assert groups.rows.tolist() == [0, 1, 3, 0, 2, 3, 1, 2]
    for row, places in enumerate(groups.places.tolist()):
        for choice, place in enumerate(places):
            assert groups.rows[place] == row
            assert groups.order[int((groups.ends <= place).sum())] == chosen[row, choice]


def layers(num: int, n: int, k: int, dtype: torch.dtype) -> list[Linear]:
    made = [Linear(k, n, bias=False).to(dtype) for _ in range(num)]
    for layer in made:
        layer.weight.data.normal_(std=k**-0.5)
    return made


SHAPES = [(1, 1), (1, 3), (9, 2), (40, 8), (300, 3)]  # rows, experts that each chooses, of 8


def random_groups(num_rows: int, num_chosen: int) -> ExpertRows:
    return sort_by_expert(torch.stack([torch.randperm(8)[:num_chosen] for _ in range(num_rows)]), 8)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_rows", "num_chosen"), SHAPES)
@torch.inference_mode()
def test_expert_linear(dtype, num_rows, num_chosen):
    torch.manual_seed(0)
    ours, weights = kernels(dtype), ExpertWeights(layers(8, 96, 64, dtype))
    groups = random_groups(num_rows, num_chosen)
    x = torch.randn(num_rows, 64).to(dtype)[groups.rows]
    expected = ExpertKernels().expert_linear(x, weights, groups)
    for layer in weights.linears:
        if (reordered := ours.reorder_weight(layer.weight)) is not None:
            layer.weight, layer.product = torch.nn.Parameter(reordered), ours.linear
    torch.testing.assert_close(
        kernels_for(ours).expert_linear(x, weights, groups), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("form", ["Q8_0", "Q4_1", "mixed"])
@pytest.mark.parametrize(("num_rows", "num_chosen"), SHAPES)
@torch.inference_mode()
def test_expert_linear_of_quantized_weights(form, num_rows, num_chosen):
    """300 rows of 3 experts fill several slabs; a row's result is the same to the last bit wherever it stands."""
    torch.manual_seed(0)
    ours, weights = kernels(torch.float32), ExpertWeights(layers(8, 80, 72, torch.float32))
    for layer in weights.linears:
        rows = layer.weight.data.split((48, 32))
        make = {"Q8_0": [quantize_q8_0] * 2, "mixed": [quantize_q8_0, to_q4_1], "Q4_1": [to_q4_1] * 2}[form]
        del layer.weight
        parts = [quantize(part) for quantize, part in zip(make, rows, strict=True)]
        layer.weight = MergedWeight(map(QuantizedWeight.of, parts))
        layer.product = quantized_linear
    groups = random_groups(num_rows, num_chosen)
    x = torch.randn(num_rows, 72)[groups.rows]
    expected = ExpertKernels().expert_linear(x, weights, groups)
    in_c = quantized_kernels_for(ours).quantized_linear
    for layer in weights.linears:
        layer.product = in_c
    found = kernels_for(ours).expert_linear(x, weights, groups)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    start = 0
    for expert, num_rows in groups.counts:
        alone = in_c(x[start : start + num_rows], weights.linears[expert].weight, None)
        assert torch.equal(found[start : start + num_rows], alone)
        start += num_rows


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_weighted_sum(dtype):
    torch.manual_seed(0)
    groups, weights = random_groups(13, 3), torch.rand(13, 3)
    x = torch.randn(39, 37).to(dtype)
    expected = ExpertKernels().weighted_sum(x, groups.places, weights)
    for row in range(13):
        total = sum(weights[row, c] * x[groups.places[row, c]].float() for c in range(3))
        torch.testing.assert_close(expected[row].float(), total, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    found = kernels_for(kernels(dtype)).weighted_sum(x, groups.places, weights)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_router_keeps_its_numbers(checkpoint, quantization):
    llm = LLM(str(checkpoint("qwen3-moe")), dtype="float32", quantization=quantization)
    sparse = [module for module in llm.engine.model_runner.model.modules() if isinstance(module, Experts)]
    assert len(sparse) == 2  # of three layers; mlp_only_layers names the other
    for module in sparse:
        assert isinstance(module.gate, Router) and module.gate.weight.dtype == torch.float32
        assert all(isinstance(mlp.gate_up_proj.weight, MergedWeight) for mlp in module.experts)


@pytest.mark.nightly
def test_two_ranks_split_each_expert(checkpoint, processes):
    folder, prompts = checkpoint("qwen3-moe"), [[5, 6, 7, 8, 9], list(range(20, 50)), [7] * 3]
    llm = processes.llm(folder, 2, dtype="float32", max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert_greedy(folder, prompt, output.outputs[0].token_ids)
    first, second = llm.engine.model_runner.usage()
    assert first["weights"] == second["weights"]


def test_windows_in_every_layer_and_experts_in_one_tensor(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3-moe", use_sliding_window=True, sliding_window=9)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    llm = LLM(str(folder), dtype="float32", block_size=4)
    params, prompt = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), list(range(20, 60))
    [output] = llm.generate([prompt], params)
    assert_greedy(folder, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(num_experts_per_tok=9), "num_experts_per_tok is 9 of only 8 experts"),
        (dict(num_local_experts=0), "num_experts must be a whole number"),
        (dict(decoder_sparse_step=0), "decoder_sparse_step must be a whole number"),
        (dict(mlp_only_layers=[5]), "mlp_only_layers names [5]; there are layers 0 to 2"),
        (dict(mlp_only_layers="all"), "Validation error for field 'mlp_only_layers'"),
        (dict(norm_topk_prob="yes"), "Validation error for field 'norm_topk_prob'"),
    ],
)
def test_configs_that_cannot_be(copy_of, changes, text):
    edit((folder := copy_of("qwen3-moe")) / "config.json", **changes)
    expect(text, ModelConfig.from_directory, folder)


def test_both_spellings_of_the_number_of_experts(copy_of):
    edit((folder := copy_of("qwen3-moe")) / "config.json", num_experts=8, num_local_experts=None)
    assert ModelConfig.from_directory(folder).num_experts == 8


def to_q4_1(weight: torch.Tensor):
    return search_q4_1(weight, torch.ones(weight.shape[1]))
