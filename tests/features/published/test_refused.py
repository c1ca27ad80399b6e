"""Quantized checkpoints that cannot be read are refused by name, before memory is taken for their weights."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.features.published.schemes import read_published
from nanovllm.tools.cli import main
from nanovllm.worker import loader
from tests.checkpoints import SMALL, edit
from tests.errors import expect
from tests.published_files import FORMATS, compressed, gptq_config, publish, weights_of
from tests.tools.test_check_model import rows_of

Q_PROJ, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
STATE = f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PACKED = "pack-quantized"


@pytest.fixture
def copied(checkpoint, published_of, tmp_path) -> Callable[[str], Path]:
    """copied(kind) -> a Llama in this format, which may be changed."""
    return lambda kind: shutil.copytree(published_of(checkpoint(), kind)[0], tmp_path / "published")


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def with_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def with_state(**changes: Any) -> Callable[[dict[str, Tensor]], None]:
    """What bitsandbytes says beside the weight says something else."""

    def change(stored: Tensor) -> Tensor:
        state = json.loads(bytes(stored.tolist())) | changes
        return torch.tensor(list(json.dumps(state).encode())).to(torch.uint8)

    return with_tensor(STATE, change)


def unchanged(tensors: dict[str, Tensor]) -> None:
    """The files are right, and the configuration says something else."""


# (a format, what becomes of its tensors, what config.json says instead, the error)
DISAGREEMENTS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("gptq", without(f"{Q_PROJ}.scales"), {}, f"missing: {Q_PROJ}.scales"),
    ("gptq", without(f"{Q_PROJ}.qzeros"), {}, f"missing: {Q_PROJ}.qzeros"),
    ("gptq", without(f"{Q_PROJ}.qweight"), {}, f"missing: {Q_PROJ}.weight"),
    ("gptq", with_tensor(f"{DOWN}.scales", lambda x: x[:2]), {}, f"wrong shape: {DOWN}.scales is [2, 64]"),
    ("gptq", with_tensor(f"{DOWN}.scales", lambda x: x.int()), {}, f"wrong dtype: {DOWN}.scales is I32"),
    ("gptq", with_tensor(f"{Q_PROJ}.scales", lambda x: x.byte()), {}, f"wrong dtype: {Q_PROJ}.scales is U8"),
    ("gptq", with_tensor(f"{Q_PROJ}.qweight", lambda x: x[:0]), {}, f"wrong shape: {Q_PROJ}.qweight is [0, 64]"),
    ("gptq", unchanged, dict(bits=8), "model.layers.0.mlp.down_proj.qweight has 48"),
    ("gptq", unchanged, dict(group_size=48), f"48 inputs share a scale, and {Q_PROJ}.qweight has 64"),
    ("gptq", unchanged, dict(group_size=16), f"wrong shape: {Q_PROJ}.scales is [2, 64]"),
    ("gptq", unchanged, dict(quant_method="awq"), "model.layers.0.mlp.down_proj.qweight has 12"),
    ("gptq", without(f"{Q_PROJ}.g_idx"), dict(desc_act=True), f"missing: {Q_PROJ}.g_idx"),
    ("gptq, act order", with_tensor(f"{Q_PROJ}.g_idx", lambda x: x.clamp(max=0)), {}, f"wrong groups: {Q_PROJ}.g_idx"),
    ("gptq, act order", with_tensor(f"{DOWN}.g_idx", lambda x: x + 1), {}, f"wrong groups: {DOWN}.g_idx"),
    (
        "gptq, act order",
        with_tensor(f"{Q_PROJ}.g_idx", lambda x: x.long() + 2**60),
        {},
        f"wrong groups: {Q_PROJ}.g_idx",
    ),
    ("awq", with_tensor(f"{Q_PROJ}.scales", lambda x: x.byte()), {}, f"wrong dtype: {Q_PROJ}.scales is U8"),
    ("awq", without(f"{Q_PROJ}.qzeros"), {}, f"missing: {Q_PROJ}.qzeros"),
    ("awq", with_tensor(f"{Q_PROJ}.qweight", lambda x: x[0]), {}, f"{Q_PROJ}.qweight is [8]"),
    (PACKED, without(f"{Q_PROJ}.weight_scale"), {}, f"missing: {Q_PROJ}.weight_scale"),
    (PACKED, without(f"{Q_PROJ}.weight_shape"), {}, f"missing: {Q_PROJ}.weight_shape"),
    (PACKED, with_tensor(f"{Q_PROJ}.weight_shape", lambda x: x * 2), {}, f"{Q_PROJ}.weight_shape says [128, 128]"),
    (
        PACKED,
        unchanged,
        compressed(PACKED, weights_of(group_size=32, symmetric=False)),
        f"missing: {Q_PROJ}.weight_zero_point",
    ),
    (
        PACKED,
        unchanged,
        compressed(PACKED, weights_of(group_size=32, actorder="group")),
        f"missing: {Q_PROJ}.weight_g_idx",
    ),
    (
        PACKED,
        unchanged,
        compressed(PACKED, weights_of(group_size=32)) | {"ignore": ["re:.*q_proj"]},
        f"config.json says that {Q_PROJ} is not quantized",
    ),
    (
        PACKED,
        unchanged,
        compressed("int-quantized", weights_of(8, strategy="channel")),
        f"{Q_PROJ} is stored as integers",
    ),
    (
        "int-quantized",
        unchanged,
        compressed("int-quantized", weights_of(4, strategy="channel")),
        f"{Q_PROJ}.weight has numbers of more than 4 bits",
    ),
    ("fp8", without(f"{Q_PROJ}.weight_scale_inv"), {}, f"missing: {Q_PROJ}.weight_scale"),
    ("fp8", unchanged, dict(weight_block_size=[16, 32]), f"wrong shape: {Q_PROJ}.weight_scale_inv is [2, 2]"),
    ("fp8", unchanged, gptq_config(), f"{Q_PROJ} is stored as gptq"),
    ("bitsandbytes", without(f"{Q_PROJ}.weight.absmax"), {}, f"missing: {Q_PROJ}.weight.absmax"),
    ("bitsandbytes", without(STATE), {}, f"missing: {STATE}"),
    ("bitsandbytes", with_tensor(STATE, lambda x: x[:9]), {}, f"{STATE} is no object in JSON"),
    ("bitsandbytes", with_tensor(STATE, lambda x: x.new_full([99999], ord("["))), {}, f"{STATE} is no object in JSON"),
    ("bitsandbytes", with_state(shape=[1, 64, 64]), {}, f"{STATE}: shape must be two numbers"),
    ("bitsandbytes", with_state(shape=[float("inf"), 64]), {}, f"{STATE}: shape must be a whole number"),
    ("bitsandbytes", with_state(blocksize=64.7), {}, f"{STATE}: blocksize must be a whole number"),
    ("bitsandbytes", with_state(nested_offset="abc"), {}, f"{STATE}: nested_offset must be a number"),
]


@pytest.mark.parametrize(
    ("kind", "change", "says", "text"), DISAGREEMENTS, ids=[case[3][:60] for case in DISAGREEMENTS]
)
def test_files_that_disagree_with_their_configuration(copied, monkeypatch, kind, change, says, text):
    published = copied(kind)
    edit(published / "config.json", quantization_config=FORMATS[kind][1] | says)
    tensors = load_file(published / "model.safetensors")
    change(tensors)
    save_file(tensors, published / "model.safetensors")
    made = []
    uninitialised = loader._uninitialised
    monkeypatch.setattr(loader, "_uninitialised", lambda *args: made.append(args[-1].type) or uninitialised(*args))
    expect(text, LLM, str(published), **SMALL)
    assert made == ["meta"] or "more than 4 bits" in text  # which only shows when the codes are read


REFUSED = [
    ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4', which is not read; fp8, gptq, awq, compressed-tensors"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method is 'modelopt'"),
    ({"quant_method": "hqq"}, "quant_method is 'hqq'"),
    ({"bits": 4}, "quant_method is None"),
    ({"group_size": 64, "bits": 4, "mode": "affine"}, "the format is MLX's, which is not read; fp8, gptq, awq"),
    (gptq_config(bits=3), "bits is 3, which is not read; 4, 8 are"),
    (gptq_config(bits=4.0), "bits must be a whole number, found 4.0"),
    (gptq_config(checkpoint_format="marlin"), "checkpoint_format is 'marlin', which is not read; gptq and gptq_v2 are"),
    (gptq_config(group_size="all"), "group_size must be a whole number"),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
        "version is 'gemv', which is not read; gemm",
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "load_in_8bit is True, which is not read; load_in_4bit is",
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
        "bnb_4bit_quant_storage is 'bfloat16', which is not read; uint8 is",
    ),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two numbers"),
    (compressed("nvfp4-pack-quantized", weights_of(4, "float")), "format is 'nvfp4-pack-quantized', which is not read"),
    (compressed("mxfp4-pack-quantized", weights_of(4, "float")), "pack-quantized, int-quantized, float-quantized are"),
    (compressed("float-quantized", weights_of(8)), "type is 'int', which is not read; float is, with the format float"),
    (compressed(PACKED, weights_of(4, "float")), "type is 'float', which is not read; int is, with the format pack-q"),
    (compressed("marlin-24", weights_of(group_size=32)), "format is 'marlin-24', which is not read"),
    (
        compressed(PACKED, weights_of(group_size=32), sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config is 'sparse-24-bitmask', which is not read; dense weights are",
    ),
    (
        compressed(PACKED, weights_of(group_size=32), transform_config={"config_groups": {"a": {"type": "hadamard"}}}),
        "transform_config is",
    ),
    (compressed(PACKED, weights_of(3, group_size=32)), "num_bits is 3, which is not read; 4, 8 are"),
    (compressed(PACKED, weights_of(group_size=32), ignore=["re:("]), "is no regular expression"),
    (compressed(PACKED, weights_of(group_size=32), ignore=["re:a{99999999999999999999}"]), "is no regular expression"),
]


@pytest.mark.parametrize(("config", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_what_is_not_read_is_refused_by_name(broken, config, text):
    edit(broken / "config.json", quantization_config=config)
    expect(text, LLM, str(broken), **SMALL)


def test_an_older_checkpoint_of_mlx(broken):
    edit(broken / "config.json", quantization={"group_size": 64, "bits": 4})
    expect("the format is MLX's, which is not read", LLM, str(broken), **SMALL)


def test_words_in_any_case_of_letters(copied):
    """As compressed-tensors reads them."""
    published = copied("float-quantized")
    expected = tokens_of(published)
    capitals = compressed("float-quantized", weights_of(8, "FLOAT", "Channel"))
    edit(published / "config.json", quantization_config=capitals)
    assert tokens_of(published) == expected


AUTO_AWQ = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
AUTO_GPTQ = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}


@pytest.mark.parametrize(("kind", "fields"), [("awq", AUTO_AWQ), ("gptq", AUTO_GPTQ)])
@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_a_file_of_its_own(copied, kind, fields, name):
    """Its fields tell the method, whichever of the two names it has."""
    published = copied(kind)
    expected = tokens_of(published)
    edit(published / "config.json", quantization_config=None)
    (published / name).write_text(json.dumps(fields))
    assert tokens_of(published) == expected


def test_regular_expressions_are_compiled_once(monkeypatch):
    """Python by itself keeps no more than 512 of them."""
    dynamic = {rf"+:model\.layers\.{i}\.mlp": {"bits": 8} for i in range(600)}
    config = SimpleNamespace(quantization_config=gptq_config(dynamic=dynamic))
    published = read_published(config, config, Path("config.json"))
    found = published.scheme_of("model.norm")
    for name in ("compile", "match"):
        monkeypatch.setattr(re, name, lambda *given: pytest.fail("compiled again"))
    assert published.scheme_of("model.norm") == found


def test_names_and_regular_expressions():
    """What is left out is left out; of other rules, a name counts before a regular expression."""
    rows, groups = weights_of(8, strategy="channel"), weights_of(group_size=32)
    fields = compressed(PACKED, groups, ignore=["re:.*head", "a.o_proj"])
    [group] = fields["config_groups"].values()
    fields["config_groups"] = {"0": group | {"targets": ["Linear"]}, "1": group | {"targets": ["re:a.*"]}}
    fields["config_groups"] |= {"2": group | {"targets": ["lm_head", "a.q_proj", "a.o_proj"], "weights": rows}}
    config = SimpleNamespace(quantization_config=fields)
    published = read_published(config, config, Path("config.json"))
    found = {name: published.scheme_of(name) for name in ("lm_head", "a.o_proj", "a.q_proj", "a.k_proj", "b")}
    assert {name: scheme and scheme.bits for name, scheme in found.items()} == {
        "lm_head": None, "a.o_proj": None, "a.q_proj": 8, "a.k_proj": 4, "b": 4
    }  # fmt: skip


def test_few_bits_of_keys_and_values_only(broken):
    """Its weights are ordinary, so they may be rounded for a draft model."""
    fields = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    edit(broken / "config.json", quantization_config=fields)
    llm = LLM(str(broken), speculative_config={"method": "self", "quantization": "int8"}, **SMALL)
    assert llm.generate([[5, 6, 7, 8]], GREEDY, use_tqdm=False)[0].finished
    assert str(llm.engine.model_config.published) == "compressed-tensors, no weights of few bits"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_fewer_bits_on_top(checkpoint, published_of, quantization):
    published, _ = published_of(checkpoint(), "awq")
    text = f"holds quantized weights already; leave quantization='{quantization}' out"
    expect(text, LLM, str(published), quantization=quantization, **SMALL)


@pytest.mark.parametrize(
    ("kind", "named", "other"),
    [
        ("awq", ("awq", "awq_marlin"), "gptq"),
        ("gptq", ("gptq", "gptq_marlin"), "awq_marlin"),
        (PACKED, ("compressed-tensors",), "bitsandbytes"),
        ("fp8", ("fp8",), "gguf"),
    ],
)
def test_the_method_may_be_named(checkpoint, published_of, kind, named, other):
    """As scripts for vLLM do. Another than the checkpoint's is refused, and so is any for an ordinary checkpoint."""
    published, _ = published_of(checkpoint(), kind)
    expected = tokens_of(published)
    assert all(tokens_of(published, quantization=name) == expected for name in named)
    expect(f"has weights of {named[0]}; leave it out", LLM, str(published), quantization=other, **SMALL)
    ordinary = 'has weights that nobody has quantized; leave quantization out, or choose "int8" or "int4"'
    expect(ordinary, LLM, str(checkpoint()), quantization=named[0], **SMALL)


