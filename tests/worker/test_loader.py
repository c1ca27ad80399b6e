"""Loading: memory, sharded and broken files."""

import json
import random
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.files import tensor_files
from nanovllm.files.tensor_files import EMBEDDINGS, HEAD
from nanovllm.worker.loader import StoredWeight
from tests.checkpoints import edit, make_checkpoint, reference_logits
from tests.errors import expect
from tests.worker.test_model import logits_of

WEIGHT = "model.layers.1.mlp.up_proj.weight"


def edit_weight(folder, change) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {WEIGHT: change(weights[WEIGHT])}, folder / "model.safetensors")


# Anonymous memory while the weights are read, sampled by a thread, against their size.
MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.loader import load_model
def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024
folder = Path(sys.argv[1])
config = ModelConfig.from_directory(folder)
torch.zeros(1000, 1000) @ torch.zeros(1000, 1000)  # start the thread pools
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
model = load_model(folder, config, getattr(torch, sys.argv[2]), torch.device("cpu"))
done = True; thread.join()
weights = sum(p.nbytes for p in model.parameters())
print((max(peak, anonymous()) - before) / weights)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.nightly  # by day test_start_memory.py looks at all memory, with the files' pages
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_anonymous_memory_stays_near_the_weights_size(demo_checkpoint, processes, dtype):
    status, out, err = processes.run("-c", MEASURE, str(demo_checkpoint), dtype)
    assert status == 0, err
    assert 0.9 < float(out) < 1.15


def test_sharded_checkpoint_is_the_same_model(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3", shards=True)
    assert len(list(folder.glob("*.safetensors"))) > 2
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    token_ids = random.Random(2).choices(range(320), k=40)
    torch.testing.assert_close(logits_of(llm, token_ids, [40]), reference_logits(folder, token_ids), atol=1e-4, rtol=0)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("hidden_size", "is_whole"), [(128, False), (80, True)])
def test_weights_that_are_reordered_as_they_are_read(tmp_path, monkeypatch, dtype, hidden_size, is_whole):
    """A few rows at a time, and only what has no whole blocks of rows as a whole."""
    options = {"hidden_size": hidden_size, "head_dim": hidden_size // 4, "intermediate_size": 352}
    folder, read = make_checkpoint(tmp_path, "qwen3", **options), []
    whole = StoredWeight.read
    monkeypatch.setattr(StoredWeight, "read", lambda stored: (read.extend(stored.places), whole(stored)))
    monkeypatch.setattr(tensor_files, "PART_NUMBERS", 9_000)
    llm = LLM(str(folder), dtype=dtype, num_gpu_blocks_override=64)
    assert {name.split(".")[-2] for name in read} == ({"q_proj", "k_proj", "v_proj"} if is_whole else set())
    token_ids = random.Random(2).choices(range(320), k=40)
    monkeypatch.setattr(StoredWeight, "parts", lambda stored: None)
    read_before = LLM(str(folder), dtype=dtype, num_gpu_blocks_override=64)
    assert len(read) > 7 and torch.equal(logits_of(llm, token_ids, [40]), logits_of(read_before, token_ids, [40]))


@pytest.mark.parametrize("place", [(0, 0), (31, 1), (-1, -1)])
@pytest.mark.parametrize("name", [WEIGHT, "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_one_number_that_is_none(tmp_path, name, place):
    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=False, intermediate_size=100)
    weights = load_file(folder / "model.safetensors")
    weights[name][place] = float("nan")
    save_file(weights, folder / "model.safetensors")
    expect(f"{name} in {folder} has numbers that are NaN", LLM, str(folder), num_gpu_blocks_override=64)


def test_unreadable_files(broken):
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 5, 1000, len(whole) - 1):
        weights.write_bytes(whole[:length])
        expect("is not a whole safetensors file", LLM, str(broken), num_gpu_blocks_override=64)
    (broken / "tokenizer.json").write_text("{")
    expect("tokenizer", LLM, str(broken))
    (broken / "config.json").write_text("{")
    expect("cannot be read as JSON", LLM, str(broken))
    (broken / "config.json").write_text("[]")
    expect("must hold a JSON object", LLM, str(broken))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool])
def test_weights_of_other_dtypes(broken, dtype):
    edit_weight(broken, lambda weight: weight.to(dtype))
    name = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.bool: "BOOL"}[dtype]
    text = f"wrong dtype: {WEIGHT} is {name}, only BF16, F16, F32, F64 are read"
    text += "; config.json does not say how it was quantized" * (dtype != torch.bool)
    expect(text, LLM, str(broken), num_gpu_blocks_override=64)


@pytest.mark.parametrize(("number", "dtype"), [("nan", "auto"), ("-inf", "auto"), ("1e30", "float16")])
def test_weights_that_are_not_finite(broken, number, dtype):
    def spoil(weight):
        weight[7, 5] = float(number)
        return weight

    edit_weight(broken, spoil)
    text = f"{WEIGHT} in {broken} has numbers that are NaN, or infinite in torch.float"
    expect(text, LLM, str(broken), num_gpu_blocks_override=64, dtype=dtype)


def test_float16_weights_whose_sum_is_not_finite(broken):
    edit_weight(broken, lambda weight: torch.full_like(weight, 60_000.0))
    assert LLM(str(broken), num_gpu_blocks_override=64, dtype="float16").generate([[5]])


