"""Where a checkpoint's files are, and what its config.json may say."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.files.tokenizer import load_tokenizer
from nanovllm.worker.layers import RotaryEmbedding
from tests.checkpoints import CORPUS, LLAMA3_ROPE, SIZES, YARN_ROPE, make_tokenizer
from tests.errors import expect

DELETE = object()  # a field that is not there; None: one that is null


def edited(tmp_path, checkpoint, changes):
    """A copy of a checkpoint's config.json with other values."""
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not DELETE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


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
        (["model.safetensors"], "has no *.safetensors file and no GGUF file, only"),
    ],
)
def test_missing_files(broken, files, text):
    for name in files:
        (broken / name).unlink()
    expect(text, LLM, str(broken), error=FileNotFoundError)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(architectures=["GPT2LMHeadModel"]), "Qwen3MoeForCausalLM, found 'GPT2LMHeadModel'"),
        (dict(architectures=None), "none named"),
        (dict(hidden_size=None, rms_norm_eps=None), "lacks hidden_size, rms_norm_eps"),
        (dict(hidden_size="big"), "hidden_size must be a whole number"),
        (dict(hidden_act="gelu"), "hidden_act must be one of silu, found 'gelu'"),
        (dict(quantization_config={"quant_method": "awq"}), "quantized ({'quant_method': 'awq'})"),
        (dict(sliding_window=4096), "sliding_window is 4096, and a LlamaForCausalLM sees all tokens in every layer"),
        (dict(layer_types=["sliding_attention"] * 2), "no window is used: sliding_window must be a number"),
        (dict(num_key_value_heads=3), "4 query heads cannot share 3 KV heads"),
        (
            dict(rope_parameters=None, rope_scaling={"type": "longrope", "factor": 4.0}),
            "rotary scaling must be one of default, linear, llama3, yarn, found 'longrope'",
        ),
        (dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "its angles change while a sequence grows"),
        (dict(rope_parameters={"rope_type": "yarn"}), "rotary scaling 'yarn' lacks factor"),
        (dict(rope_parameters=YARN_ROPE | {"factor": 0.5}), "rotary scaling: factor must be a number between 1.0"),
        (dict(rope_parameters=YARN_ROPE | {"factor": 1e9}), "max_position_embeddings must be a whole number between 1"),
        (dict(rope_parameters=YARN_ROPE | {"beta_fast": 1.0}), "beta_fast of the rotary scaling must be above"),
        (dict(rope_parameters=YARN_ROPE | {"truncate": "yes"}), "truncate must be a bool, found 'yes'"),
        (dict(rope_parameters=YARN_ROPE | {"rope_theta": 1.0}), "rope_theta must be a number from 1.001"),
        (dict(rope_parameters=YARN_ROPE | {"mscales": 1.0}), "['mscales'] of the rotary scaling is not supported"),
        (dict(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "lacks low_freq_factor, high_freq_factor"),
        (dict(dtype="int8"), "dtype of the weights must be one of float, half, float32"),
        (dict(auto_map={"AutoModelForCausalLM": "modeling.Llama"}), "auto_map asks to run the checkpoint's own code"),
        (dict(architectures="LlamaForCausalLM"), "architectures must be a list, found 'LlamaForCausalLM'"),
        (dict(architectures=[["x"]]), "architecture must be one of"),
        (dict(tie_word_embeddings=1), "tie_word_embeddings must be a bool, found 1"),
        (dict(vocab_size=10**400), "vocab_size must be a whole number between 1 and 16777216, found 1000"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers must be a whole number between 1 and 1024"),
        (dict(num_key_value_heads=0), "num_key_value_heads must be a whole number between 1"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps must be a number between"),
        (dict(rope_parameters={"rope_theta": float("nan")}), "rope_theta must be a number between 1e-10"),
        (dict(rope_parameters={"rope_theta": 0}), "rope_theta must be a number from 1e-10, found 0"),
        (dict(rope_parameters=None, rope_theta=-1e4), "rope_theta must be a number from 1e-10, found -10000.0"),
        (dict(rope_parameters={"full_attention": {}}), "['full_attention'] of the rotary scaling is not supported"),
        (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
        (dict(rope_parameters={"rope_type": "linear", "factor": 1e-300}), "factor must be a number between 1e-10"),
        (dict(rope_parameters=LLAMA3_ROPE | {"low_freq_factor": 4.0}), "low_freq_factor of the rotary scaling must be"),
        (dict(quantization_config="awq"), "quantized ('awq')"),
        (dict(layer_types=5), "layer_types must be a list"),
        (dict(head_dim=17), "head_dim is 17; it must be even"),
        (dict(hidden_size=2, head_dim=None), "head_dim is 0; it must be even"),
        (dict(intermediate_size=100), "wrong shape: model.layers.0.mlp.gate_proj.weight is [96, 64]"),
        (dict(num_hidden_layers=3), "missing: model.layers.2."),
        (dict(num_hidden_layers=1), "not part of a LlamaForCausalLM: model.layers.1."),
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
    edit(generation, eos_token_id=None)  # not said: then config.json's
    assert ModelConfig.from_directory(broken).eos_token_ids == {1}
    edit(broken / "config.json", eos_token_id=None)  # nor there: then the tokenizer's, which may be outside, too
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<|{i}|>" for i in range(321)])
    tokenizer.eos_token = "<|320|>"
    tokenizer.save_pretrained(broken)
    expect("eos_token_id must be a whole number between 0 and 319, found", LLM, str(broken))


def test_generation_config(broken):
    for name, value in dict(temperature="hot", top_k=2**63, top_p=1e-50, max_new_tokens=0, do_sample="no").items():
        edit(broken / "generation_config.json", **{name: value})
        expect(f"generation_config.json: {name} must be a", LLM, str(broken))
        edit(broken / "generation_config.json", **{name: None})
    edit(broken / "generation_config.json", do_sample=False, max_new_tokens=7, top_k=5)
    assert ModelConfig.from_directory(broken).generation == {"max_tokens": 7, "top_k": 5, "temperature": 0.0}


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


def test_odd_heads_are_refused_as_by_transformers(broken):
    """Rotary embedding turns pairs of numbers: what transformers computes for an odd head, if anything, is not that."""
    with pytest.raises(Exception, match="even rotary dimension"):
        LlamaConfig(**SIZES, head_dim=15)
    edit(broken / "config.json", head_dim=15)
    expect("head_dim is 15; it must be even", LLM, str(broken))


def test_rotary_table_has_the_positions_that_can_occur(broken):
    edit(broken / "config.json", max_position_embeddings=2**20)
    llm = LLM(str(broken), num_gpu_blocks_override=64, max_model_len=64)
    assert llm.engine.model_runner.rotary.table.shape[1] == 64
    assert len(llm.generate([[5] * 60], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 4


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


@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(rope_theta=1e6, original_max_position_embeddings=32768),
        dict(beta_fast=16.0, beta_slow=2.0),
        dict(truncate=False, original_max_position_embeddings=4096),
        dict(attention_factor=1.25),
        dict(mscale=0.707, mscale_all_dim=1.0),
        dict(mscale=0.707),
        dict(factor=1.0),
        dict(original_max_position_embeddings=4),
    ],
    ids=str,
)
def test_yarn_is_that_of_transformers(broken, options, head_dim):
    rope = YARN_ROPE | options
    edit(broken / "config.json", rope_parameters=rope, head_dim=head_dim)
    config = ModelConfig.from_directory(broken)
    assert config.max_position_embeddings == rope["factor"] * rope["original_max_position_embeddings"]
    theirs = Qwen3Config(**SIZES | dict(head_dim=head_dim, rope_parameters=rope))
    inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    angles = torch.arange(100)[:, None] * inv_freq
    ours = RotaryEmbedding(config, 100, torch.float32, torch.device("cpu")).table
    torch.testing.assert_close(ours, torch.stack([angles.cos(), angles.sin()]) * factor, atol=1e-4, rtol=0)


def test_the_length_before_the_scaling_may_stand_beside_it(broken):
    """As some checkpoints have it; it comes before the one in the scaling's own fields."""
    edit(broken / "config.json", rope_parameters=YARN_ROPE, original_max_position_embeddings=64)
    assert ModelConfig.from_directory(broken).max_position_embeddings == 256


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("variant", "changes", "windows"),
    [
        ("mistral", {}, {}),
        ("mistral-window", {}, {0: 7, 1: 7}),
        ("mistral-window", dict(sliding_window=DELETE), {0: 4096, 1: 4096}),  # the default of transformers
        ("mistral-window", dict(sliding_window=None), {}),  # said to be none
        ("mistral-window", dict(use_sliding_window=False), {0: 7, 1: 7}),
        ("mistral-window", dict(layer_types=[SLIDING, SLIDING]), {0: 7, 1: 7}),
        ("qwen2", {}, {}),
        ("qwen2-window", {}, {1: 21}),
        ("qwen2-window", dict(layer_types=DELETE), {1: 21}),  # as older files have it
        ("qwen2-window", dict(layer_types=DELETE, max_window_layers=0), {0: 21, 1: 21}),
        ("qwen2-window", dict(layer_types=DELETE, max_window_layers=DELETE), {}),
        ("qwen2-window", dict(layer_types=[SLIDING, FULL]), {0: 21}),
        ("qwen2-window", dict(layer_types=DELETE, max_window_layers=1, sliding_window=DELETE), {1: 4096}),
        ("qwen2-window", dict(layer_types=DELETE, use_sliding_window=DELETE), {}),
        ("smollm3", {}, {}),
        ("smollm3", dict(use_sliding_window=True, sliding_window=9, layer_types=DELETE), {3: 9}),
        ("smollm3", dict(use_sliding_window=True, sliding_window=9, layer_types=[SLIDING] + [FULL] * 3), {0: 9}),
    ],
)
def test_windows(tmp_path, checkpoint, variant, changes, windows):
    folder = edited(tmp_path, checkpoint(variant), changes)
    config = ModelConfig.from_directory(folder)
    assert config.windows == windows
    theirs = AutoConfig.from_pretrained(folder)
    slides = getattr(theirs, "layer_types", None) or [SLIDING if theirs.sliding_window else FULL] * 2
    assert windows == {i: theirs.sliding_window for i, kind in enumerate(slides) if kind == SLIDING}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {3}),
        (dict(no_rope_layers=DELETE), {3}),
        (dict(no_rope_layers=None), {3}),
        (dict(no_rope_layers=DELETE, no_rope_layer_interval=2), {1, 3}),
        (dict(no_rope_layers=DELETE, no_rope_layer_interval=1), {0, 1, 2, 3}),
        (dict(no_rope_layers=[0, 1, 1, 0]), {0, 3}),
        (dict(no_rope_layers=[1, 0, 1, 1, 0, 0]), {1}),  # of a model that has had more layers
    ],
)
def test_layers_without_rotary(tmp_path, checkpoint, changes, layers):
    folder = edited(tmp_path, checkpoint("smollm3"), changes)
    assert ModelConfig.from_directory(folder).layers_without_rotary == layers
    assert {i for i in range(4) if not AutoConfig.from_pretrained(folder).no_rope_layers[i]} == layers


