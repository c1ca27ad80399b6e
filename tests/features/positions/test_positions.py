"""Positions: rotary embeddings and their scaling, windows, layers without either; transformers has the last word."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.layers import RotaryEmbedding
from tests.checkpoints import NULL, SIZES, YARN_ROPE, edit
from tests.errors import expect

SLIDING, FULL = "sliding_attention", "full_attention"


def test_odd_heads_are_refused_as_by_transformers(broken):
    """Rotary embedding turns pairs of numbers: what transformers computes for an odd head, if anything, is not that."""
    with pytest.raises(Exception, match="even rotary dimension"):
        LlamaConfig(**SIZES, head_dim=15)
    edit(broken / "config.json", head_dim=15)
    expect("RoPE requires an even rotary dimension", LLM, str(broken))


def test_rotary_table_has_the_positions_that_can_occur(broken):
    edit(broken / "config.json", max_position_embeddings=2**20)
    llm = LLM(str(broken), num_gpu_blocks_override=64, max_model_len=64)
    assert llm.engine.model_runner.rotary.table.shape[1] == 64
    assert len(llm.generate([[5] * 60], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 4


def test_linear_scaling_may_make_the_context_longer(broken, eager_drafts):
    """What config.json says is the length before it or after it; by default it is not exceeded."""
    rope = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
    edit(broken / "config.json", max_position_embeddings=64, rope_parameters=rope)
    assert LLM(str(broken), num_gpu_blocks_override=64).engine.scheduler.max_model_len == 64
    drafts = {"model": str(broken), "num_speculative_tokens": 2}  # its own draft model is as long
    llm = LLM(str(broken), num_gpu_blocks_override=64, max_model_len=256, speculative_config=drafts)
    [output] = llm.generate([[5] * 200], SamplingParams(ignore_eos=True, max_tokens=4, temperature=0))
    assert len(output.outputs[0].token_ids) == 4
    assert llm.engine.speculation.proposer.max_model_len == 256 and llm.stats()["num_accepted_tokens"] > 0
    expect("max_model_len=257 is more than the model's 256 positions", LLM, str(broken), max_model_len=257)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_the_rotary_table_is_rounded_once(broken, theta):
    """NumPy has other functions than PyTorch, as other processors have. In float32 they would differ in last bits."""
    edit(broken / "config.json", rope_parameters=dict(rope_type="default", rope_theta=theta), head_dim=64)
    config = ModelConfig.from_directory(broken)
    inv_freq = np.array([theta ** (-pair / 32) for pair in range(32)], dtype=np.float32)
    angles = (np.arange(5000, dtype=np.float32)[:, None] * inv_freq).astype(np.float64)
    table = RotaryEmbedding(config, 5000, torch.float32, torch.device("cpu")).table
    assert np.array_equal(table.numpy(), np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32))


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


@pytest.mark.parametrize(
    ("variant", "changes", "windows"),
    [
        ("mistral", {}, {}),
        ("mistral-window", {}, {0: 7, 1: 7}),
        ("mistral-window", dict(sliding_window=None), {0: 4096, 1: 4096}),  # the default of transformers
        ("mistral-window", dict(sliding_window=NULL), {}),  # said to be none
        ("mistral-window", dict(use_sliding_window=False), {0: 7, 1: 7}),
        ("mistral-window", dict(layer_types=[SLIDING, FULL]), {0: 7}),  # it is a Ministral then
        ("qwen2", {}, {}),
        ("qwen2-window", {}, {1: 21}),
        ("qwen2-window", dict(layer_types=None), {1: 21}),  # as older files have it
        ("qwen2-window", dict(layer_types=None, max_window_layers=0), {0: 21, 1: 21}),
        ("qwen2-window", dict(layer_types=None, max_window_layers=None), {}),
        ("qwen2-window", dict(layer_types=[SLIDING, FULL]), {0: 21}),
        ("qwen2-window", dict(layer_types=None, max_window_layers=1, sliding_window=None), {1: 4096}),
        ("qwen2-window", dict(layer_types=None, use_sliding_window=None), {}),
        ("smollm3", {}, {}),
        ("smollm3", dict(use_sliding_window=True, sliding_window=9, layer_types=None), {3: 9}),
        ("smollm3", dict(use_sliding_window=True, sliding_window=9, layer_types=[SLIDING] + [FULL] * 3), {0: 9}),
    ],
)
def test_windows(copy_of, variant, changes, windows):
    edit((folder := copy_of(variant)) / "config.json", **changes)
    config = ModelConfig.from_directory(folder)
    assert config.windows == windows
    theirs = AutoConfig.from_pretrained(folder)
    slides = getattr(theirs, "layer_types", None) or [SLIDING if theirs.sliding_window else FULL] * 2
    assert windows == {i: theirs.sliding_window for i, kind in enumerate(slides) if kind == SLIDING}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {3}),
        (dict(no_rope_layers=None), {3}),
        (dict(no_rope_layers=NULL), {3}),
        (dict(no_rope_layers=None, no_rope_layer_interval=2), {1, 3}),
        (dict(no_rope_layers=None, no_rope_layer_interval=1), {0, 1, 2, 3}),
        (dict(no_rope_layers=[0, 1, 1, 0]), {0, 3}),
        (dict(no_rope_layers=[1, 0, 1, 1, 0, 0]), {1}),  # of a model that has had more layers
    ],
)
def test_layers_without_rotary(copy_of, changes, layers):
    edit((folder := copy_of("smollm3")) / "config.json", **changes)
    assert ModelConfig.from_directory(folder).layers_without_rotary == layers
    assert {i for i in range(4) if not AutoConfig.from_pretrained(folder).no_rope_layers[i]} == layers


def test_what_a_smollm3_config_leaves_out(copy_of):
    missing = dict.fromkeys(("tie_word_embeddings", "rope_parameters", "num_key_value_heads", "eos_token_id"))
    edit((folder := copy_of("smollm3")) / "config.json", **missing)
    config = ModelConfig.from_directory(folder)
    assert (config.tie_word_embeddings, config.rope_theta, config.num_key_value_heads) == (True, 2e6, 4)


@pytest.mark.parametrize(
    ("variant", "changes", "text"),
    [
        ("mistral-window", dict(sliding_window=0), "sliding_window must be a whole number between 1"),
        ("mistral-window", dict(sliding_window=-5), "sliding_window must be a whole number between 1"),
        (
            "mistral-window",
            dict(sliding_window=8.5),
            "MistralConfig does not take it: Validation error for field 'sliding_window'",
        ),
        ("mistral-window", dict(sliding_window="8"), "Validation error for field 'sliding_window'"),
        ("mistral", dict(layer_types=[SLIDING, SLIDING]), "no window is used: sliding_window must be a number"),
        ("qwen2-window", dict(layer_types=[SLIDING]), "(2) must be equal to the number of `layer_types` (1)"),
        ("qwen2-window", dict(layer_types=[FULL] * 3), "(2) must be equal to the number of `layer_types` (3)"),
        (
            "qwen2-window",
            dict(layer_types=[FULL, "chunked_attention"]),
            "layer_types[1] must be one of full_attention, sliding_attention, found 'chunked_attention'",
        ),
        ("qwen2-window", dict(layer_types=[FULL, [SLIDING]]), "Validation error for field 'layer_types'"),
        ("qwen2-window", dict(use_sliding_window=False), "no window is used: sliding_window must be a number"),
        ("qwen2-window", dict(use_sliding_window="yes"), "Validation error for field 'use_sliding_window'"),
        ("smollm3", dict(no_rope_layers=[1, 1, 0]), "a 0 (none) for each of 4 layers, found 3: [1, 1, 0]"),
        ("smollm3", dict(no_rope_layers=[1, 1, 1, 2]), "no_rope_layers must have a 1 (rotary embedding) or"),
        ("smollm3", dict(no_rope_layers=5), "Validation error for field 'no_rope_layers'"),
        ("smollm3", dict(no_rope_layers=NULL, no_rope_layer_interval=0), "SmolLM3Config does not take it"),
    ],
)
def test_layer_kinds_that_make_no_sense(copy_of, variant, changes, text):
    edit((folder := copy_of(variant)) / "config.json", **changes)
    expect(text, ModelConfig.from_directory, folder)


def test_overrides_of_windows(checkpoint):
    """As vLLM has them: hf_overrides take a window away, or bring one."""
    full = ModelConfig.from_directory(checkpoint("mistral-window"), {"sliding_window": None})
    assert full.windows == {}
    overrides = dict(use_sliding_window=True, sliding_window=5, max_window_layers=0, layer_types=None)
    assert ModelConfig.from_directory(checkpoint("qwen2"), overrides).windows == {0: 5, 1: 5}
