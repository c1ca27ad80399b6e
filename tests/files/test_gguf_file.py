"""GGUF files: where a file is found, and what is wrong with one."""

import os
import shutil
import struct
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.files.gguf_file import GGUFFile
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.jobs.output_file import fingerprint
from tests.errors import expect
from tests.gguf_files import of_type, write_gguf


def test_generation_config_beside_the_file(checkpoint, tmp_path):
    """The format has no place for it. Of end-of-sequence tokens both may name some."""
    path = write_gguf(checkpoint(), tmp_path / "model.gguf")
    alone = ModelConfig.from_directory(path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": 7}')
    config = ModelConfig.from_directory(path)
    assert (alone.generation, config.generation) == ({}, {"temperature": 0.3})
    assert config.eos_token_ids == alone.eos_token_ids | {7} and 7 not in alone.eos_token_ids
    of_vllm = ModelConfig.from_directory(path, generation_config="vllm")
    assert of_vllm.generation == {} and of_vllm.eos_token_ids == config.eos_token_ids
    assert ModelConfig.from_directory(path, {"eos_token_id": 5}).eos_token_ids == {5}


# -- where the file is ------------------------------------------------------------------------------------------------


def test_directory_with_one_file(checkpoint, tmp_path):
    path = write_gguf(checkpoint(), tmp_path / "model.gguf")
    assert resolve_checkpoint(str(tmp_path)) == resolve_checkpoint(str(path)) == path
    blob = shutil.copy(path, tmp_path / "sha256-0a1b")  # as Ollama names it
    assert LLM(blob, num_gpu_blocks_override=9).generate([[1]], SamplingParams(max_tokens=1))[0].finished
    expect("is a file; give", resolve_checkpoint, __file__, error=FileNotFoundError)
    (tmp_path / "mmproj-model.gguf").touch()  # a tower
    assert resolve_checkpoint(str(tmp_path)) == path
    (tmp_path / "other.gguf").touch()
    expect("has 2 GGUF files (model.gguf, other.gguf)", resolve_checkpoint, str(tmp_path), error=FileNotFoundError)
    (tmp_path / "model.safetensors").touch()
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


HUB_FILES = ["README.md", "m-Q8_0.gguf", "m-q4_0.gguf", "a/m-Q4_K_M.gguf", "m.Q4_K_M.gguf", "m-F16-00001-of-00002.gguf"]
HUB_FILES += ["mmproj-m-Q8_0.gguf", "m.mmproj-q4_0.gguf"]  # towers


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Path:
    for name in HUB_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repository, revision: HUB_FILES)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, name, revision: str(tmp_path / name))
    return tmp_path


def test_load_format(hub, tmp_path):
    """What the file is has to be what was asked for, before anything is downloaded."""
    file = tmp_path / "m-Q8_0.gguf"
    for model in (str(file), "owner/name:Q8_0"):
        expect("is a GGUF file", resolve_checkpoint, model, load_format="safetensors", error=FileNotFoundError)
        assert resolve_checkpoint(model, load_format="gguf") == resolve_checkpoint(model) == file
    expect("is no GGUF file", resolve_checkpoint, "owner/name", load_format="gguf", error=FileNotFoundError)


def test_hub_id(hub, monkeypatch):
    """Without a network, what has been downloaded before is taken."""

    def no_network(repository, revision):
        raise ConnectionError("no network")

    assert resolve_checkpoint("owner/name:Q4_0") == hub / "m-q4_0.gguf"
    monkeypatch.setattr("huggingface_hub.list_repo_files", no_network)
    expect("could not be downloaded from the hub: no network", resolve_checkpoint, "o/n:Q8_0", error=FileNotFoundError)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repository, revision, local_files_only: str(hub))
    assert resolve_checkpoint("owner/name:Q8_0") == hub / "m-Q8_0.gguf"


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ("Q4_K_M", "2 of its GGUF files are called ...-Q4_K_M.gguf: a/m-Q4_K_M.gguf, m.Q4_K_M.gguf (give the path"),
        ("F16", "m-F16-00001-of-00002.gguf (files in several parts are not read)"),
        ("K_M", "0 of its GGUF files are called ...-K_M.gguf: m-Q8_0.gguf"),
    ],
)
def test_hub_id_that_names_no_file(hub, quantization, text):
    expect(text, resolve_checkpoint, f"owner/name:{quantization}", error=FileNotFoundError)


