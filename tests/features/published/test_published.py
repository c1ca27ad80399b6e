"""Checkpoints that others quantized: LLM(path) computes what transformers does with the unpacked weights, in float32.

The packers are in tests/published_files.py. Activations of a product with weights of few bits are rounded to 8 bits in
groups of 32; where a test says "exactly", transformers' linear layers round theirs as well.
"""

import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.group import RankGroup
from nanovllm.features.published.layouts import unpack
from nanovllm.features.quantization.formats import Q8_0, MergedWeight
from nanovllm.files.tensor_files import WeightFiles
from nanovllm.tools.cli import main
from nanovllm.worker.layers import building
from nanovllm.worker.loader import load_model
from nanovllm.worker.model import Decoder
from nanovllm.worker.model_runner import weight_bytes_of
from tests import published_files as files
from tests.checkpoints import SMALL, make_checkpoint
from tests.errors import expect
from tests.features.images.test_images import GREEDY as IMAGE_PARAMS
from tests.features.images.test_images import OPTIONS as IMAGE_OPTIONS
from tests.features.images.test_images import A, B, assert_as_transformers, prompt_of
from tests.features.lora.adapters import make_adapter
from tests.files.test_gguf_weights import restore, restored
from tests.image_checkpoints import make_image_checkpoint, picture
from tests.marks import by_night
from tests.pretend_gpu import pretend_gpu
from tests.published_files import FORMATS, publish
from tests.tools.test_check_model import rows_of
from tests.worker.test_model import logits_of

PROMPTS = [random.Random(i).choices(range(4, 320), k=n) for i, n in enumerate((40, 9, 17))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
HEAD = "lm_head.weight"
IN_FLOATS = re.compile(rf"{files.LINEAR.pattern}|.*experts\.(gate_up|down)_proj")  # transformers has one of all experts
BESIDE = re.compile(r".*in_proj_(a|b|ba)\.weight")  # ordinary numbers, computed with quantized ones in one product


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1), (2, 3)])
def test_words_of_any_shape(shape, bits):
    """A transposed row looks contiguous to PyTorch, and cannot be viewed as bytes."""
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)
    expected = [[word >> at & (2**bits - 1) for word in row for at in range(0, 32, bits)] for row in words.T.tolist()]
    assert unpack(words.T, bits).tolist() == expected


