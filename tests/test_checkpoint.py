"""Where a checkpoint's files are, and what its config.json may say."""

import json

import pytest
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.files import tokenizer as tokenizer_file
from nanovllm.files.tokenizer import load_tokenizer
from tests.checkpoints import CORPUS, LLAMA3_ROPE, NULL, YARN_ROPE, edit, make_tokenizer
from tests.errors import expect


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
        (["model.safetensors"], "has no *.safetensors file and no GGUF file, only"),
    ],
)
def test_missing_files(broken, files, text):
    for name in files:
        (broken / name).unlink()
    expect(text, LLM, str(broken), error=FileNotFoundError)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            b"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0\x18\x02",
            "a SentencePiece model, which is read with sentencepiece and protobuf",
        ),
        (
            b"IQ== 0\nIg== 1\n",
            "a tiktoken model, which is read with tiktoken, not installed here: run  pip install tiktoken",
        ),
    ],
)
def test_a_tokenizer_that_a_package_reads(broken, monkeypatch, content, text):
    (broken / "tokenizer.json").unlink()
    (broken / "tokenizer.model").write_bytes(content)
    monkeypatch.setattr(tokenizer_file, "find_spec", lambda name: None)
    expect(text, LLM, str(broken))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            dict(architectures=["GPT2LMHeadModel"]),
            "architecture of a llama must be one of LlamaForCausalLM, LlamaModel, LlamaForSequ",
        ),
        (dict(model_type="gpt2"), "model_type must be one of llama, mistral, "),
        (dict(model_type=None), "model_type must be one of"),
        (dict(model_type="qwen3"), "architecture of a qwen3 must be one of Qwen3ForCausalLM"),
        (dict(hidden_size=None), "the configuration implies [320, 4096]"),
        (dict(hidden_size="big"), "LlamaConfig does not take it: Validation error for field 'hidden_size'"),
        (dict(hidden_act="gelu"), "hidden_act must be one of silu, found 'gelu'"),
        (dict(quantization_config={"quant_method": "mxfp4"}), "quant_method is 'mxfp4', which is not read"),
        (dict(num_key_value_heads=3), "4 query heads cannot share 3 KV heads"),
        (
            dict(rope_parameters=None, rope_scaling={"type": "su", "factor": 4.0}),
            "rotary scaling must be one of default, linear, llama3, yarn, found 'su'",
        ),
        (dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "its angles change while a sequence grows"),
        (dict(rope_parameters={"rope_type": None, "rope_theta": 1e4}), "rotary scaling must be one of default"),
        (
            dict(rope_parameters={"rope_type": "yarn"}),
            "Missing required keys in `rope_parameters` for 'rope_type'='yarn': {'factor'}",
        ),
        (dict(rope_parameters=YARN_ROPE | {"factor": 0.5}), "rotary scaling: factor must be a number between 1.0"),
        (dict(rope_parameters=YARN_ROPE | {"factor": 1e9}), "max_position_embeddings must be a whole number between 1"),
        (dict(rope_parameters=YARN_ROPE | {"beta_fast": 1.0}), "beta_fast of the rotary scaling must be above"),
        (dict(rope_parameters=YARN_ROPE | {"truncate": "yes"}), "truncate must be a bool, found 'yes'"),
        (dict(rope_parameters=YARN_ROPE | {"rope_theta": 1.0}), "rope_theta must be a number from 1.001"),
        (dict(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "Missing required keys in `rope_parameters`"),
        (dict(dtype="int8"), "dtype of the weights must be one of float, half, float32"),
        (dict(auto_map={"AutoModelForCausalLM": "modeling.Llama"}), "auto_map asks to run the checkpoint's own code"),
        (dict(architectures="LlamaForCausalLM"), "architectures must be a list, found 'LlamaForCausalLM'"),
        (dict(architectures=[["x"]]), "architecture of a llama must be one of"),
        (dict(tie_word_embeddings=1), "error for field 'tie_word_embeddings'"),
        (dict(vocab_size=10**400), "vocab_size must be a whole number between 1 and 16777216, found 1000"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers must be a whole number between 1 and 1024"),
        (dict(num_key_value_heads=0), "num_key_value_heads must be a whole number between 1"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps must be a number between"),
        (dict(rope_parameters={"rope_theta": float("nan")}), "rope_theta must be a number between 1e-10"),
        (dict(rope_parameters={"rope_theta": 0}), "rope_theta must be a number from 1e-10, found 0"),
        (dict(rope_parameters=None, rope_theta=-1e4), "rope_theta must be a number from 1e-10, found -10000.0"),
        (dict(rope_parameters={"full_attention": {}}), "differs from layer to layer (['full_attention'])"),
        (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
        (dict(rope_parameters={"rope_type": "linear", "factor": 1e-300}), "factor must be a number between 1e-10"),
        (dict(rope_parameters=LLAMA3_ROPE | {"low_freq_factor": 4.0}), "low_freq_factor of the rotary scaling must be"),
        (dict(quantization_config="awq"), "quantization_config must be an object, found 'awq'"),
        (dict(layer_types=5), "LlamaConfig does not take it"),
        (dict(head_dim=17), "RoPE requires an even rotary dimension"),
        (dict(hidden_size=2, head_dim=None), "is not a multiple of the number of attention heads"),
        (dict(intermediate_size=100), "wrong shape: model.layers.0.mlp.gate_proj.weight is [96, 64]"),
        (dict(num_hidden_layers=3), "missing: model.layers.2."),
        (dict(num_hidden_layers=1), "not part of a LlamaForCausalLM: model.layers.1."),
        (
            dict(model_type="qwen2", architectures=None, head_dim=None, num_attention_heads=0),
            "num_attention_heads must",
        ),
        (dict(is_causal=False), "its tokens see later ones (is_causal is false)"),
        (dict(is_causal=NULL), "its tokens see later ones (is_causal is false)"),
        (
            dict(model_type="qwen3", architectures=None, rope_parameters={"full_attention": {}}),
            "differs from layer to layer",
        ),
        (dict(per_layer_config={"0": {"intermediate_size": 32}}), "per_layer_config gives some layers other sizes"),
        (dict(transformers_weights="other.safetensors"), "transformers_weights names 'other.safetensors'"),
    ],
)
def test_config(broken, changes, text):
    edit(broken / "config.json", **changes)
    expect(text, LLM, str(broken), num_gpu_blocks_override=64)


def test_eos(broken):
    generation = broken / "generation_config.json"
    for eos, text in [(320, "320"), ([1, -1], "-1"), ("1", "'1'"), (True, "True"), ([[1]], "[1]"), ({}, "{}")]:
        edit(generation, eos_token_id=eos)
        expect(f"eos_token_id must be a whole number between 0 and 319, found {text} (", LLM, str(broken))
    edit(generation, eos_token_id=None)  # not said: config.json's and the tokenizer's
    assert ModelConfig.from_directory(broken).eos_token_ids == {1}
    edit(broken / "config.json", eos_token_id=None)  # nor there: the tokenizer's alone, which may be outside, too
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<|{i}|>" for i in range(321)])
    tokenizer.eos_token = "<|320|>"
    tokenizer.save_pretrained(broken)
    expect("eos_token_id must be a whole number between 0 and 319, found", LLM, str(broken))


def test_generation_config(broken, caplog):
    for name, value in dict(temperature="hot", top_k=2**63, top_p=1e-50, max_new_tokens=0, do_sample="no").items():
        edit(broken / "generation_config.json", **{name: value})
        expect(f"generation_config.json: {name} must be a", LLM, str(broken))
        edit(broken / "generation_config.json", **{name: None})
    edit(broken / "generation_config.json", do_sample=False, max_new_tokens=7, top_k=5)
    assert ModelConfig.from_directory(broken).generation == {"max_tokens": 7, "top_k": 5, "temperature": 0.0}
    assert not caplog.text
    overridden = ModelConfig.from_directory(broken, {"top_k": 9, "max_new_tokens": 5})  # fields of config.json
    assert overridden.generation == {"max_tokens": 7, "top_k": 5, "temperature": 0.0}
    edit(broken / "generation_config.json", num_beams=1, suppress_tokens=[5], bad_words_ids=[], typical_p=0.9)
    ModelConfig.from_directory(broken)
    assert "generate() does: typical_p, suppress_tokens\n" in caplog.text


def test_an_adapter_beside_the_checkpoint_is_told(broken, caplog):
    (broken / "adapter_config.json").write_text("{}")
    ModelConfig.from_directory(broken)
    assert "(adapter_config.json) is not applied; a request may choose it: lora_request" in caplog.text


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_code_of_a_checkpoint_never_runs(broken, monkeypatch, file):
    """Not even after a question: whoever runs a job in a terminal is not asked."""
    (broken / "code.py").write_text(f"open({str(broken / 'was_here')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    edit(broken / file, auto_map={"AutoTokenizer": ["code.Slow", None], "AutoConfig": "code.Config"})
    expect(f"{file}: auto_map asks to run", LLM, str(broken), num_gpu_blocks_override=64)
    assert not (broken / "was_here").exists()


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "smollm3", "unknown", None])
@pytest.mark.parametrize(
    "name", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizer", None]
)
def test_tokenizer_is_the_one_that_transformers_makes(broken, model_type, name):
    """Whatever its class is called: the same class, and the same ids."""
    edit(broken / "tokenizer_config.json", tokenizer_class=name)
    edit(broken / "config.json", model_type=model_type)
    ours, theirs = load_tokenizer(broken), AutoTokenizer.from_pretrained(str(broken))
    assert type(ours) is type(theirs)
    for text in (*CORPUS, "  naive\n\n3.14 fox 😀 I'LL", "<|im_start|>user\nhi<|im_end|>"):
        assert ours(text).input_ids == theirs(text).input_ids


@pytest.mark.parametrize("scaling", [{}, NULL])
def test_old_spellings_of_a_config(broken, scaling):
    """rope_theta + rope_scaling and torch_dtype, as transformers 4 wrote them, give the same model."""
    [before] = LLM(str(broken), num_gpu_blocks_override=64).generate([[5, 6, 7]], SamplingParams(temperature=0))
    edit(
        broken / "config.json",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling=scaling,
        dtype=None,
        torch_dtype="float32",
    )
    llm = LLM(str(broken), num_gpu_blocks_override=64)
    assert llm.generate([[5, 6, 7]], SamplingParams(temperature=0))[0].outputs == before.outputs


def test_a_tokenizer_with_dropout_gives_the_same_ids_each_time(broken, caplog):
    """Merges that are left out by chance are for training."""
    path = broken / "tokenizer.json"
    expected = load_tokenizer(broken)(CORPUS).input_ids
    edit(path, model=json.loads(path.read_text())["model"] | {"dropout": 0.9})
    tokenizer = load_tokenizer(broken)
    assert [tokenizer(CORPUS).input_ids for _ in range(3)] == [expected] * 3
    assert caplog.text.count("the tokenizer's dropout is switched off") == 1


def test_a_tokenizer_that_samples_is_refused(broken, monkeypatch):
    tokenizer = load_tokenizer(broken)
    tokenizer.sp_model_kwargs = {"enable_sampling": True, "alpha": 0.1}
    monkeypatch.setattr("nanovllm.files.tokenizer._from_directory", lambda *_: tokenizer)
    expect("cannot be used: it samples (enable_sampling in sp_model_kwargs)", load_tokenizer, broken)