def test_what_a_smollm3_config_leaves_out(tmp_path, checkpoint):
    missing = dict(tie_word_embeddings=DELETE, rope_parameters=DELETE, num_key_value_heads=DELETE, eos_token_id=DELETE)
    config = ModelConfig.from_directory(edited(tmp_path, checkpoint("smollm3"), missing))
    assert (config.tie_word_embeddings, config.rope_theta, config.num_key_value_heads) == (True, 2e6, 4)


@pytest.mark.parametrize(
    ("variant", "changes", "text"),
    [
        ("mistral-window", dict(sliding_window=0), "sliding_window must be a whole number between 1"),
        ("mistral-window", dict(sliding_window=-5), "sliding_window must be a whole number between 1"),
        ("mistral-window", dict(sliding_window=8.5), "sliding_window must be a whole number between 1"),
        ("mistral-window", dict(sliding_window="8"), "sliding_window must be a whole number between 1"),
        ("mistral-window", dict(layer_types=[SLIDING, FULL]), "layer_types differs from sliding_window, which in a"),
        ("mistral", dict(layer_types=[SLIDING, SLIDING]), "no window is used: sliding_window must be a number"),
        ("qwen2-window", dict(layer_types=[SLIDING]), "layer_types must name the attention of 2 layers, found 1"),
        ("qwen2-window", dict(layer_types=[FULL] * 3), "layer_types must name the attention of 2 layers, found 3"),
        (
            "qwen2-window",
            dict(layer_types=[FULL, "chunked_attention"]),
            "layer_types[1] must be one of full_attention, sliding_attention, found 'chunked_attention'",
        ),
        ("qwen2-window", dict(layer_types=[FULL, [SLIDING]]), "layer_types[1] must be one of"),
        ("qwen2-window", dict(use_sliding_window=False), "no window is used: sliding_window must be a number"),
        ("qwen2-window", dict(use_sliding_window="yes"), "use_sliding_window must be a bool"),
        ("qwen2-window", dict(max_window_layers=-1), "max_window_layers must be a whole number from 0"),
        ("smollm3", dict(no_rope_layers=[1, 1, 0]), "a 0 (none) for each of 4 layers, found 3: [1, 1, 0]"),
        ("smollm3", dict(no_rope_layers=[1, 1, 1, 2]), "no_rope_layers must have a 1 (rotary embedding) or"),
        ("smollm3", dict(no_rope_layers=5), "no_rope_layers must be a list"),
        ("smollm3", dict(no_rope_layers=None, no_rope_layer_interval=0), "no_rope_layer_interval must be a whole"),
    ],
)
def test_layer_kinds_that_make_no_sense(tmp_path, checkpoint, variant, changes, text):
    expect(text, ModelConfig.from_directory, edited(tmp_path, checkpoint(variant), changes))