def test_hub_id_of_gguf_files_without_a_quantization(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _, **options: str(tmp_path))
    expect("as in 'owner/name:Q8_0'", resolve_checkpoint, "owner/name", error=FileNotFoundError)


def test_batch_job_knows_the_file(checkpoint, tmp_path):
    path, config = write_gguf(checkpoint(), tmp_path / "sha256-0a1b"), EngineConfig("x")
    seen = {fingerprint(path, config), fingerprint(path, replace(config, quantization="int8"))}
    os.utime(path)
    assert len(seen | {fingerprint(path, config)}) == 3


def test_package_is_missing(checkpoint, tmp_path, monkeypatch):
    path = write_gguf(checkpoint(), tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    expect('pip install "nanovllm[gguf]"', LLM, str(path))


# -- what is wrong with it --------------------------------------------------------------------------------------------


def vector(name: str):
    return lambda writer: writer.add_tensor(name, np.zeros(64, np.float32))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"general.architecture": "gemma"},
            "general.architecture must be one of llama, qwen2, qwen3, qwen35, qwen35moe, qwen3next",
        ),
        ({"llama.block_count": "two"}, "num_hidden_layers must be a whole number"),
        ({"llama.attention.head_count": [4, 4]}, "Validation error for field 'num_attention_heads'"),
        ({"llama.embedding_length": None}, "lacks llama.embedding_length"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not supported"),
        ({"llama.pooling_type": [1]}, "llama.pooling_type is [1], which is not a number"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"llama.attention.causal": False}, "its tokens see later ones (is_causal is false)"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor is 1.5, which is supported of yarn"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type must be one of none, linear, yarn, found"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads cannot share 3 KV heads"),
        ({"llama.feed_forward_length": 64}, "gate_proj.weight is [96, 64], the configuration implies [64, 64]"),
        ({"llama.block_count": 3}, "missing: model.layers.2.self_attn.q_proj.weight"),
        ({"llama.block_count": 1}, "not part of a LlamaForCausalLM: model.layers.1."),
        ({"split.count": 2}, "is one of 2 parts of a model; merge them"),
        ({"general.alignment": "32"}, "general.alignment must be a whole number"),
        ({"extra": vector("blk.0.ffn_gate_inp.weight")}, "not part of a LlamaForCausalLM: blk.0.ffn_gate_inp.weight"),
        ({"extra": vector("rope_freqs.weight")}, "rope_freqs.weight must be 8 numbers in F32, found (64,) in F32"),
    ],
)
def test_foreign_files(checkpoint, tmp_path, changes, text):
    expect(text, LLM, str(write_gguf(checkpoint(), tmp_path / "model.gguf", of_type("Q8_0"), **changes)))


Q_PROJ = b"blk.0.attn_q.weight"  # after it come the number of dimensions, two of them, the type and the offset


