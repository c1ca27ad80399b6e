"""Which layers an adapter changes, and by how much: adapter_config.json's patterns, compared with the peft package."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from nanovllm import LLM, LoRARequest, RequestOutput, SamplingParams
from tests.checkpoints import edit, make_checkpoint
from tests.errors import expect
from tests.features.lora.adapters import ATTENTION, IN_THREES, make_adapter
from tests.image_checkpoints import make_image_checkpoint

PROMPT = list(range(5, 30))
SCORED = SamplingParams(temperature=0, max_tokens=1, logprobs=5)


def logprobs_of(base: Path, adapter: Path) -> dict[int, float]:
    llm = LLM(str(base), dtype="float32", enable_lora=True, block_size=4, num_gpu_blocks_override=60, max_model_len=60)
    [output] = llm.generate([PROMPT], SCORED, use_tqdm=False, lora_request=LoRARequest("a", 1, str(adapter)))
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def check_against_peft(base: Path, adapter: Path, model_class: Any = AutoModelForCausalLM) -> None:
    import peft

    model = model_class.from_pretrained(base, dtype=torch.float32)
    row = peft.PeftModel.from_pretrained(model, str(adapter)).eval()(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    expected = row.log_softmax(-1)
    found = logprobs_of(base, adapter)
    assert found == pytest.approx({token: float(expected[token]) for token in found}, abs=1e-3)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama-biases", **IN_THREES)


LAYER = "model.layers.1.self_attn.q_proj"
# What adapter_config.json says in place of what its adapter was trained with.
CONFIGS = {
    "fewer modules": dict(target_modules=["q_proj", "o_proj"]),
    "a regular expression": dict(target_modules=r"model\.layers\.\d+\.self_attn\.(q|v)_proj"),
    "with a flag": dict(target_modules=r"(?i).*\.Q_PROJ"),
    "all but the head": dict(target_modules="all-linear", init_lora_weights=True),  # or peft draws what the file lacks
    "a whole name": dict(target_modules=[LAYER]),
    "some are excluded": dict(exclude_modules=["v_proj", LAYER]),
    "excluded by a regular expression": dict(exclude_modules=r".*layers\.0\..*"),
    "one layer": dict(layers_to_transform=1),
    "layers": dict(layers_to_transform=[0], target_modules=["k_proj", LAYER]),
    "layers of a list": dict(layers_to_transform=[1], layers_pattern="layers"),
    "layers of another list": dict(layers_to_transform=[1], layers_pattern=["blocks", "layers"]),
    "nothing is said": dict(rank_pattern=None, alpha_pattern=None, exclude_modules=None),
    "alpha by the start of a name": dict(alpha_pattern={"^model.layers.1": 64, r"^model\.layers\.0\..*": 2}),
    "the first key counts": dict(alpha_pattern={"self_attn.q_proj": 64, LAYER: 1, "v_proj": 3}),
    "a key that is half a name": dict(alpha_pattern={"proj": 64, "q": 64}),
}


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory) -> Path:
    """An adapter: to be copied."""
    return make_adapter(tmp_path_factory.mktemp("trained"), base, 1, r=4, target_modules=[*ATTENTION, "lm_head"])


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name, base, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "adapter")
    edit(folder / "adapter_config.json", **CONFIGS[name])
    check_against_peft(base, folder)


def test_what_is_left_out_is_named(base, tmp_path, caplog):
    folder = make_adapter(tmp_path, base, 1, r=4, target_modules=["q_proj", "k_proj"])
    edit(folder / "adapter_config.json", target_modules=["q_proj"])
    logprobs_of(base, folder)
    assert "does not target are left out" in caplog.text and "k_proj" in caplog.text
    edit(folder / "adapter_config.json", target_modules=["v_proj"])
    expect("it has no tensors of the layers that it targets", logprobs_of, base, folder)


@pytest.mark.parametrize(
    "name, value, kind",
    [
        ("target_modules", 5, "text"),
        ("exclude_modules", ["q_proj", 5], "text"),
        ("layers_pattern", {"layers": 1}, "text"),
        ("layers_to_transform", "1", "whole number"),
        ("layers_to_transform", [True], "whole number"),
    ],
)
def test_a_field_of_another_kind_is_named(name, value, kind, base, tmp_path):
    folder = make_adapter(tmp_path, base, 1, r=4, target_modules=["q_proj"])
    edit(folder / "adapter_config.json", **{name: value})
    expect(f"{name} must be a {kind} or a list of them, found ", logprobs_of, base, folder)


# -- models that see images, whose language model's layers have longer names ------------------------------------------

VISION = {
    "qwen3_vl": ("language_model", "self_attn.q_proj"),
    "smolvlm": ("text_model", "mlp.down_proj"),
    "idefics3": ("text_model", "self_attn.v_proj"),
    "qwen3_5": ("language_model", "linear_attn.out_proj"),
}


@pytest.mark.parametrize("kind", VISION)
def test_models_that_see_images(kind, tmp_path):
    """Each key fits one layer only by the name that the whole model has for it."""
    import peft

    base, (inner, module) = make_image_checkpoint(tmp_path / "base", kind), VISION[kind]
    modules = r"(q_proj|v_proj|down_proj|out_proj|in_proj_qkv)"
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        init_lora_weights=False,
        target_modules=rf".*\.{inner}\..*\.{modules}",
        exclude_modules=rf"model\.{inner}\.layers\.1\.mlp\..*",
        rank_pattern={rf"{inner}.layers.0.{module}": 6, "layers.0": 2},
        alpha_pattern={rf"^model\.{inner}\.layers\.0\..*": 48, "model.layers.1.*": 1},
    )
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    check_against_peft(base, tmp_path / "adapter", AutoModelForImageTextToText)


# -- an adapter of the output head, in steps that need no logits of its rows ------------------------------------------


HEAD_OPTIONS = dict(dtype="float32", enable_lora=True, block_size=4, max_model_len=60, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def head(base, tmp_path_factory) -> LoRARequest:
    folder = tmp_path_factory.mktemp("head")
    make_adapter(folder, base, 3, r=4, target_modules=["q_proj", "lm_head"])
    return LoRARequest("head", 1, str(folder))


def asked(num_prompt_logprobs: int | None, head: LoRARequest) -> tuple[list, SamplingParams, list]:
    """Prompts, what is asked of each, and their adapters."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=num_prompt_logprobs)
    return [PROMPT, PROMPT[:3], PROMPT[3:]], params, [head, None, head]


