"""Hybrid models: the recurrence, checkpoints as they are found, and whatever else an engine does with a model."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples import make_gguf
from examples.make_gguf import write_gguf
from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.hybrid.batch_states import BatchStates
from nanovllm.features.hybrid.hybrid_config import HybridConfig
from nanovllm.features.hybrid.hybrid_kernels import kernels_for
from nanovllm.features.hybrid.hybrid_layers import GatedDeltaNet
from nanovllm.features.parallel.group import RankGroup
from nanovllm.files.tensor_parts import Part
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu import memory
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.loader import load_model
from tests.checkpoints import HYBRID, HYBRIDS, NULL, assert_greedy, edit, make_checkpoint, reference_logits
from tests.errors import expect
from tests.features.lora import test_lora as lora
from tests.worker.cpu.test_kernels import kernels
from tests.worker.test_model import logits_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
SMALL = dict(dtype="float32", block_size=4, num_gpu_blocks_override=160, max_model_len=256)
TOKENS = random.Random(1).choices(range(320), k=60)


# -- the recurrence ----------------------------------------------------------------------------------------------------


def make_net(seed: int = 0, **sizes) -> GatedDeltaNet:
    """A layer of odd sizes with random parameters."""
    sizes = dict(num_key_heads=2, num_value_heads=6, key_dim=11, value_dim=21, kernel_size=4) | sizes
    config = SimpleNamespace(hidden_size=8, rms_norm_eps=1e-6, hybrid=HybridConfig(frozenset(), **sizes))
    torch.manual_seed(seed)
    net = GatedDeltaNet(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    return net.requires_grad_(False)


def in_numpy(x: torch.Tensor, net: GatedDeltaNet) -> np.ndarray:
    """All of a sequence from its first token on, in float64, as the formulas say."""
    s, x = net.sizes, x.double().numpy()
    conv, a_log, dt_bias, norm = (
        p.double().numpy() for p in (net.conv.weight, net.A_log, net.dt_bias, net.norm.weight)
    )
    inputs, z, b, a = np.split(x, np.cumsum([s.conv_size, s.value_size, s.num_value_heads]), axis=1)
    padded = np.pad(inputs, ((s.kernel_size - 1, 0), (0, 0)))
    mixed = sum(padded[j : j + len(x)] * conv[:, j] for j in range(s.kernel_size))
    q, k, v = np.split(mixed / (1 + np.exp(-mixed)), [s.key_size, 2 * s.key_size], axis=1)
    out = np.zeros((len(x), s.num_value_heads, s.value_dim))
    for head in range(s.num_value_heads):
        of_key = slice(head * s.num_key_heads // s.num_value_heads * s.key_dim, None)
        of_value = slice(head * s.value_dim, (head + 1) * s.value_dim)
        state = np.zeros((s.key_dim, s.value_dim))
        for t in range(len(x)):
            key, query = (part[t, of_key][: s.key_dim] for part in (k, q))
            key, query = (part / np.sqrt(part @ part + 1e-6) for part in (key, query))
            state *= np.exp(-np.exp(a_log[head]) * np.log1p(np.exp(a[t, head] + dt_bias[head])))
            state += np.outer(key, (v[t, of_value] - key @ state) / (1 + np.exp(-b[t, head])))
            read = query @ state * s.key_dim**-0.5
            read = read / np.sqrt((read**2).mean() + 1e-6) * norm
            gate = z[t, of_value]
            out[t, head] = read * gate / (1 + np.exp(-gate))
    return out.reshape(len(x), -1)


def batch_of(*segments: list[int], query_lens: list[int]) -> Batch:
    """As far as a layer with a state reads it. Without segments, nobody keeps the states."""
    nothing = torch.empty(0)
    return Batch(
        input_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0),
        seqlens_k=nothing,
        block_tables=nothing,
        logits_rows=nothing,
        max_query_len=max(query_lens),
        max_key_len=0,
        parts={"state": BatchStates(torch.tensor(segments))} if segments else {},
    )


def pool_of(net: GatedDeltaNet, num_slots: int, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    s = net.sizes
    states = torch.zeros(num_slots, s.num_value_heads, -(-s.key_dim // 4) * 4, -(-s.value_dim // 16) * 16)
    windows = torch.zeros(num_slots, s.kernel_size - 1, s.conv_size, dtype=dtype)
    return states, windows, torch.zeros(num_slots, 8, s.conv_size + 2 * s.num_value_heads, dtype=dtype)


def functions(dtype=torch.float32):
    return {"torch": kernels_for(TORCH_KERNELS), "C": kernels_for(kernels(dtype))}


@pytest.mark.parametrize("how", ["torch", "C"])
@pytest.mark.parametrize(
    "sizes", [{}, dict(key_dim=128, value_dim=128, num_value_heads=2), dict(kernel_size=2, key_dim=4, value_dim=16)]
)
def test_against_a_loop(how, sizes):
    net = make_net(**sizes)
    x = torch.randn(70, sum(net.in_proj.out_sizes))
    found = functions()[how].delta_net(x, net, (None,), batch_of(query_lens=[70]))
    torch.testing.assert_close(found.double(), torch.from_numpy(in_numpy(x, net)), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("how", ["torch", "C"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chunk_may_end_anywhere(how, dtype):
    """Chunks of 1, 2 and 3 tokens, which are shorter than the convolution; states that move from slot to slot."""
    net, function = make_net(), functions(dtype)[how].delta_net
    x, rng = torch.randn(40, sum(net.in_proj.out_sizes)).to(dtype), random.Random(0)
    whole = function(x, net, (None,), batch_of(query_lens=[40]))
    for _ in range(5):
        pool, parts, start, source = pool_of(net, 6, dtype), [], 0, -1
        while start < 40:
            end, target = min(start + rng.choice([1, 1, 2, 3, 7]), 40), rng.choice([0, 0, 1, 2])
            batch = batch_of([source, target, 0, 0, 0, 0, end - start, 0], query_lens=[end - start])
            parts.append(function(x[start:end], net, pool, batch))
            start, source = end, target
        exact = torch.equal(torch.cat(parts), whole)
        assert exact if how == "C" else torch.allclose(torch.cat(parts).float(), whole.float(), atol=1e-2)


@pytest.mark.parametrize("how", ["torch", "C"])
def test_drafts_are_replayed_from_the_log(how):
    """Three known rows, four draft tokens; two are accepted. The next step takes them in and passes a snapshot."""
    net, function = make_net(), functions()[how].delta_net
    x = torch.randn(12, sum(net.in_proj.out_sizes))
    pool = pool_of(net, 3)
    wrong = torch.cat((x[:5], torch.randn(2, x.shape[1])))
    function(wrong, net, pool, batch_of([-1, 0, 0, 0, 0, 0, 3, 0], [0, -1, 0, 0, 0, 3, 4, 1], query_lens=[7]))
    # Tokens 3 and 4 lie in the log. The snapshot is taken between them, in slot 2.
    segments = [0, 2, 0, 0, 1, 0, 0, 0], [2, 0, 0, 1, 1, 0, 7, 0]
    after = function(x[5:], net, pool, batch_of(*segments, query_lens=[7]))
    whole = function(x, net, (None,), batch_of(query_lens=[12]))
    torch.testing.assert_close(after, whole[5:], atol=0 if how == "C" else 1e-5, rtol=0)
    later = function(x[4:], net, pool, batch_of([2, 1, 1, 0, 0, 0, 8, 0], query_lens=[8]))
    torch.testing.assert_close(later, whole[4:], atol=0 if how == "C" else 1e-5, rtol=0)


def test_one_may_begin_where_another_has_ended_in_the_same_step():
    net, function = make_net(), functions()["C"].delta_net
    x = torch.randn(9, sum(net.in_proj.out_sizes))
    whole = function(x, net, (None,), batch_of(query_lens=[9]))
    pool = pool_of(net, 3)
    rows = torch.cat((x[:6], x[4:]))  # the second sequence shares four tokens with the first
    segments = [-1, 2, 0, 0, 0, 0, 4, 0], [2, 0, 0, 0, 0, 4, 2, 0], [2, 1, 1, 0, 0, 6, 5, 0]
    found = function(rows, net, pool, batch_of(*segments, query_lens=[6, 5]))
    assert torch.equal(found, torch.cat((whole[:6], whole[4:])))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def as_on_the_hub(folder: Path, to: Path) -> Path:
    """The language model of one that sees images, with a vision tower and heads for several tokens beside it."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    outer = dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", vision_config={"depth": 1})
    outer |= dict(text_config=config, tie_word_embeddings=config.pop("tie_word_embeddings"), image_token_id=7)
    (to / "config.json").write_text(json.dumps(outer))
    weights = load_file(to / "model.safetensors")
    weights = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    weights |= {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(4, 4), "mtp.fc.weight": torch.zeros(4, 4)}
    save_file(weights, to / "model.safetensors")
    return to


