"""Files that other packages write, and what they say that these stand for.

compressed-tensors (what llm-compressor writes with) and bitsandbytes are of the extra "ci"; transformers unpacks FP8.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from examples import make_compressed
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.loader import load_model
from tests.checkpoints import make_checkpoint
from tests.features.published.test_published import Reference, check_answers, engine
from tests.files.test_gguf_weights import restored
from tests.image_checkpoints import make_image_checkpoint
from tests.published_files import FORMATS, publish

CPU = torch.device("cpu")


def assert_same_weights(published: Path, expected: dict[str, Tensor], tolerance: float) -> None:
    """What the engine holds of each linear layer. tolerance: root mean square, of all its numbers."""
    model = load_model(published, ModelConfig.from_directory(published), torch.float32, CPU)
    for layer, names in model.linear_weights():
        whole = torch.cat([expected[name].float() for name in names])
        held = layer.weight if isinstance(layer.weight, Tensor) else restored(layer.weight)
        assert (held - whole).norm() < tolerance * whole.norm(), names


@pytest.mark.parametrize("kind", ["fp8", "fp8, tensor"])
@pytest.mark.parametrize("variant", ["llama", "qwen3-moe"])
def test_fp8_as_transformers_unpacks_it(tmp_path, variant, kind):
    source = make_checkpoint(tmp_path / "model", variant, head_dim=32)  # it takes blocks at the edge to be whole ones
    published, unpacked = publish(source, tmp_path, *FORMATS[kind])
    ours = AutoModelForCausalLM.from_pretrained(unpacked, dtype=torch.float32).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32).state_dict()
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(weight, ours[name], rtol=1e-2, atol=1e-4)  # they round to bf16 on the way


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
IN_8_BITS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
DYNAMIC = IN_8_BITS | {"strategy": "token", "dynamic": True}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
GROUPS: dict[str, dict[str, Any]] = {
    "4 bits": {"all": {"targets": ["Linear"], "weights": WEIGHTS}},
    "4 bits, asymmetric": {"all": {"targets": ["Linear"], "weights": WEIGHTS | {"symmetric": False}}},
    "4 bits, channels": {
        "all": {"targets": ["Linear"], "weights": WEIGHTS | {"strategy": "channel", "group_size": None}}
    },
    "8 bits": {"all": {"targets": ["Linear"], "weights": IN_8_BITS, "input_activations": DYNAMIC}},
    "8 bits, asymmetric": {
        "all": {"targets": ["Linear"], "weights": IN_8_BITS | {"symmetric": False}, "input_activations": DYNAMIC}
    },
    "FP8": {
        "all": {
            "targets": ["Linear"],
            "weights": FLOATS | {"strategy": "channel"},
            "input_activations": FLOATS | {"strategy": "token", "dynamic": True},
        }
    },
    "several": {
        "one": {"targets": ["re:.*self_attn.*"], "weights": IN_8_BITS, "input_activations": DYNAMIC},
        "two": {"targets": ["model.layers.1.mlp.down_proj"], "weights": WEIGHTS | {"group_size": 16}},
        "three": {"targets": ["Linear"], "weights": WEIGHTS | {"symmetric": False}},
    },
}


@pytest.mark.parametrize("kind", GROUPS)
def test_compressed_tensors(checkpoint, tmp_path, kind):
    """Written by the package, to answers and weights of the model that it unpacks."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    source = checkpoint("llama")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ignored = ["lm_head", "re:.*layers.0.*up_proj"]
    config = QuantizationConfig(config_groups=GROUPS[kind], ignore=ignored, quant_method="compressed-tensors")
    apply_quantization_config(model, config)
    for module in model.modules():
        if scheme := getattr(module, "quantization_scheme", None):
            size = scheme.weights.group_size or module.weight.shape[1]
            groups = module.weight.detach().unflatten(1, (-1, size))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    published, unpacked = (shutil.copytree(source, tmp_path / name) for name in ("published", "unpacked"))
    save_file({name: x.contiguous() for name, x in model.state_dict().items()}, published / "model.safetensors")
    compressor.update_config(str(published))
    compressor.decompress_model(model)
    names = AutoModelForCausalLM.from_pretrained(source).state_dict()
    weights = {name: x.float().contiguous() for name, x in model.state_dict().items() if name in names}
    assert weights.keys() == names.keys()
    save_file(weights, unpacked / "model.safetensors", metadata={"format": "pt"})
    assert "quantization_config" in json.loads((published / "config.json").read_text())
    assert_same_weights(published, weights, tolerance=1e-2)
    check_answers(engine(published), Reference(unpacked), tolerance=0.2, margin=0.8)