def patch(before: bytes, offset: int, kind: str, number: int):
    """Write a number over what comes `offset` bytes after a text."""

    def damage(data: bytes) -> bytes:
        at, value = data.index(before) + len(before) + offset, struct.pack(f"<{kind}", number)
        return data[:at] + value + data[at + len(value) :]

    return damage


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda d: b"", "does not begin with GGUF"),
        (lambda d: b"\x08\0\0\0\0\0\0\0{}", "does not begin with GGUF"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "is of version 1; GGUF files of versions 2 and 3"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "is big-endian"),
        (lambda d: d[:20], "is damaged, or not whole"),
        (lambda d: d[:1000], "is damaged, or not whole"),
        (lambda d: d[:-64], "the file is not whole, download it again"),
        (lambda d: d[:16] + struct.pack("<Q", 2**63) + d[24:], "is damaged, or not whole"),
        (patch(b"llama.block_count", 0, "I", 99), "metadata of type 99 is not known"),
        (patch(b"tokenizer.ggml.tokens", 4, "Q", 2**60), "is damaged, or not whole"),
        (patch(b"tokenizer.ggml.token_type", 4, "Q", 2**60), "is damaged, or not whole"),
        (lambda d: d.replace(b"llama.block_count", b"llama.\xff\xff\xffck_count"), "is damaged, or not whole"),
        (lambda d: d.replace(b"ggml.bos_token_id", b"ggml.eos_token_id"), "has 'tokenizer.ggml.eos_token_id' twice"),
        (lambda d: d.replace(b"blk.1.attn_q", b"blk.0.attn_q"), "layers.0.self_attn.q_proj.weight' twice"),
        (patch(Q_PROJ, 0, "I", 9), "is damaged, or not whole"),
        (patch(Q_PROJ, 4, "Q", 65), "of shape (64, 65) is not made of rows of whole Q8_0"),
        (patch(Q_PROJ, 20, "I", 999), "is of a type that cannot be unpacked (999 is not"),
        (patch(Q_PROJ, 20, "I", 26), "is of a type that cannot be unpacked (Dequantization"),
        (patch(Q_PROJ, 24, "Q", 2**62), "the file is not whole, download it again"),
        (patch(Q_PROJ, 24, "Q", 33), "does not begin at a multiple of 32"),
        # Where another one begins, in the middle of it, and into the next one.
        (patch(Q_PROJ, 24, "Q", 0), "'output.weight' and 'blk.0.attn_q.weight' have bytes in common"),
        (patch(Q_PROJ, 24, "Q", 32), "'output.weight' and 'blk.0.attn_q.weight' have bytes in common"),
        (patch(Q_PROJ, 4, "Q", 128), "'blk.0.attn_q.weight' and 'blk.0.attn_v.weight' have bytes in common"),
    ],
)
def test_damaged_files(checkpoint, tmp_path, damage, text):
    data = write_gguf(checkpoint(), tmp_path / "good.gguf", of_type("Q8_0")).read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(data))
    expect(text, LLM, str(path))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


MANY = 2**30
HEADERS = {  # after the version: numbers of tensors and keys, then what there is of them
    "keys": struct.pack("<QQ", 0, MANY) + text("a") + struct.pack("<IB", 0, 1),
    "tensors": struct.pack("<QQ", MANY, 0),
    "tensors without names": struct.pack("<QQ", 1000, 0),
    "an array of texts": struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, MANY),
    "an array of bytes": struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IIQ", 9, 0, MANY),
    "an array of numbers": struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IIQ", 9, 12, MANY),
    "arrays": struct.pack("<QQ", 0, 2) + (text("a") + struct.pack("<IIQ", 9, 0, 2**25) + bytes(2**25)) * 2,
    "a text": struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IQ", 8, MANY),
    "an array of arrays": struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, MANY),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("size", [0, 2**33])
def test_counts_for_which_there_is_no_room(name, size, tmp_path):
    """Refused at once, also where the file system holds gigabytes of zeros for nothing."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + HEADERS[name])
    if size:
        os.truncate(path, size)
    started = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"is damaged, or not whole|twice|of type 9 is not known"):
            LLM(str(path))
        assert tracemalloc.get_traced_memory()[1] < 2**30
    finally:
        tracemalloc.stop()
    assert time.thread_time() - started < 5


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_1", "F16"])
def test_numbers_that_are_not_finite(checkpoint, tmp_path, kind):
    path = write_gguf(checkpoint(), tmp_path / "model.gguf", of_type(kind))
    tensor = GGUFFile(path).tensors["model.layers.0.mlp.up_proj.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.start + 2 * (kind == "Q4_1"))  # its minimum
        file.write(np.float16(np.nan).tobytes())
    expect("layers.0.mlp.up_proj.weight has numbers that are NaN" if kind != "F16" else "are NaN", LLM, str(path))