def test_the_text_part_of_a_model_that_sees_images(checkpoint, tmp_path, caplog):
    caplog.set_level("INFO", "nanovllm")
    llm = LLM(str(as_on_the_hub(checkpoint("qwen3.5"), tmp_path / "hub")), **SMALL)
    expected = reference_logits(checkpoint("qwen3.5"), TOKENS)
    torch.testing.assert_close(logits_of(llm, TOKENS, [60]), expected, atol=1e-3, rtol=0)
    assert caplog.text.count("has tensors of heads that predict several tokens at once") == 1
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json"):
        llm.chat(image)


def test_logits_within_1e_4_where_weights_are_as_transformers_makes_them(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3.5", initializer_range=0.02)
    found = logits_of(LLM(str(folder), **SMALL), TOKENS, [1, 2, 5, 33, 60])
    torch.testing.assert_close(found, reference_logits(folder, TOKENS), atol=1e-4, rtol=0)


def test_experts_one_by_one_or_all_in_one_tensor(checkpoint, tmp_path):
    """transformers writes one tensor for each expert; some checkpoints on the hub hold all in one."""
    folder = shutil.copytree(checkpoint("qwen3.5-moe"), tmp_path / "fused")
    weights, stacked = load_file(folder / "model.safetensors"), {}
    for layer in range(4):
        path = f"model.layers.{layer}.mlp.experts"
        of = {
            part: torch.stack([weights.pop(f"{path}.{i}.{part}_proj.weight") for i in range(8)])
            for part in ("gate", "up", "down")
        }
        stacked |= {f"{path}.gate_up_proj": torch.cat((of["gate"], of["up"]), 1), f"{path}.down_proj": of["down"]}
    save_file(weights | stacked, folder / "model.safetensors")
    separate, fused = (logits_of(LLM(str(f), **SMALL), TOKENS, [60]) for f in (checkpoint("qwen3.5-moe"), folder))
    assert torch.equal(separate, fused)


def test_a_part_reads_the_rows_that_are_wanted():
    """Not all rows for each part of them: a large tensor is read in many parts."""
    numbers, read = torch.randn(12, 4), []

    class File:
        def get_slice(self, name):
            return self

        def get_shape(self):
            return [12, 4]

        def __getitem__(self, share):
            read.append(share[0])
            return numbers[share]

    rows, columns = torch.tensor([4, 5, 6, 0, 1, 9, 8]), torch.tensor([2, 3, 0, 1])
    found = Part(File(), "x", rows=rows, columns=columns)[slice(1, 7), slice(0, 3)]
    assert torch.equal(found, numbers[rows[1:7]][:, columns[:3]])
    assert read == [slice(5, 7), slice(0, 2), slice(9, 10), slice(8, 9)]


# In such a file every n-th layer has attention, and all layers have experts or none.
IN_GGUF = {name: dict(mlp_only_layers=[]) if name == "qwen3-next" else {} for name in HYBRIDS}
IN_GGUF["qwen3.5-tied"] = dict(layer_types=None)
FOR_GROUPS = dict(linear_key_head_dim=32, linear_value_head_dim=32, moe_intermediate_size=32)
FOR_GROUPS |= dict(shared_expert_intermediate_size=64, initializer_range=0.05)  # 8 bits change less than at 0.2


@pytest.mark.parametrize("variant", HYBRIDS)
def test_gguf(tmp_path, variant):
    """As llama.cpp's converter writes them: heads in another order, norms plus 1, -exp(A_log)."""
    folder = make_checkpoint(tmp_path / "model", variant, **IN_GGUF[variant], **FOR_GROUPS)
    expected = reference_logits(folder, TOKENS)
    for kind, error in ("F32", 1e-4), ("Q8_0", 0.1):
        write_gguf(folder, tmp_path / f"{kind}.gguf", kind)
        llm = LLM(str(tmp_path / f"{kind}.gguf"), tokenizer=str(folder), **SMALL)
        found = logits_of(llm, TOKENS, [60])
        assert (found - expected).abs().mean() < error * expected.abs().mean()


def test_an_older_gguf_file_of_qwen3_next(tmp_path, monkeypatch):
    """q, k, v and z are one tensor in it (ssm_in), in the order of safetensors."""
    monkeypatch.setattr(make_gguf, "split_by_key_head", lambda name, tensor, config: [(name, tensor)])
    folder = make_checkpoint(tmp_path / "model", "qwen3-next", **IN_GGUF["qwen3-next"])
    write_gguf(folder, tmp_path / "model.gguf", "F32")
    found = logits_of(LLM(str(tmp_path / "model.gguf"), tokenizer=str(folder), **SMALL), TOKENS, [60])
    torch.testing.assert_close(found, reference_logits(folder, TOKENS), atol=1e-3, rtol=0)


def test_a_share_of_a_shared_expert_is_whole_groups(tmp_path):
    """Those who meet at its end have a part of its inputs each."""
    sizes = FOR_GROUPS | dict(head_dim=32, moe_intermediate_size=64, shared_expert_intermediate_size=96)
    folder = make_checkpoint(tmp_path / "model", "qwen3.5-moe", **sizes)
    write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    config = ModelConfig.from_directory(tmp_path / "model.gguf")
    text = "tensor_parallel_size=2 gives each rank 48 of the inputs of a layer, which is no multiple of the 32"
    expect(text, load_model, tmp_path / "model.gguf", config, torch.float32, torch.device("cpu"), RankGroup(0, 2))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(layer_types=["linear_attention"] * 4), "has no full_attention"),
        (dict(layer_types=["full_attention"] * 4), "has no linear_attention"),
        (dict(layer_types=["linear_attention"] * 3), "Qwen3_5TextConfig does not take it"),
        (dict(layer_types=["sliding_attention"] * 4), r"layer_types\[0\] must be one of full_attention, linear"),
        (dict(linear_num_value_heads=3), "3 value heads cannot share 2 key heads evenly"),
        (dict(linear_key_head_dim=512), "linear_key_head_dim must be a whole number between 1 and 256"),
        (dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim must be a whole number"),
        (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=2)), "partial_rotary_factor must be"),
        (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.3)), "of head_dim 24 is 7 numbers"),
        (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.02)), "of head_dim 24 is 0 numbers"),
        (dict(attn_output_gate=False), "attn_output_gate"),
        (dict(linear_key_head_dim=8), r"(in_proj_qkv|conv1d).weight has the shape .*; the sizes in the conf"),
        (dict(linear_key_head_dim=12), r"(in_proj_qkv|conv1d).weight has the shape"),
        (dict(linear_num_key_heads=1), r"(in_proj_qkv|conv1d).weight has the shape"),
    ],
)
def test_configurations_that_are_refused(copy_of, changes, error):
    folder = copy_of("qwen3.5")
    edit(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=error):
        LLM(str(folder), **SMALL)