@pytest.mark.parametrize("is_nested", [False, True])
def test_bitsandbytes(checkpoint, tmp_path, is_nested):
    functional = pytest.importorskip("bitsandbytes.functional")

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, state = functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=is_nested, quant_type="nf4", quant_storage=torch.uint8
        )
        scales = state.absmax
        if is_nested:
            scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
        # Version 0.50's dequantize_4bit is 28 % off on a CPU, where rounding to 4 bits costs 9 %.
        places = torch.stack((codes >> 4, codes & 15), dim=-1).view(-1, 64).long()
        unpacked = (state.code[places] * scales[:, None]).view(weight.shape)
        assert (unpacked - weight).norm() < 0.1 * weight.norm()
        return {"weight": codes} | {f"weight.{end}": x for end, x in state.as_dict(packed=True).items()}, unpacked

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    published, unpacked = publish(checkpoint("llama"), tmp_path, pack, config)
    check_answers(engine(published), Reference(unpacked), tolerance=0.2, margin=0.8)


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_our_own(checkpoint, tmp_path, monkeypatch, capsys, rounding):
    """examples/make_compressed.py, to the answers of the model that transformers unpacks with compressed-tensors."""
    pytest.importorskip("compressed_tensors")
    published, source = tmp_path / "published", checkpoint("qwen3")
    monkeypatch.setattr("sys.argv", ["", str(source), str(published), "--rounding", rounding, "--tokens", "700"])
    make_compressed.main()
    assert f"{published}: " in capsys.readouterr().out
    unpacked = shutil.copytree(source, tmp_path / "unpacked")
    config = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32, quantization_config=config)
    names = AutoModelForCausalLM.from_pretrained(source).state_dict()
    weights = {name: x.contiguous() for name, x in model.state_dict().items() if name in names}
    assert weights.keys() == names.keys()
    save_file(weights, unpacked / "model.safetensors", metadata={"format": "pt"})
    assert_same_weights(published, weights, tolerance=1e-2)
    check_answers(engine(published), Reference(unpacked), tolerance=0.2, margin=0.8)


def test_our_own_of_a_model_that_sees_images(tmp_path, monkeypatch):
    """Its language model's tensors have names of their own. The tower stays, and is said to."""
    source = make_image_checkpoint(tmp_path / "source", "smolvlm")
    projections = [name for name in load_file(source / "model.safetensors") if re.search(r"text_model.*_proj\.", name)]
    written = {}
    for rounding in ("nearest", "gptq"):
        folder = tmp_path / rounding
        monkeypatch.setattr("sys.argv", ["", str(source), str(folder), "--rounding", rounding, "--tokens", "700"])
        make_compressed.main()
        written[rounding] = load_file(folder / "model.safetensors")
    packed = [name.replace(".weight", ".weight_packed") for name in projections]
    assert len(packed) == 14 and {*packed} == {name for name in written["gptq"] if name.endswith("_packed")}
    assert not any(torch.equal(written["nearest"][name], written["gptq"][name]) for name in packed)
    ignored = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]["ignore"]
    assert "model.vision_model.encoder.layers.0.self_attn.q_proj" in ignored
    assert len(engine(folder).generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids) > 0


def test_nothing_to_round(checkpoint, tmp_path, monkeypatch):
    """A copy that says 4 bits would have all numbers as they were."""
    arguments = ["", str(checkpoint()), str(tmp_path / "published"), "--rounding", "nearest", "--group-size", "1000"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match="has no projection that can be rounded"):
        make_compressed.main()
    assert not (tmp_path / "published").exists()


def test_gptq_loses_less_than_the_nearest_code():
    """Of a layer's output, and of no more than that: weights are farther away. The oracle solves for each rest anew."""
    generator = torch.Generator().manual_seed(0)
    weight, mixed = torch.randn(8, 64, generator=generator), torch.randn(64, 64, generator=generator)
    inputs = torch.randn(256, 64, generator=generator) @ (mixed + 4 * torch.randn(64, 1, generator=generator))
    hessian = inputs.T @ inputs
    results = [make_compressed.nearest(weight, 32), make_compressed.gptq(weight, hessian, 32)]
    restored = [codes * scales.float().repeat_interleave(32, 1) for codes, scales in results]
    losses = [((each - weight) @ inputs.T).norm() for each in restored]
    distances = [(each - weight).norm() for each in restored]
    assert losses[1] < 0.6 * losses[0] and distances[1] > distances[0]
    assert torch.equal(results[1][0], gptq_slowly(weight, hessian.double(), results[1][1].float()))


def gptq_slowly(weight: Tensor, hessian: Tensor, scales: Tensor) -> Tensor:
    """After each input, those behind it become what loses least, with this one and all before it settled."""
    hessian = hessian + make_compressed.DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian))
    wanted, codes = weight.double(), torch.empty_like(weight)
    for i in range(weight.shape[1]):
        scale = scales[:, i // 32]
        codes[:, i] = (wanted[:, i].float() / scale).round().clamp(-8, 7)
        error = wanted[:, i] - codes[:, i] * scale
        rest = torch.linalg.solve(hessian[i + 1 :, i + 1 :], hessian[i + 1 :, i])
        wanted = torch.cat((wanted[:, : i + 1], wanted[:, i + 1 :] + torch.outer(error, rest)), dim=1)
    return codes


def test_inputs_that_no_group_size_divides(tmp_path, monkeypatch, capsys):
    """Of the files that the index names; the folder has the same weights once more, as Mistral publishes them."""
    source, published = make_checkpoint(tmp_path / "source", "llama", shards=True), tmp_path / "published"
    save_file({"layers.0.attention.wq.weight": torch.zeros(8, 8)}, source / "consolidated.safetensors")
    monkeypatch.setattr("sys.argv", ["", str(source), str(published), "--rounding", "nearest", "--group-size", "48"])
    make_compressed.main()
    assert "projections stay as they are: 48 does not divide their inputs" in capsys.readouterr().out
    assert len(engine(published).generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids) > 0
