"""Starting an engine takes the weights' memory, the pool's, and little more."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.group import RankGroup
from nanovllm.files import gguf_file, tensor_files
from nanovllm.worker.loader import load_model
from tests.checkpoints import VARIANTS
from tests.gguf_files import of_type, write_gguf
from tests.marks import by_night

# Prints in MB: what the process had before, the most it has had since, the weights. A reset of the peak needs Linux.
SCRIPT = """
import json, sys
from pathlib import Path
from nanovllm import LLM, SamplingParams
from nanovllm.files.tokenizer import load_tokenizer

def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) / 1000

warm = LLM(sys.argv[2])  # modules, compiled kernels, threads
warm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
load_tokenizer(Path(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
llm = LLM(sys.argv[1], num_gpu_blocks_override=64, **json.loads(sys.argv[3]))
llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
print(json.dumps([before, status("VmHWM"), llm.engine.model_runner.weight_bytes / 1e6]))
"""
# The same of loading alone, in float32, once that engine is gone.
IN_FLOAT32 = """
import ctypes, gc
import torch
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.loader import load_model

del llm
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before, folder = status("VmRSS"), Path(sys.argv[1])
model = load_model(folder, ModelConfig.from_directory(folder), torch.float32, torch.device("cpu"))
print(json.dumps([before, status("VmHWM"), sum(p.nbytes for p in model.parameters()) / 1e6]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("kind", ["bf16", *(by_night(kind) for kind in ("int8", "int4", "GGUF"))])
def test_peak_of_a_start(kind, checkpoint, demo_checkpoint, demo_gguf):
    """A start took twice the weights when the files' pages stayed in memory, and again the largest matrix."""
    model, options = (demo_gguf, {}) if kind == "GGUF" else (demo_checkpoint, {})
    if quantized := kind in ("int8", "int4"):
        options = {"quantization": kind}
    script = SCRIPT + IN_FLOAT32 * (kind == "bf16")
    command = [sys.executable, "-c", script, str(model), str(checkpoint()), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    before, peak, weights = found[0]
    pool = 64 * 16 * 30 * 2 * 3 * 64 * 2 / 1e6  # blocks, tokens, layers, K and V, heads, their size, bytes
    assert weights < 300
    # Beside them 16 MB of a file may stay mapped, and parts of a tensor are converted. int8 and int4 look embeddings up
    # in the file.
    table = 49152 * 576 * 2 / 1e6 if quantized else 0
    assert peak - before < weights + table + pool + 70, f"{peak - before:.0f} MB for {weights:.0f} MB of weights"
    for before, peak, weights in found[1:]:
        assert 0.9 < (peak - before) / weights < 1.15


GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
PROMPTS = [{"prompt_token_ids": [3, 1, 4, 1, 5, 9, 2, 6]}, {"prompt_token_ids": [7] * 20}]


def answers(model, **options) -> list:
    llm = LLM(str(model), num_gpu_blocks_override=64, **options)
    return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def in_small_parts(monkeypatch) -> None:
    monkeypatch.setattr(tensor_files, "PART_NUMBERS", 1000)
    monkeypatch.setattr(tensor_files, "MAPPED_BYTES", 3000)
    monkeypatch.setattr(gguf_file, "MAPPED_BYTES", 3000)


# By day in fewer bits: a plain model, one with tied embeddings, one with biases, one with experts and states.
FEW_BITS = [
    (variant, quantization)
    if variant in ("llama", "llama-mha-tied", "qwen2", "qwen3.5-moe")
    else by_night(variant, quantization)
    for variant in VARIANTS
    for quantization in ("int8", "int4")
]


@pytest.mark.parametrize(("variant", "quantization"), [*((variant, None) for variant in VARIANTS), *FEW_BITS])
def test_weights_that_are_read_in_parts_are_the_same(variant, quantization, checkpoint, monkeypatch):
    expected = answers(checkpoint(variant), quantization=quantization)
    in_small_parts(monkeypatch)
    assert answers(checkpoint(variant), quantization=quantization) == expected


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_so_are_those_of_a_gguf_file(kind, checkpoint, tmp_path, monkeypatch):
    path = write_gguf(checkpoint(), tmp_path / "model.gguf", of_type(kind))
    expected = answers(path)
    in_small_parts(monkeypatch)
    assert answers(path) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_so_are_those_of_a_rank(rank, checkpoint, monkeypatch):
    def share() -> dict[str, torch.Tensor]:
        config, group = ModelConfig.from_directory(checkpoint()), RankGroup(rank, 2)
        model = load_model(checkpoint(), config, torch.float32, torch.device("cpu"), group)
        return dict(model.checkpoint_tensors())

    expected = share()
    in_small_parts(monkeypatch)
    for name, tensor in share().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_file_that_changes_while_it_is_read_is_refused(checkpoint, tmp_path, monkeypatch):
    """Half of the weights would be those of one model, half those of another."""
    folder = shutil.copytree(checkpoint(), tmp_path / "model")
    in_small_parts(monkeypatch)
    read = tensor_files.SafetensorsFile.read

    def replace_and_read(file, name, share) -> torch.Tensor:
        if name.startswith("model.layers.1."):
            file.path.write_bytes(file.path.read_bytes() + b" ")
        return read(file, name, share)

    monkeypatch.setattr(tensor_files.SafetensorsFile, "read", replace_and_read)
    with pytest.raises(ValueError, match=r"model\.safetensors has changed while it was read"):
        LLM(str(folder), num_gpu_blocks_override=64)