def test_whole_heads_are_turned(copy_of):
    """null is no number: transformers' class keeps none, and its model turns whole heads."""
    folder = copy_of("qwen3-next")
    edit(folder / "config.json", rope_parameters=None, partial_rotary_factor=NULL)
    assert ModelConfig.from_directory(folder).rope_scaling["partial_rotary_factor"] == 1.0


def test_parts_of_a_tensor_of_another_size_are_refused(copy_of):
    folder = copy_of("qwen3-next")
    edit(folder / "config.json", linear_key_head_dim=8)
    with pytest.raises(ValueError, match=r"in_proj_qkvz.weight has the shape|conv1d.weight has the shape"):
        LLM(str(folder), **SMALL)


def test_fields_that_a_mixture_of_qwen3_5_does_not_have(checkpoint, copy_of):
    """Some config.json has them of an older kind of mixtures; transformers looks at none of them."""
    folder = copy_of("qwen3.5-moe")
    edit(folder / "config.json", norm_topk_prob=False, mlp_only_layers=[1], decoder_sparse_step=2)
    expected = reference_logits(checkpoint("qwen3.5-moe"), TOKENS)
    torch.testing.assert_close(logits_of(LLM(str(folder), **SMALL), TOKENS, [60]), expected, atol=1e-3, rtol=0)


