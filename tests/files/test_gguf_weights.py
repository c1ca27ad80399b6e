"""GGUF files: the weights and logits are those of transformers and of the gguf package."""

import itertools
import logging
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GgufConfig

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.group import RankGroup
from nanovllm.features.quantization.formats import MergedWeight, quantize_q8_0
from nanovllm.worker.layers import plain_linear
from nanovllm.worker.loader import load_model
from tests.checkpoints import CORPUS, HYBRIDS, VARIANTS, YARN_ROPE, make_checkpoint, reference_logits
from tests.errors import expect
from tests.gguf_files import of_type, write_gguf
from tests.marks import by_night
from tests.pretend_gpu import pretend_gpu
from tests.varied_texts import varied_texts
from tests.worker.test_model import logits_of

CPU = torch.device("cpu")
TOKENS = random.Random(1).choices(range(320), k=100)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def mixed(name: str, weight: np.ndarray) -> tuple[np.ndarray, str]:
    """Neighbours that are merged into one weight are of different types."""
    types = dict(q_proj="Q8_0", k_proj="Q4_0", v_proj="Q5_1", gate_proj="F16", up_proj="Q4_1", o_proj="BF16")
    return of_type(next((kind for part, kind in types.items() if part in name), "Q8_0"))(name, weight)


QUANTIZERS = {name: of_type(name) for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")} | {"mixed": mixed}


def engine(path: Path, **options) -> LLM:
    return LLM(str(path), num_gpu_blocks_override=64, **{"dtype": "float32"} | options)


def restored(weight: MergedWeight) -> torch.Tensor:
    return torch.cat([part.rows(torch.arange(part.shape[0])).dequantize() for part in weight.parts])


def restore(llm: LLM) -> LLM:
    """Compute with the quantized weights as float32, and with activations as they are."""
    for module in llm.engine.model_runner.model.modules():
        if isinstance(getattr(module, "weight", None), MergedWeight):
            weight = restored(module.weight)
            del module.weight
            module.weight, module.product = weight, plain_linear
    return llm


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory) -> Path:
    """transformers takes a head to have 128 numbers whatever the file says."""
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=128)


# What these files do not say, and a user may.
HF_OVERRIDES = {
    "qwen3-yarn": dict(rope_scaling=YARN_ROPE),
    "qwen2-window": dict(use_sliding_window=True, sliding_window=21, max_window_layers=1),
}


# Hybrid ones are in tests/features/hybrid.
IN_GGUF = [name for name in VARIANTS if not re.search("mistral-window|smollm3|moe", name) and name not in HYBRIDS]


@pytest.mark.parametrize("variant", IN_GGUF)
def test_ordinary_weights_are_those_of_the_checkpoint(checkpoint, tmp_path, variant):
    """With them biases, norms, tied embeddings and rotary scalings."""
    folder = checkpoint(variant)
    path = write_gguf(folder, tmp_path / "model.gguf")
    llm = engine(path, dtype="auto", hf_overrides=HF_OVERRIDES.get(variant))
    torch.testing.assert_close(logits_of(llm, TOKENS, [100]), reference_logits(folder, TOKENS), atol=1e-4, rtol=0)


YARN = [  # what a file says beside the factor, and rope_parameters that mean it
    ({}, {}),
    (dict(yarn_beta_fast=16.0, yarn_beta_slow=2.0), dict(beta_fast=16.0, beta_slow=2.0)),
    (dict(attn_factor=1.25), dict(attention_factor=1.25 * (1 + 0.1 * math.log(4)))),
    (dict(original_context_length=None), dict(original_max_position_embeddings=512)),
    (dict(yarn_ext_factor=1.0, finetuned=True), {}),
]


