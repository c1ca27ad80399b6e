"""Where a checkpoint's files are, and what its config.json may say."""

import json

import pytest
from errors import expect

from nanovllm import LLM, SamplingParams


def edit(path, **changes) -> None:
    config = json.loads(path.read_text())
    for name, value in changes.items():
        config[name] = value
        if value is None:
            del config[name]
    path.write_text(json.dumps(config))


def test_no_such_model(tmp_path, broken, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expect("does not exist", LLM, "/no/such/folder", error=FileNotFoundError)
    expect("does not exist", LLM, "nosuchmodel", error=FileNotFoundError)
    expect("is a file", LLM, str(broken / "config.json"), error=FileNotFoundError)
    expect("could not be downloaded", LLM, "nobody-here/no-such-model", error=FileNotFoundError)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (["config.json"], "has no config.json"),
        (["tokenizer.json", "tokenizer_config.json"], "has no tokenizer"),
        (["model.safetensors"], "has no *.safetensors file, only"),
    ],
)
def test_missing_files(broken, files, text):
    for name in files:
        (broken / name).unlink()
    expect(text, LLM, str(broken), error=FileNotFoundError)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(architectures=["GPT2LMHeadModel"]), "Qwen3ForCausalLM, found 'GPT2LMHeadModel'"),
        (dict(architectures=None), "none named"),
        (dict(hidden_size=None, rms_norm_eps=None), "lacks hidden_size, rms_norm_eps"),
        (dict(hidden_size="big"), "hidden_size must be a whole number"),
        (dict(hidden_act="gelu"), "hidden_act must be one of silu, found 'gelu'"),
        (dict(quantization_config={"quant_method": "awq"}), "quantized ({'quant_method': 'awq'})"),
        (dict(sliding_window=4096), "sliding-window attention is not supported"),
        (dict(num_key_value_heads=3), "4 query heads cannot share 3 KV heads"),
        (
            dict(rope_parameters=None, rope_scaling={"type": "yarn", "factor": 4.0}),
            "rotary scaling must be one of default, linear, llama3, found 'yarn'",
        ),
        (dict(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "lacks low_freq_factor, high_freq_factor"),
        (dict(dtype="int8"), "dtype of the weights must be one of float, half, float32"),
        (dict(intermediate_size=100), "wrong shape: model.layers.0.mlp.gate_proj.weight is [96, 64]"),
        (dict(num_hidden_layers=3), "missing: model.layers.2."),
        (dict(num_hidden_layers=1), "not part of a LlamaForCausalLM: model.layers.1."),
    ],
)
def test_config(broken, changes, text):
    edit(broken / "config.json", **changes)
    expect(text, LLM, str(broken), num_gpu_blocks_override=64)


def test_old_spellings_of_a_config(broken):
    """rope_theta + rope_scaling and torch_dtype, as transformers 4 wrote them, give the same model."""
    [before] = LLM(str(broken), num_gpu_blocks_override=64).generate([[5, 6, 7]], SamplingParams(temperature=0))
    edit(
        broken / "config.json",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling=None or {},
        dtype=None,
        torch_dtype="float32",
    )
    llm = LLM(str(broken), num_gpu_blocks_override=64)
    assert llm.generate([[5, 6, 7]], SamplingParams(temperature=0))[0].outputs == before.outputs