def test_overrides_of_the_language_model(checkpoint, tmp_path):
    """As those write them who know config.json of a model that sees images."""
    rope = HYBRID["rope_parameters"] | dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    folder = as_on_the_hub(checkpoint("qwen3.5"), tmp_path / "hub")
    nested, flat = dict(text_config=dict(rope_parameters=rope)), dict(rope_parameters=rope)
    found = [LLM(str(folder), hf_overrides=how, **SMALL).engine.model_config for how in (nested, flat, None)]
    assert found[0] == found[1] != found[2]
    with pytest.raises(ValueError, match="hf_overrides: text_config must be a dict, found 3"):
        LLM(str(folder), hf_overrides=dict(text_config=3), **SMALL)


# -- what works for other models ---------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["qwen3.5", "qwen3-next"])
def test_ranks(checkpoint, processes, variant):
    """Heads are divided, and the states with them."""
    folder = checkpoint(variant)
    llm = processes.llm(folder, 2, **SMALL)
    for _ in ("cold", "warm"):
        for prompt in (TOKENS[:33], [*TOKENS[:30], 7, 8, 9]):
            [output] = llm.generate([prompt], GREEDY)
            assert_greedy(folder, prompt, output.outputs[0].token_ids)
    assert llm.stats()["prefix_cache"]["hits"] > 7
    with pytest.raises(ValueError, match=r"does not divide .*linear_num_key_heads=2"):
        LLM(str(folder), tensor_parallel_size=4)


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj"]