@pytest.mark.parametrize(
    ("variant", "more", "rope"),
    [("llama", *YARN[0]), *(by_night("llama", *said) for said in YARN[1:]), *(("qwen2", *said) for said in YARN)],
)
def test_yarn_of_a_file(tmp_path, variant, more, rope):
    """As llama.cpp has it: the paper's, with its factor on attention."""
    folder = make_checkpoint(tmp_path / "model", variant, rope_parameters=YARN_ROPE | rope)
    scaling = dict(type="yarn", factor=4.0, original_context_length=128) | more
    metadata = {f"{variant}.rope.scaling.{name}": value for name, value in scaling.items()}
    llm = engine(write_gguf(folder, tmp_path / "model.gguf", **metadata), max_model_len=256)
    torch.testing.assert_close(logits_of(llm, TOKENS, [100]), reference_logits(folder, TOKENS), atol=1e-4, rtol=0)
    refused = metadata | {f"{variant}.rope.scaling.yarn_ext_factor": 0.5}
    expect("yarn_ext_factor is 0.5", engine, write_gguf(folder, tmp_path / "other.gguf", **refused))


def test_float16_of_a_file_is_not_computed_in(tmp_path, caplog):
    """Hidden states of real models pass its largest number; on a CPU the answer was empty."""
    folder = make_checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][7] *= 30_000.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def some(name: str, weight: np.ndarray) -> tuple[np.ndarray, str]:
        return of_type("F16" if "down_proj" in name else "F32")(name, weight)

    for kind, quantize in (("F16", of_type("F16")), ("some", some), ("F32", of_type("F32"))):
        path = write_gguf(folder, tmp_path / f"{kind}.gguf", quantize)
        llm = LLM(str(path), num_gpu_blocks_override=64)
        assert llm.engine.model_runner.dtype == (torch.float32 if kind == "F32" else torch.bfloat16)
        [output] = llm.generate([TOKENS[:20]], GREEDY)
        assert output.outputs[0].finish_reason == "length"
    [asked] = LLM(str(path), num_gpu_blocks_override=64, dtype="float16").generate([TOKENS[:20]], GREEDY)
    assert asked.outputs[0].finish_reason == "error"
    assert "With dtype='float16' the usual cause is overflow: hidden states exceed 65,504" in caplog.text


OTHERS = {"llama-mha-tied": ["Q4_0", "mixed"], "qwen2": ["Q8_0", "mixed"], "qwen3": ["Q4_1", "mixed"]}
BY_DAY = {("llama", kind) for kind in QUANTIZERS} | {(name, kind) for name in OTHERS for kind in OTHERS[name]}