def test_overrides_of_windows(checkpoint):
    """As vLLM has them: hf_overrides take a window away, or bring one."""
    full = ModelConfig.from_directory(checkpoint("mistral-window"), {"sliding_window": None})
    assert full.windows == {}
    overrides = dict(use_sliding_window=True, sliding_window=5, max_window_layers=0, layer_types=None)
    assert ModelConfig.from_directory(checkpoint("qwen2"), overrides).windows == {0: 5, 1: 5}


def test_a_tokenizer_with_dropout_gives_the_same_ids_each_time(broken, caplog):
    """Merges that are left out by chance are for training."""
    path = broken / "tokenizer.json"
    expected, tokenizer = load_tokenizer(broken)(CORPUS).input_ids, json.loads(path.read_text())
    path.write_text(json.dumps(tokenizer | {"model": tokenizer["model"] | {"dropout": 0.9}}))
    tokenizer = load_tokenizer(broken)
    assert [tokenizer(CORPUS).input_ids for _ in range(3)] == [expected] * 3
    assert caplog.text.count("the tokenizer's dropout is switched off") == 1


def test_a_tokenizer_that_samples_is_refused(broken, monkeypatch):
    tokenizer = load_tokenizer(broken)
    tokenizer.sp_model_kwargs = {"enable_sampling": True, "alpha": 0.1}
    monkeypatch.setattr("nanovllm.files.tokenizer._from_directory", lambda *_: tokenizer)
    expect("cannot be used: it samples (enable_sampling in sp_model_kwargs)", load_tokenizer, broken)