PROJECTIONS = [("qwen3.5", [f"in_proj_{x}" for x in ("qkv", "z", "b", "a")])]
PROJECTIONS += [("qwen3-next", ["in_proj_qkvz", "in_proj_ba"])]


@pytest.mark.parametrize(("variant", "projections"), PROJECTIONS)
def test_adapters(checkpoint, tmp_path, variant, projections):
    folder = checkpoint(variant)
    mlp = 0 if variant == "qwen3.5" else -3  # experts have no adapters
    targets = projections + ALL_LINEAR[: len(ALL_LINEAR) + mlp]
    path = lora.make_adapter(tmp_path / "adapter", folder, r=4, target_modules=targets)
    chosen, prompt = LoRARequest("all", 1, str(path)), TOKENS[:20]
    llm = LLM(str(folder), enable_lora=True, **SMALL)
    outputs = llm.generate([prompt] * 3, GREEDY, lora_request=[None, chosen, chosen])
    for request, output in zip([None, chosen, chosen], outputs, strict=True):
        lora.assert_greedy(folder, request, prompt, output.outputs[0].token_ids)
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 16], "a state belongs to its adapter"


@pytest.mark.compiler
def test_a_draft_of_the_same_kind(checkpoint, eager_drafts):
    """Its own states go back to a snapshot where draft tokens have failed."""
    folder, prompts = checkpoint("qwen3.5"), [TOKENS[:n] for n in (5, 21, 40)]
    params = [
        GREEDY,
        SamplingParams(temperature=1.2, seed=3, max_tokens=30, logprobs=1),
        replace(GREEDY, max_tokens=50),
    ]
    expected = [output.outputs for output in LLM(str(folder), **SMALL).generate(prompts, params)]
    for how in dict(model=str(folder)), dict(method="self", quantization="int4"):
        llm = LLM(str(folder), speculative_config=how | {"num_speculative_tokens": 4}, **SMALL)
        for _ in ("cold", "warm"):
            assert [output.outputs for output in llm.generate(prompts, params)] == expected
        proposer = llm.engine.speculation.proposer
        proposer.manager.check_integrity()
        assert llm.stats()["num_accepted_tokens"] > 20