@pytest.mark.parametrize(
    ("variant", "kind"),
    [pair if pair in BY_DAY else by_night(*pair) for pair in itertools.product(["llama", *OTHERS], QUANTIZERS)],
)
def test_logits_against_transformers(checkpoint, qwen3, tmp_path, variant, kind):
    folder = qwen3 if variant == "qwen3" else checkpoint(variant)
    path = write_gguf(folder, tmp_path / "model.gguf", QUANTIZERS[kind])
    options = dict(gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    llm = engine(path)
    computed = logits_of(llm, TOKENS, [100])
    exact = logits_of(restore(llm), TOKENS, [100])
    # What is held as int8 and not as it stands in the file has errors of its own.
    tolerance = 1e-3 if kind != "mixed" else 0.05 * expected.abs().max().item()
    torch.testing.assert_close(exact, expected, atol=tolerance, rtol=0)
    assert (computed - exact).abs().mean() < 0.06 * exact.abs().mean()  # activations of 8 bits


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_has_its_share_of_the_groups(tmp_path_factory, tmp_path, kind, size):
    """Put together they are what the gguf package unpacks: exactly, or held as int8."""
    folder = make_checkpoint(tmp_path_factory.mktemp("wide"), "llama", intermediate_size=128, tie_word_embeddings=True)
    path = write_gguf(folder, tmp_path / "model.gguf", of_type(kind))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    config = ModelConfig.from_directory(path)
    ranks = [load_model(path, config, torch.float32, CPU, RankGroup(rank, size)) for rank in range(size)]

    def expected(name: str) -> torch.Tensor:
        whole = torch.from_numpy(gguf.dequantize(stored[name].data, stored[name].tensor_type))
        return whole if kind.startswith(("Q8", "Q4")) else quantize_q8_0(whole).dequantize()

    down = [restored(rank.layers[1].mlp.down_proj.weight) for rank in ranks]
    assert torch.equal(torch.cat(down, dim=1), expected("blk.1.ffn_down.weight"))
    gate_up = [restored(rank.layers[0].mlp.gate_up_proj.weight).chunk(2) for rank in ranks]
    assert torch.equal(torch.cat([gate for gate, _ in gate_up]), expected("blk.0.ffn_gate.weight"))
    for rank in ranks:
        assert rank.embed_tokens is rank.lm_head.weight, "held once"
    assert torch.equal(torch.cat([restored(rank.embed_tokens) for rank in ranks]), expected("token_embd.weight"))


def test_a_share_is_whole_groups(checkpoint, tmp_path):
    path = write_gguf(checkpoint(), tmp_path / "model.gguf", of_type("Q8_0"))
    for folder, quantization in ((path, None), (checkpoint(), "int8")):
        config = ModelConfig.from_directory(folder)
        text = "tensor_parallel_size=2 gives each rank 48 of the inputs of a layer, which is no multiple of the 32"
        expect(text, load_model, folder, config, torch.float32, CPU, RankGroup(0, 2), quantization)


def test_k_quants_are_held_as_int8(tmp_path, caplog):
    """Random blocks: the gguf package cannot write these types. A number of each block's scales is finite and small."""
    folder = make_checkpoint(tmp_path / "wide", "llama", hidden_size=256, head_dim=64, num_hidden_layers=1)
    generator = np.random.default_rng(0)
    scale_offset = {"Q4_K": (0, 4), "Q6_K": (208, 210), "Q2_K": (80, 84)}

    def blocks(name: str, weight: np.ndarray) -> tuple[np.ndarray, str]:
        kind = {"q_proj": "Q6_K", "gate_proj": "Q4_K", "embed_tokens": "Q2_K"}.get(name.split(".")[-2])
        if kind is None:
            return of_type("Q8_0")(name, weight)
        _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        data = generator.integers(0, 256, (len(weight), weight.shape[1] // 256, num_bytes), dtype=np.uint8)
        start, end = scale_offset[kind]
        scales = generator.uniform(0.001, 0.002, (*data.shape[:2], (end - start) // 2)).astype(np.float16)
        data[..., start:end] = scales.view(np.uint8)
        return data.reshape(len(weight), -1), kind

    path = write_gguf(folder, tmp_path / "model.gguf", blocks)
    with caplog.at_level(logging.WARNING, "nanovllm"):
        llm = engine(path, max_model_len=64)
    assert [r.getMessage() for r in caplog.records if "int8" in r.getMessage()] == [
        "model.gguf: weights of type Q2_K, Q4_K, Q6_K are unpacked and held as int8"
    ]
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    gate = torch.from_numpy(gguf.dequantize(stored["blk.0.ffn_gate.weight"].data, gguf.GGMLQuantizationType.Q4_K))
    model = llm.engine.model_runner.model
    assert torch.equal(restored(model.layers[0].mlp.gate_up_proj.weight)[: len(gate)], quantize_q8_0(gate).dequantize())
    assert [part.format.name for part in model.embed_tokens.parts] == ["Q8_0"]
    assert llm.generate([TOKENS[:9]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_answers(checkpoint, tmp_path):
    """Through the public calls: the same tokens alone, in company, from the cache; and quantized when it is loaded."""
    path = write_gguf(checkpoint("qwen2"), tmp_path / "model.gguf", of_type("Q8_0"))
    llm = engine(path, dtype="auto", max_model_len=256)
    assert llm.engine.model_runner.dtype == torch.bfloat16
    message = [{"role": "user", "content": CORPUS[0]}]
    alone = llm.chat(message, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    prompts = [llm.chat_prompt(message), CORPUS[1], TOKENS]
    for _ in range(2):
        assert llm.generate(prompts, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone
    assert llm.engine.model_config.eos_token_ids == {1, 3}
    expect("holds quantized weights already", LLM, str(path), quantization="int8")


def test_ordinary_file_is_quantized_like_any_checkpoint(checkpoint, tmp_path):
    path = write_gguf(checkpoint(), tmp_path / "model.gguf")
    ours, theirs = (logits_of(engine(p, quantization="int8"), TOKENS, [100]) for p in (path, checkpoint()))
    assert torch.equal(ours, theirs)


def test_embeddings_may_be_quantized_alone(checkpoint, tmp_path):
    def only(part: str):
        return lambda name, weight: of_type("Q8_0" if part in name else "F16")(name, weight)

    table = write_gguf(checkpoint(), tmp_path / "table.gguf", only("embed_tokens"))
    model = engine(table).engine.model_runner.model
    assert isinstance(model.embed_tokens, MergedWeight) and not isinstance(model.lm_head.weight, MergedWeight)
    layers = write_gguf(
        checkpoint("qwen2"), tmp_path / "layers.gguf", only("proj")
    )  # its table is the output head, too
    model = engine(layers, enforce_eager=True).engine.model_runner.model
    assert model.embed_tokens is model.lm_head.weight and isinstance(model.layers[0].mlp.down_proj.weight, MergedWeight)


@pytest.mark.compiler
def test_demo_file(demo_checkpoint, demo_gguf):
    """The checkpoint that is unpacked from it holds the same weights, rounded to bfloat16."""
    llm, unpacked = engine(demo_gguf, max_model_len=256), engine(demo_checkpoint, max_model_len=256)
    config, of_file = unpacked.engine.model_config, llm.engine.model_config
    # The file's vocabulary has <|endoftext|> and <reponame>, too.
    config = replace(config, rope_scaling={"rope_type": "default"}, is_quantized=True, end_tokens=of_file.end_tokens)
    assert (
        of_file == config
        and of_file.eos_token_ids == {0, 2, 4}
        and llm.stats()["batch_invariant"] == "on every processor"
    )
    ours, theirs = llm.engine.tokenizer, unpacked.engine.tokenizer
    text = Path(__file__).read_text() + "  naïve\n\n3.14159 你好 😀 <|im_start|>user\nhi<|im_end|>"
    token_ids = ours(text).input_ids
    assert token_ids == theirs(text).input_ids and ours.decode(token_ids) == theirs.decode(token_ids)
    assert ours.chat_template == theirs.chat_template
    for text, pieces in {
        "x =  12": ["x", "Ġ=", "ĠĠ", "1", "2"],
        "\t\t3.14": ["ĉĉ", "3", ".", "1", "4"],
        "a\n  1. b": ["a", "ĊĠĠ", "1", ".", "Ġb"],
    }.items():
        assert ours.tokenize(text) == theirs.tokenize(text) == pieces
    for text in varied_texts(theirs.all_special_tokens, count=100):
        assert ours(text).input_ids == theirs(text).input_ids
    computed, expected = (logits_of(x, token_ids[:64], [64]) for x in (llm, unpacked))
    exact = logits_of(restore(llm), token_ids[:64], [64])
    assert (exact - expected).norm() < 0.005 * expected.norm()
    assert (computed - expected).norm() < 0.05 * expected.norm()  # activations of 8 bits


def test_not_on_a_gpu(checkpoint, tmp_path):
    path = write_gguf(checkpoint(), tmp_path / "model.gguf", of_type("Q4_0"))
    with pretend_gpu():
        expect("computed with on a CPU only", LLM, str(path))
        expect("computed with on a CPU only", LLM, str(checkpoint()), quantization="int4")