def tokens_of(path: Any, **options: Any) -> list[int]:
    return LLM(str(path), **SMALL | options).generate([[5, 6, 7, 8]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_what_stands_beside_the_weights(checkpoint, tmp_path, caplog):
    """Scales of K/V are named in a warning, those of activations in the log; biases of zeros are no weights."""
    (tmp_path / "plain").mkdir()
    plain, _ = publish(checkpoint(), tmp_path / "plain", *FORMATS["float-quantized, tensor"])
    more = {
        f"{Q_PROJ.replace('q_proj', 'k_proj')}.output_scale": torch.tensor(0.5),
        f"{Q_PROJ}.input_scale": torch.ones(1),
    }
    more |= {"model.layers.1.self_attn.v_scale": torch.ones(1), f"{DOWN}.bias": torch.zeros(64)}
    pack, config = FORMATS["float-quantized, tensor"]
    config = json.loads(json.dumps(config)) | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float"}
    published, _ = publish(checkpoint(), tmp_path, pack, config, more=more)
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert tokens_of(published) == tokens_of(plain)
    assert "2 scales of K/V in the file (model.layers.0.self_attn.k_proj.output_scale, ...) are not used" in caplog.text
    assert "kv_cache_scheme asks for K/V of 8 bits (float), which is not done" in caplog.text
    assert "activations are rounded to 8 bits in groups of 32, where the file asks for 8 bits (float)" in caplog.text
    assert "held as int8: lm_head.weight\n" in caplog.text
    more[f"{DOWN}.bias"] = torch.ones(64)
    (tmp_path / "other").mkdir()
    other, _ = publish(checkpoint(), tmp_path / "other", pack, config, more=more)
    expect(f"not part of a LlamaForCausalLM: {DOWN}.bias", LLM, str(other), **SMALL)


def test_a_report(checkpoint, tmp_path, capsys):
    pack, config = FORMATS[PACKED]
    config = config | {"ignore": ["lm_head", "re:.*o_proj"]}
    published, _ = publish(
        checkpoint("qwen3"), tmp_path, pack, config, is_packed=lambda name: "_proj." in name and "o_proj" not in name
    )
    assert main(["check-model", str(published)]) == 0
    found = rows_of(capsys)
    assert found["quantized"] == "compressed-tensors, 4 bits, a scale for 32 inputs"
    assert found["left out"] == "lm_head.weight, model.layers.*.self_attn.o_proj.weight (2)"
    assert "12 in Q4_0" in found["weights"] and found["memory"].startswith("as it is ")
    edit(published / "config.json", quantization_config=config | {"format": "nvfp4-pack-quantized"})
    assert main(["check-model", str(published)]) == 1
    assert "nvfp4-pack-quantized" in rows_of(capsys)["error"]