def test_samples_and_prompt_logprobs(checkpoint):
    """Samples of one prompt begin where its last snapshot is; a scored prompt is computed whole, beside them."""
    llm = LLM(str(checkpoint("qwen3.5")), **SMALL)
    [four] = llm.generate([TOKENS], replace(GREEDY, n=4))
    assert len({tuple(sample.token_ids) for sample in four.outputs}) == 1
    [scored] = llm.generate([TOKENS], replace(GREEDY, prompt_logprobs=0))
    expected = reference_logits(checkpoint("qwen3.5"), TOKENS).log_softmax(-1)
    for position, row in enumerate(scored.prompt_logprobs[1:]):
        assert row[TOKENS[position + 1]].logprob == pytest.approx(
            expected[position, TOKENS[position + 1]].item(), abs=1e-3
        )
    assert scored.num_cached_tokens == 0 and scored.outputs[0].token_ids == four.outputs[0].token_ids


def test_memory(checkpoint, caplog, monkeypatch):
    """States are counted with K/V, and where memory is short fewer sequences run at a time."""
    caplog.set_level("INFO", "nanovllm")
    folder = str(checkpoint("qwen3.5"))
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_000_000)
    llm = LLM(folder, dtype="float32", gpu_memory_utilization=1.0, state_cache_bytes=150_000, max_num_seqs=64)
    pool = llm.engine.model_runner.states
    assert (
        pool.slots.max_running == 125_000 // pool.slot_bytes == 5
        and pool.slots.max_snapshots == 150_000 // pool.slot_bytes
    )
    assert (
        "max_num_seqs 64 -> 5" in caplog.text
        and f"States: 5 for running sequences, {pool.slots.max_snapshots}" in caplog.text
    )
    assert llm.engine.kv_pool.num_bytes + pool.slots.num_bytes <= 500_000
    with pytest.raises(ValueError, match=r"of 0\.5 MB, .* snapshots, .* leave no K/V; lower state_cache_bytes"):
        LLM(folder, dtype="float32", gpu_memory_utilization=1.0, state_cache_bytes=10**9)
    outputs = llm.generate([TOKENS[:n] for n in (3, 9, 30, 31, 32)], GREEDY)
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
    stats = llm.stats()["states"]
    assert stats["num_bytes"] == pool.slots.num_bytes == pool.slot_bytes * (5 + pool.slots.max_snapshots)
    assert 0 < stats["num_snapshots"] <= stats["max_snapshots"] and stats["num_running"] == 0
    expect("state_cache_bytes must be a whole number", LLM, folder, state_cache_bytes=-1)
    llm = LLM(folder, state_cache_bytes=0, **SMALL)
    assert llm.engine.block_manager.snapshots.max_snapshots == 0
    assert [o.num_cached_tokens for o in llm.generate([TOKENS] * 2, GREEDY)] == [0, 0]
