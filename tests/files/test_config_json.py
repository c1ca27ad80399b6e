"""What config.json says is what transformers' configuration class says of it, with hf_overrides as in the file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config
from transformers.models.smolvlm import SmolVLMConfig, SmolVLMForConditionalGeneration

import tests.image_checkpoints as images
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from tests.checkpoints import LLAMA3_ROPE, NULL, VARIANTS, YARN_ROPE, edit, make_checkpoint, make_tokenizer
from tests.errors import expect
from tests.image_checkpoints import make_image_checkpoint
from tests.marks import by_night

PROMPT = list(range(5, 60))
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def assert_as_transformers(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> None:
    """Log probabilities after a prompt, of a model in the folder as it is now. options: of LLM."""
    model, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"], "then transformers' answer would be random"
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    llm = LLM(str(folder), dtype="float32", block_size=4, num_gpu_blocks_override=100, max_model_len=100, **options)
    [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1, logprobs=5), use_tqdm=False)
    for token_id, entry in output.outputs[0].logprobs[0].items():
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-3)


# -- the rotary embedding ---------------------------------------------------------------------------------------------


CLASS_DEFAULT = dict(rope_parameters=None, rope_theta=None)
SPELLINGS = [
    dict(rope_scaling=YARN_ROPE),
    dict(rope_scaling={**LINEAR_ROPE, "type": "linear"}),
    dict(rope_scaling={"type": "linear", "factor": 2.0}),  # and no rope_theta: that of rope_parameters is not taken
    dict(rope_scaling=LLAMA3_ROPE, rope_theta=77.0),
    dict(rope_parameters=None, rope_scaling={"type": "yarn", "factor": 2.0}, rope_theta=5000.0),
    dict(rope_parameters=None, rope_scaling=NULL, rope_theta=5000.0),
    dict(rope_parameters=NULL),
    CLASS_DEFAULT,
    dict(rope_parameters={"rope_theta": 300.0}, rope_theta=5000.0),
    dict(rope_parameters=YARN_ROPE | {"finetuned": True}, original_max_position_embeddings=64),
]


@pytest.mark.parametrize(
    ("variant", "spelling"),
    [
        *(("llama", spelling) for spelling in SPELLINGS),
        *((variant, CLASS_DEFAULT) for variant in ("qwen3", "mistral")),
        *(by_night(variant, s) for variant in ("qwen3", "mistral") for s in SPELLINGS if s is not CLASS_DEFAULT),
    ],
)
def test_spellings_of_the_rotary_embedding(tmp_path, variant, spelling):
    """Beside the rope_parameters that transformers writes, or in their place."""
    edit((folder := make_checkpoint(tmp_path, variant)) / "config.json", **spelling)
    assert_as_transformers(folder)


@pytest.mark.parametrize(
    ("overrides", "rope"),
    [
        (dict(rope_parameters=YARN_ROPE), YARN_ROPE),
        (dict(rope_scaling=YARN_ROPE), YARN_ROPE),
        (dict(rope_scaling={"type": "linear", "factor": 4.0}), LINEAR_ROPE),
        (dict(rope_theta=50.0), {"rope_type": "default", "rope_theta": 50.0}),
        (dict(rope_theta=50.0, rope_scaling={"type": "linear", "factor": 4.0}), LINEAR_ROPE | {"rope_theta": 50.0}),
        (dict(text_config={"rope_scaling": YARN_ROPE}), YARN_ROPE),
    ],
    ids=str,
)
def test_overrides_of_the_rotary_embedding(checkpoint, copy_of, overrides, rope):
    """They are the file's fields. A scaling that is given without a rope_theta keeps the file's."""
    edit((folder := copy_of("qwen3")) / "config.json", rope_parameters=rope)
    assert ModelConfig.from_directory(checkpoint("qwen3"), overrides) == ModelConfig.from_directory(folder)


# -- what is left out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_field_that_equals_its_class_default_may_be_left_out(copy_of, variant):
    folder = copy_of(variant)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    defaults = type(AutoConfig.from_pretrained(folder))().to_dict()
    changes = {name: defaults[name] for name in fields if name in ("rms_norm_eps", "hidden_act", "attention_bias")}
    path.write_text(json.dumps(fields | changes))
    expected = ModelConfig.from_directory(folder)
    kept = {n: value for n, value in fields.items() if n not in changes and (n in CALLED or value != defaults.get(n))}
    assert len(kept) < len(fields) - 5
    path.write_text(json.dumps(kept))
    assert ModelConfig.from_directory(folder) == expected


CALLED = ("model_type", "architectures", "eos_token_id")  # what a checkpoint is called, and what ends its answers


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3", "qwen3_vl"])
def test_default_heads_of_a_text_config(monkeypatch, tmp_path, kind):
    """32 is the default of their classes, so older versions of transformers did not write it."""
    text, *others = images.KINDS[kind]
    text = text | dict(num_attention_heads=32, num_key_value_heads=32, head_dim=8)
    if kind == "qwen3_vl":
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    monkeypatch.setitem(images.KINDS, kind, (text, *others))
    folder = make_image_checkpoint(tmp_path, kind)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    left_out = ("num_attention_heads", "num_key_value_heads", "hidden_act", "model_type", "attention_bias")
    edit(folder / "config.json", text_config={n: value for n, value in text.items() if n not in left_out})
    assert_as_transformers(folder, AutoModelForImageTextToText)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_dtype_in_the_configuration(copy_of, dtype):
    """Then it is that of the weights."""
    folder = copy_of("llama")
    weights = load_file(folder / "model.safetensors")
    matrices = {name: weight.to(dtype) for name, weight in weights.items() if weight.dim() > 1}
    save_file(weights | matrices, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", dtype=None)
    assert LLM(str(folder), num_gpu_blocks_override=40).engine.model_runner.dtype == dtype


# -- models in models -------------------------------------------------------------------------------------------------


STALE: dict[str, Any] = {
    "rms_norm_eps": 0.05,
    "rope_theta": 77.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "max_position_embeddings": 64,
    "num_attention_heads": 8,
    "head_dim": 128,
    "hidden_size": 128,
    "vocab_size": 151936,
    "num_hidden_layers": 9,
    "sliding_window": 4,
    "layer_types": ["full_attention"] * 9,
    "hidden_act": "gelu",
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl", "qwen3_5"])
def test_copies_of_text_fields_at_the_top_count_for_nothing(tmp_path, kind):
    folder = make_image_checkpoint(tmp_path, kind)
    expected = ModelConfig.from_directory(folder)
    fields = json.loads((folder / "config.json").read_text())
    rope = {name: STALE[name] for name in ("rope_theta", "rope_scaling")}
    for stale in (*({name: value} for name, value in STALE.items()), {k: v for k, v in STALE.items() if k not in rope}):
        (folder / "config.json").write_text(json.dumps(fields | stale))
        found = ModelConfig.from_directory(folder)
        assert {**vars(found), "images": None} == {**vars(expected), "images": None}, stale
    assert_as_transformers(folder, AutoModelForImageTextToText)


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    "change",
    [{"rms_norm_eps": 0.01}, {"max_position_embeddings": 128}, {"rope_theta": 500.0}, {"torch_dtype": "bfloat16"}],
    ids=str,
)
def test_overrides_reach_the_language_model(tmp_path, kind, change):
    """Wherever they stand: at the top, or in an object of their own."""
    folder = make_image_checkpoint(tmp_path, kind)
    flat, nested = (ModelConfig.from_directory(folder, how) for how in (change, {"text_config": change}))
    [(name, value)] = change.items()
    assert getattr(flat, name.removeprefix("torch_")) == value
    if name != "torch_dtype":  # there the whole model's comes first
        assert getattr(nested, name) == value


def test_another_language_model_than_a_class_was_made_with(tmp_path):
    """As people splice a small tower and a Qwen."""
    text, vision, processor, _ = images.KINDS["smolvlm"]
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": images.IDEFICS_TOKENS})
    qwen = Qwen3Config(**{**text, "model_type": "qwen3", "attention_bias": True})
    config = SmolVLMConfig(
        text_config=qwen, vision_config=vision, image_token_id=tokenizer.convert_tokens_to_ids("<image>")
    )
    torch.manual_seed(0)
    SmolVLMForConditionalGeneration(config).float().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")
    assert_as_transformers(tmp_path, AutoModelForImageTextToText)


def test_a_copied_model_type(tmp_path):
    """The class of text_config is that of the whole, whatever the model was called that it was made of."""
    folder = make_image_checkpoint(tmp_path, "qwen3_vl")
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", text_config=config["text_config"] | {"model_type": "qwen3"})
    assert_as_transformers(folder, AutoModelForImageTextToText)


def test_models_under_other_names(tmp_path, copy_of):
    edit((llama := copy_of("llama")) / "config.json", architectures=["LLaMAForCausalLM"])
    assert ModelConfig.from_directory(llama).architecture == "LlamaForCausalLM"
    folder = make_checkpoint(tmp_path / "ministral", "mistral-window")
    edit(folder / "config.json", architectures=["MinistralForCausalLM"], model_type="ministral")
    edit(folder / "config.json", layer_types=["full_attention", "sliding_attention"])
    assert_as_transformers(folder)


def test_an_index_beside_one_file(tmp_path, caplog):
    """A fine-tuned model, saved where the shards of its base had been."""
    folder = make_checkpoint(tmp_path / "base", "llama", shards=True)
    tuned = load_file(make_checkpoint(tmp_path / "tuned", "llama") / "model.safetensors")
    tuned = {name: 1.3 * weight for name, weight in tuned.items()}
    save_file(tuned, folder / "model.safetensors", metadata={"format": "pt"})
    assert_as_transformers(folder)
    assert "the weights are those of model.safetensors, not those of the index beside it" in caplog.text


# -- fields of other classes, and files that cannot be ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama", dict(sliding_window=5, layer_types=["sliding_attention"] * 2)),
        ("llama", dict(num_experts=4)),
        ("mistral", dict(attention_bias=True, mlp_bias=True)),
        ("qwen2", dict(attention_bias=True)),
        ("qwen3", dict(mlp_bias=True)),
        ("mistral-window", dict(layer_types=["full_attention", "sliding_attention"])),  # a Ministral, to transformers
        ("llama", dict(architectures=NULL)),
        *((variant, dict(no_rope_layers=[0, 1, 1])) for variant in ("mistral", "qwen2-window", "qwen3", "qwen3-moe")),
    ],
)
def test_fields_that_a_model_does_not_have(tmp_path, caplog, variant, changes):
    """Its class does not look at them. A window that is not used is worth a warning."""
    edit((folder := make_checkpoint(tmp_path, variant)) / "config.json", **changes)
    assert_as_transformers(folder)
    has_window = variant == "llama" and "sliding_window" in changes
    assert ("sliding_window (5) is not used: a llama sees all tokens" in caplog.text) == has_window


def test_files_that_are_too_large(broken):
    path = broken / "config.json"
    with path.open("ab") as file:
        file.truncate(200 << 20)
    expect("config.json cannot be read as JSON: it has 209,715,200 bytes", LLM, str(broken))


@pytest.mark.parametrize(
    ("variant", "changes"),
    [("qwen2", dict(num_hidden_layers=10**9, layer_types=None)), ("llama", dict(num_labels=10**9))],
)
def test_numbers_that_would_take_all_memory(copy_of, variant, changes):
    """transformers makes a list of as many layers, or labels, as a file says."""
    edit((folder := copy_of(variant)) / "config.json", **changes)
    expect(f"{next(iter(changes))} must be a whole number between 1 and", LLM, str(folder))