@pytest.fixture(scope="module")
def alone(base, head) -> Callable[[int | None], list[RequestOutput]]:
    """alone(num_prompt_logprobs) -> the answers of engines that have one prompt each."""

    @cache
    def answers(num_prompt_logprobs: int | None) -> list[RequestOutput]:
        prompts, params, adapters = asked(num_prompt_logprobs, head)
        return [
            LLM(str(base), **HEAD_OPTIONS).generate([prompt], params, use_tqdm=False, lora_request=adapter)[0]
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]

    return answers


@pytest.mark.parametrize("options", [dict(max_num_batched_tokens=5), dict(), dict(enforce_eager=True)], ids=str)
@pytest.mark.parametrize("num_prompt_logprobs", [None, 2])
def test_the_head_of_rows_that_sample_nothing(options, num_prompt_logprobs, base, head, alone):
    """A prompt in chunks, and one beside another's prompt_logprobs. Alone and together they have the same logprobs."""
    prompts, params, adapters = asked(num_prompt_logprobs, head)
    llm = LLM(str(base), **HEAD_OPTIONS, **options)
    together = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    for output, expected in zip(together, alone(num_prompt_logprobs), strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        for found, wanted in zip(output.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True):
            found, wanted = ({t: e.logprob for t, e in (entries or {}).items()} for entries in (found, wanted))
            assert found == pytest.approx(wanted, abs=1e-4)