def test_weights_beyond_memory(broken, monkeypatch):
    monkeypatch.setattr("nanovllm.files.tensor_files.installed_bytes", lambda: 100_000)
    expect("need 0.0 GB of 0.0 GB of memory", LLM, str(broken), num_gpu_blocks_override=64)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "config.json", None])
def test_index_that_leads_elsewhere(broken, name):
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    expect("may only name safetensors files beside it, not", LLM, str(broken), num_gpu_blocks_override=64)


def test_index_that_names_a_missing_file(broken):
    (broken / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    expect("names files that are not there", LLM, str(broken), error=FileNotFoundError, num_gpu_blocks_override=64)
    (broken / "model.safetensors.index.json").write_text("{}")
    expect("has no weight_map", LLM, str(broken), num_gpu_blocks_override=64)


SHARDS = "a.safetensors", "b.safetensors"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a, b, index: a.pop(WEIGHT), f"names a.safetensors for the tensor '{WEIGHT}', which is in none"),
        (lambda a, b, index: b.update({WEIGHT: a.pop(WEIGHT)}), f"'{WEIGHT}', which is in b.safetensors; download"),
        (lambda a, b, index: index.update({"x": "b.safetensors"}), "names b.safetensors for the tensor 'x', which is"),
    ],
)
def test_index_and_shards_that_disagree(broken, change, text):
    """Whoever of them is right, the other one is from elsewhere, and so may be all that is in it."""
    weights = load_file(broken / "model.safetensors")
    shards = {n: w for n, w in weights.items() if ".1." in n}, {n: w for n, w in weights.items() if ".1." not in n}
    index = {name: file for file, shard in zip(SHARDS, shards, strict=True) for name in shard}
    (broken / "model.safetensors").unlink()

    def load() -> None:
        for file, shard in zip(SHARDS, shards, strict=True):
            save_file(shard, broken / file, metadata={"format": "pt"})
        (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        tensor_files.tensor_files(broken)

    load()
    change(*shards, index)
    expect(text, load)


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("extra", [WEIGHT, "model.layers.0.mlp.old.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_what_the_index_does_not_name_is_not_read(broken, caplog, shard, extra):
    """A stale copy in one of the shards, whichever is read first, or a tensor of no model."""
    prompt = dict(prompts=[[5, 6, 7]], sampling_params=SamplingParams(temperature=0, ignore_eos=True))
    expected = LLM(str(broken), num_gpu_blocks_override=64).generate(**prompt)[0].outputs
    weights = load_file(broken / "model.safetensors")
    (broken / "model.safetensors").unlink()
    shards = {n: w for n, w in weights.items() if ".1." in n}, {n: w for n, w in weights.items() if ".1." not in n}
    index = {name: file for file, part in zip(SHARDS, shards, strict=True) for name in part}
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    has_stale = extra not in shards[shard]
    shards[shard].setdefault(extra, torch.zeros(4, 4))
    for file, part in zip(SHARDS, shards, strict=True):
        save_file(part, broken / file, metadata={"format": "pt"})
    assert LLM(str(broken), num_gpu_blocks_override=64).generate(**prompt)[0].outputs == expected
    told = f"not read, the index assigns other files: {extra} in {SHARDS[shard]}"
    assert (told in caplog.text) == has_stale


def test_two_files_with_one_tensor_and_no_index(broken):
    (broken / "model.safetensors").rename(broken / "a.safetensors")
    tensor_files.tensor_files(broken)
    shutil.copy(broken / "a.safetensors", broken / "b.safetensors")
    expect(
        "is in a.safetensors and in b.safetensors, and no model.safetensors.index.json says",
        tensor_files.tensor_files,
        broken,
    )


TIED = {"head alone": {}, "both, equal": {"lm_head.weight": 1.0}, "both, different": {"lm_head.weight": -2.0}}


@pytest.mark.parametrize("kind", TIED)
def test_tied_embeddings_as_files_have_them(tmp_path, caplog, kind):
    """One matrix under its other name, twice, or two that differ: as transformers reads them."""
    folder = make_checkpoint(tmp_path / "model", "llama-mha-tied")
    weights = load_file(folder / "model.safetensors")
    embeddings = weights[EMBEDDINGS]
    if kind == "head alone":
        weights[HEAD] = weights.pop(EMBEDDINGS)
    for name, factor in TIED[kind].items():
        weights[name] = embeddings * factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    ids = list(range(5, 40))
    llm = LLM(str(folder), dtype="float32", max_model_len=64)
    found = logits_of(llm, ids, [len(ids)])
    torch.testing.assert_close(found, reference_logits(folder, ids), atol=2e-4, rtol=1e-4)
    assert ("the files hold two that differ: both are used" in caplog.text) == (kind == "both, different")
    model = LLM(str(folder), enforce_eager=True, max_model_len=64).engine.model_runner.model
    assert (model.lm_head.weight is model.embed_tokens) == (kind != "both, different")


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}])
def test_two_matrices_that_should_be_one_in_fewer_bits(tmp_path, options):
    folder = make_checkpoint(tmp_path / "model", "llama-mha-tied")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {HEAD: -weights[EMBEDDINGS]}, folder / "model.safetensors", {"format": "pt"})
    untied = shutil.copytree(folder, tmp_path / "untied")
    edit(untied / "config.json", tie_word_embeddings=False)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    found, expected = (
        LLM(str(path), max_model_len=64, **options).generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0]
        for path in (folder, untied)
    )
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