def rounded_inputs(module: nn.Module, inputs: tuple[Tensor], order: Tensor | None = None) -> Tensor:
    """A linear layer's inputs in 8 bits: 32 neighbours have one scale, in the order of the weight's groups."""
    (x,) = inputs
    flat = x.flatten(0, -2)
    back = None if order is None else order.argsort()
    groups = F.pad(flat if order is None else flat[:, order], (0, -x.shape[-1] % 32)).unflatten(1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    rounded = (groups / scales.clamp_min(1e-30)).round() * scales
    rounded = rounded.flatten(1)[:, : x.shape[-1]]
    return (rounded if back is None else rounded[:, back]).view(x.shape)


def in_8_bits(weight: Tensor) -> Tensor:
    """What the engine makes of an output head in 16 bits, and of FP8."""
    groups = F.pad(weight.float(), (0, -weight.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    return ((groups / scales.clamp_min(1e-30)).round() * scales).flatten(-2)[..., : weight.shape[-1]]


class Reference:
    """transformers' model with the unpacked weights.

    rounds: the published files; its layers round their inputs as the engine's products with these do. is_float: FP8,
    in 8 bits as the engine has it. rounds_head: so is the output head.
    """

    def __init__(
        self, unpacked: Path, rounds: Path | None = None, is_float: bool = False, rounds_head: bool = True
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(unpacked, dtype=torch.float32).eval()
        with torch.no_grad():
            if rounds_head:
                self.model.lm_head.weight = nn.Parameter(in_8_bits(self.model.lm_head.weight))
            for name, parameter in self.model.named_parameters():
                if (is_float and IN_FLOATS.fullmatch(name)) or BESIDE.fullmatch(name):
                    parameter.copy_(in_8_bits(parameter))
        if rounds is not None:
            stored = load_file(rounds / "model.safetensors")
            for name, module in self.model.named_modules():
                if isinstance(module, nn.Linear):
                    index = stored.get(f"{name}.g_idx")
                    order = None if index is None else index.argsort(stable=True)
                    module.register_forward_pre_hook(partial(rounded_inputs, order=order))

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        return self.model(torch.tensor([token_ids])).logits[0]


def check_answers(llm: LLM, reference: Reference, tolerance: float, margin: float, **options: Any) -> None:
    """Greedy tokens and prompt logprobs. tolerance: of a logprob, on average; margin: of a choice."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, **options)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = output.outputs[0].token_ids
        logits = reference.logits([*prompt, *answer])
        expected = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        found = [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        assert (torch.tensor(found) - expected).abs().mean() < tolerance
        assert len(answer) == PARAMS.max_tokens
        for row, token in zip(logits[len(prompt) - 1 :], answer, strict=False):
            assert row.max() - row[token] < margin


def engine(path: Path, **options) -> LLM:
    return LLM(str(path), **SMALL | {"dtype": "float32"} | options)


def tolerance_of(kind: str) -> float:
    """Of a logprob, on average. FP8 is rounded once more, minimums to float16; then activations differ."""
    return 0.1 if kind.startswith(("f", "b")) else 0.05 if "asymmetric" in kind or kind in ("awq", "gptq v2") else 0.03


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Of which two ranks can have whole groups each."""
    return make_checkpoint(tmp_path_factory.mktemp("source"), "llama", intermediate_size=128)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(source, published_of, kind):
    published, unpacked = published_of(source, kind)
    llm, reference = engine(published), Reference(unpacked, rounds=published)
    check_answers(llm, reference, tolerance_of(kind), margin=4 * tolerance_of(kind))
    check_weights(llm, unpacked)


def check_weights(llm: LLM, unpacked: Path) -> None:
    """Whole numbers are what they were, up to the rounding of a minimum; floats lose 1 % at most."""
    expected = load_file(unpacked / "model.safetensors")
    for layer, names in llm.engine.model_runner.model.linear_weights():
        assert isinstance(layer.weight, MergedWeight)
        whole = torch.cat([expected[name].float() for name in names])
        formats = {part.format for part in layer.weight.parts}
        lost = (restored(layer.weight) - whole).norm() / whole.norm()
        assert lost < (1e-2 if HEAD in names or formats == {Q8_0} else 1e-3)


@pytest.mark.parametrize("size", [64, 48, 16, 8])
def test_the_memory_of_groups_of_any_size(tmp_path, size):
    """A group has places of its own in those of 32. What is predicted is what is taken, to a few percent."""
    source = make_checkpoint(tmp_path / "model", "llama", hidden_size=192, intermediate_size=384)
    config = files.compressed("pack-quantized", files.weights_of(group_size=size))
    published, _ = publish(source, tmp_path, files.packed(size=size), config)
    model_config = ModelConfig.from_directory(published)
    model = load_model(published, model_config, torch.float32, torch.device("cpu"))
    with building(torch.float32, torch.device("meta")):
        whole = dict(Decoder(model_config).checkpoint_tensors())
    predicted = WeightFiles(published, model_config, whole, dummy=False).weight_bytes(torch.float32, None)
    assert predicted == pytest.approx(weight_bytes_of(model), rel=0.05)


# Hybrid layers have 80 and 40 inputs here.
SMALL_GROUPS = {
    "gptq, groups of 8": (files.gptq(size=8, act_order=True), files.gptq_config(size=8, desc_act=True)),
    "fp8": FORMATS["fp8"],
    "pack-quantized, rows": FORMATS["pack-quantized, rows"],
}
ORDINARY = ("gptq, act order", "awq", "int-quantized, asymmetric", "float-quantized")
ARCHITECTURES = {
    **dict.fromkeys(["qwen2", "qwen3", "llama-biases", "mistral-window", "smollm3", "qwen3-moe"], ORDINARY),
    **dict.fromkeys(["qwen3.5", "qwen3.5-tied", "qwen3-next"], tuple(SMALL_GROUPS)),
}


MERGED = {"qwen3.5": ["in_proj_qkv"], "qwen3-next": ["in_proj_qkvz", "in_proj_ba"]}  # which are divided here
BY_DAY = {  # every architecture with one kind at least, every kind with one architecture at least
    "qwen2": ("int-quantized, asymmetric",),
    "qwen3": ("awq",),
    "llama-biases": ("gptq, act order",),
    "mistral-window": ("awq",),
    "smollm3": ("float-quantized",),
    "qwen3-moe": ("gptq, act order", "int-quantized, asymmetric"),
    "qwen3.5": ("gptq, groups of 8", "pack-quantized, rows"),
    "qwen3.5-tied": ("gptq, groups of 8",),
    "qwen3-next": ("gptq, groups of 8", "fp8"),
}
CASES = [
    (variant, kind) if kind in BY_DAY[variant] else by_night(variant, kind)
    for variant, kinds in ARCHITECTURES.items()
    for kind in kinds
]


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_every_architecture(checkpoint, tmp_path, variant, kind):
    """Exactly, with activations as they are; and nearly, with those of the kernels. Scales of activations beside
    the weights change nothing."""
    pack, config = (FORMATS | SMALL_GROUPS)[kind]
    beside = {f"model.layers.0.linear_attn.{x}.input_scale": torch.ones(1) for x in MERGED.get(variant, ())}
    published, unpacked = publish(checkpoint(variant), tmp_path, pack, config, more=beside)
    expected = Reference(unpacked, is_float=kind.startswith("f")).logits(PROMPTS[0])
    as_it_is = restore(engine(published, enforce_eager=True))
    computed, exact = (logits_of(llm, PROMPTS[0], [40]) for llm in (engine(published), as_it_is))
    tolerance = 0.1 if "asymmetric" in kind or kind == "awq" else 5e-3
    torch.testing.assert_close(exact, expected, atol=tolerance, rtol=0)
    assert (computed - exact).abs().mean() < 0.3 * exact.abs().mean()


def stack_experts(published: Path, name: str, shapes: str = "none") -> None:
    """Make one tensor of those of all experts of a layer, and one of gate and up. name: what it ends in.

    shapes: "none", "one" for a stack, "each" for each expert.
    """
    tensors = load_file(published / "model.safetensors")
    endings = {n.rpartition("_proj.weight")[2] for n in tensors if ".experts.0." in n}
    for path in [f"model.layers.{layer}.mlp.experts" for layer in range(4)]:
        for ending in endings:
            gate, up, down = (
                torch.stack([tensors.pop(f"{path}.{i}.{part}_proj.weight{ending}") for i in range(8)])
                for part in ("gate", "up", "down")
            )
            if ending == "_shape":
                if shapes == "none":
                    continue
                both = gate * torch.tensor([2, 1])
                if shapes == "one":
                    both, down = both[0], down[0]
            else:
                both = torch.cat((gate.view(torch.uint8), up.view(torch.uint8)), dim=1).view(gate.dtype)
            tensors |= {f"{path}.gate_up_proj{name}{ending}": both, f"{path}.down_proj{name}{ending}": down}
        tensors[f"{path}.gate_up_proj_activation_scale"] = torch.ones(8)  # not used
    save_file(tensors, published / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "name", "shapes"),
    [
        ("fp8", "", "none"),
        by_night("float-quantized", ".weight", "none"),
        by_night("pack-quantized", "", "none"),
        ("pack-quantized, asymmetric", ".weight", "each"),
        by_night("pack-quantized, rows", ".weight", "none"),
        by_night("pack-quantized, 8 bits", "", "one"),
        by_night("int-quantized, asymmetric", "", "none"),
        by_night("int-quantized, groups", ".weight", "none"),
    ],
)
def test_experts_that_are_one_tensor(tmp_path, kind, name, shapes):
    """Some files hold all of a layer: X with X_scale_inv, X_packed, X.weight_packed. They are what one tensor for each
    expert is, bit for bit, and with activations as they are, what transformers computes with the unpacked weights."""
    sizes = dict(linear_value_head_dim=16, shared_expert_intermediate_size=64)
    source = make_checkpoint(tmp_path / "model", "qwen3.5-moe", **sizes)
    published, unpacked = publish(source, tmp_path, *FORMATS[kind])
    separate = logits_of(engine(published), PROMPTS[0], [40])
    stack_experts(published, name, shapes)
    assert torch.equal(logits_of(engine(published), PROMPTS[0], [40]), separate)
    exact = logits_of(restore(engine(published, enforce_eager=True)), PROMPTS[0], [40])
    expected = Reference(unpacked, is_float=kind.startswith("f")).logits(PROMPTS[0])
    assert (exact - expected).abs().mean() < 0.02  # few rows meet another expert, once a minimum is float16


@pytest.mark.parametrize("kind", FORMATS)
def test_every_rank_has_its_share(source, published_of, kind):
    """Put together they are what the whole model has."""
    published, _ = published_of(source, kind)
    model_config = ModelConfig.from_directory(published)
    whole, *ranks = (
        load_model(published, model_config, torch.float32, torch.device("cpu"), group)
        for group in (None, RankGroup(0, 2), RankGroup(1, 2))
    )
    for layer in range(2):
        of_inputs = [model.layers[layer].mlp.down_proj.weight for model in (whole, *ranks)]
        of_rows = [model.layers[layer].self_attn.o_proj.weight for model in (whole, *ranks)]
        for one, *shares in (of_inputs, of_rows):
            assert torch.equal(torch.cat([restored(share) for share in shares], dim=1), restored(one))
        one, *shares = (restored(model.layers[layer].mlp.gate_up_proj.weight).chunk(2) for model in (whole, *ranks))
        assert all(torch.equal(torch.cat(halves), half) for half, *halves in zip(one, *shares, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gptq, act order", "fp8"])
def test_two_ranks(tmp_path, processes, kind):
    folder = make_checkpoint(
        tmp_path / "model", "qwen3-moe", moe_intermediate_size=64, intermediate_size=128, head_dim=32
    )
    published, unpacked = publish(folder, tmp_path, *FORMATS[kind])
    llm = processes.llm(published, 2, dtype="float32", **SMALL)
    check_answers(llm, Reference(unpacked), tolerance=0.2, margin=1.0)


@pytest.mark.parametrize("kind", ["gptq, act order", "pack-quantized, asymmetric"])
def test_an_adapter_on_top(checkpoint, tmp_path, kind):
    import peft  # takes a second

    published, unpacked = publish(checkpoint("qwen3"), tmp_path, *FORMATS[kind])
    adapter = make_adapter(tmp_path / "adapter", unpacked, r=4, target_modules=["q_proj", "down_proj"])
    llm, reference = engine(published, enable_lora=True), Reference(unpacked)
    check_answers(llm, reference, tolerance=0.2, margin=0.5)
    reference.model = peft.PeftModel.from_pretrained(reference.model, str(adapter)).eval()
    with pytest.raises(AssertionError):
        check_answers(llm, reference, tolerance=0.2, margin=0.5)  # without the adapter
    check_answers(llm, reference, tolerance=0.2, margin=0.5, lora_request=LoRARequest("one", 1, str(adapter)))


def test_drafts(checkpoint, tmp_path, eager_drafts):
    """As a draft model, as a model with one, and as its own, which is refused."""
    published, unpacked = publish(checkpoint("llama"), tmp_path, *FORMATS["awq"])
    for model, draft in ((unpacked, published), (published, unpacked), (published, published)):
        alone, drafted = engine(model), engine(model, speculative_config={"model": str(draft)})
        tokens = [[x.outputs[0].token_ids for x in llm.generate(PROMPTS, PARAMS)] for llm in (alone, drafted)]
        assert tokens[0] == tokens[1] and drafted.stats()["num_draft_tokens"] > 0
    assert drafted.stats()["num_accepted_tokens"] > 0  # how often 4 bits agree with 32 depends on the processor
    expect("are quantized already; as its own draft model", engine, published, speculative_config={"method": "self"})


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_vl", "fp8"), ("smolvlm", "awq"), ("qwen3_5", "gptq, groups of 8")]
)
def test_pictures(tmp_path, family, kind):
    """The tower is left in 16 or 32 bits."""

    def is_packed(name: str) -> bool:
        return bool(files.LINEAR.fullmatch(name)) and "vis" not in name

    folder = make_image_checkpoint(tmp_path / "model", family)
    published, unpacked = publish(folder, tmp_path, *(FORMATS | SMALL_GROUPS)[kind], is_packed=is_packed)
    mark = "<image>" if family == "smolvlm" else "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = {"prompt": f"the quick {mark} fox", "multi_modal_data": {"image": picture(60, 40)}}
    options = dict(dtype="float32", block_size=4, num_gpu_blocks_override=200, max_model_len=200)
    llms = LLM(str(unpacked), **options), LLM(str(published), **options, enforce_eager=True)
    expected, found = (
        [o.prompt_logprobs, o.outputs[0].token_ids]
        for o in (restore(llm).generate([prompt], PARAMS)[0] for llm in llms)
    )
    differences = [
        abs(entry.logprob - other[token].logprob)
        for one, other in zip(expected[0][1:], found[0][1:], strict=True)
        for token, entry in one.items()
        if token in other
    ]
    assert sum(differences) / len(differences) < 0.1


TOWERS = {
    "qwen3_vl": (FORMATS["fp8"], "visual.blocks."),
    "qwen3_5": (SMALL_GROUPS["gptq, groups of 8"], "visual.blocks."),
    "smolvlm": (FORMATS["pack-quantized, rows"], "vision_model.encoder."),
    "idefics3": (FORMATS["bitsandbytes"], "vision_model.encoder."),
}


@pytest.mark.parametrize("family", TOWERS)
def test_a_tower_of_few_bits(tmp_path, family, caplog, capsys):
    """To transformers' answers with the unpacked weights. Scales of activations that lie beside it are no weights."""
    (pack, config), begin = TOWERS[family]

    def is_packed(name: str) -> bool:
        return begin in name and name.endswith(".weight") and "norm" not in name

    folder = make_image_checkpoint(tmp_path / "model", family)
    beside = {f"model.{begin}0.input_scale": torch.ones(1)}
    published, unpacked = publish(folder, tmp_path, pack, config, is_packed=is_packed, more=beside)
    assert main(["check-model", str(published)]) == 0
    assert "tower" in rows_of(capsys)
    llm = LLM(str(published), **IMAGE_OPTIONS)
    for case in (("what is in ", A), (A, "the lazy dog ", B)):
        output = llm.generate([prompt_of(family, *case)], IMAGE_PARAMS, use_tqdm=False)[0]
        assert_as_transformers(llm, unpacked, output, [part for part in case if not isinstance(part, str)])
    assert "weights of the vision tower (model." in caplog.text and "are unpacked to float32" in caplog.text


@pytest.mark.parametrize("kind", ["gptq, act order", by_night("awq"), by_night("fp8")])
def test_on_a_gpu_it_is_unpacked(source, published_of, kind, caplog):
    published, unpacked = published_of(source, kind)
    reference = Reference(unpacked, rounds_head=False)
    options = dict(optimizations=(), max_num_batched_tokens=24, max_num_seqs=4, max_model_len=64)
    with pretend_gpu():
        check_answers(engine(published, **options), reference, tolerance=1e-3, margin=0.01)
    assert "the quantized weights are unpacked to float32 on a GPU" in caplog.text
