"""Adapters, end to end. The last word is the peft package on the same adapter, in float32, token for token."""

import hashlib
import shutil
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.checks import sandbox
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.features.lora.adapter_rows import AdapterRows, LoRAWeights, kernel_for
from nanovllm.features.lora.registry import KnownAdapters
from nanovllm.features.lora.slots import AdapterSlots
from nanovllm.worker.kernels import TORCH_KERNELS
from tests.checkpoints import SIZES, edit, make_checkpoint
from tests.errors import expect
from tests.faults import plant, run_to_end
from tests.features.lora.adapters import ATTENTION, IN_THREES, SHARED, make_adapter
from tests.marks import by_night
from tests.worker.cpu.test_kernels import kernels

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ADAPTERS = [
    dict(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=16),
    dict(r=8, target_modules=[*ATTENTION, "gate_proj", "up_proj", "down_proj"], use_rslora=True, lora_alpha=6),
    dict(
        r=3,
        target_modules=["k_proj", "down_proj", "lm_head"],
        rank_pattern={r"0\..*k_proj": 5, "k_proj": 7},  # the first that fits counts
        alpha_pattern={"k_proj": 9, "(down|up)_proj": 3, "roj": 30},  # "roj" is the end of a name, but not all of it
    ),
    dict(r=16, target_modules=["up_proj"], layers_to_transform=[1]),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama-biases", **IN_THREES)


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [make_adapter(folder / str(i), base, i, **options) for i, options in enumerate(ADAPTERS)]
    return [LoRARequest(f"adapter {i}", i + 1, str(path)) for i, path in enumerate(paths)]


@pytest.fixture(scope="module")
def llm(base) -> LLM:
    """For adapters that are refused: it has none afterwards."""
    return LLM(str(base), dtype="float32", enable_lora=True)


@cache
def reference(base: Path, adapter: str | None):
    import peft

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()


@torch.inference_mode()
def assert_greedy(base: Path, request: LoRARequest | None, prompt: list[int], answer: list[int]) -> None:
    """Each token is peft's choice after those before it, or peft itself has a tie there."""
    model = reference(base, None if request is None else request.lora_path)
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    for row, token in zip(logits, answer, strict=True):
        best = row.topk(2).values
        assert row.argmax() == token or best[0] - best[1] < 1e-4


def mixed(adapters: list[LoRARequest]) -> tuple[list[list[int]], list[LoRARequest | None]]:
    """Prompts with and without a common beginning, each for all adapters and for none of them."""
    prompts = [prompt for i in range(3) for prompt in [SHARED[: 25 * (i % 2)] + list(range(50 + i, 60 + 3 * i))] * 5]
    return prompts, [None, *adapters] * 3


SCHEDULES = {
    "batch": dict(),
    "plain PyTorch": dict(enforce_eager=True),
    "chunks, and adapters that leave": dict(max_num_batched_tokens=7, max_loras=2, block_size=4),
    "preemption": dict(num_gpu_blocks_override=24, block_size=4, max_model_len=64),
    "draft tokens": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}),
}
# By day. The others are compared with the batch, bit for bit: test_the_same_bits_in_any_company.
BY_DAY = "batch", "plain PyTorch"


@pytest.mark.parametrize("schedule", [name if name in BY_DAY else by_night(name) for name in SCHEDULES])
def test_tokens_are_those_of_peft(base, adapters, schedule):
    check_against_peft(LLM(str(base), dtype="float32", enable_lora=True, **SCHEDULES[schedule]), base, adapters)


@pytest.mark.nightly
def test_three_ranks_give_the_tokens_of_peft(base, adapters, processes):
    check_against_peft(processes.llm(base, 3, dtype="float32", enable_lora=True, max_loras=3), base, adapters)


def check_against_peft(llm, base, adapters):
    prompts, chosen = mixed(adapters)
    for _ in ("cold", "warm"):
        outputs = llm.generate(prompts, GREEDY, lora_request=chosen)
        for prompt, lora, output in zip(prompts, chosen, outputs, strict=True):
            assert_greedy(base, lora, prompt, output.outputs[0].token_ids)
        llm.engine.scheduler.check_integrity()
    assert llm.engine.block_manager.stats.hits > 0
    assert (llm.stats()["num_preemptions"] > 3) == (llm.engine.config.num_gpu_blocks_override == 24)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "options", [by_night(dict()), dict(dtype="bfloat16"), by_night(dict(quantization="int8"))], ids=str
)
def test_the_same_bits_in_any_company(base, adapters, options):
    prompts, chosen = mixed(adapters)
    options, params = {"dtype": "float32", "enable_lora": True} | options, replace(GREEDY, logprobs=2)
    llm = LLM(str(base), **options, enable_prefix_caching=False)
    expected = []
    for prompt, lora in zip(prompts, chosen, strict=True):
        [alone] = llm.generate([prompt], params, lora_request=[lora])[0].outputs
        expected.append((alone.token_ids, alone.logprobs))
    for name in set(SCHEDULES) - {"plain PyTorch"}:
        llm = LLM(str(base), **options, **SCHEDULES[name])
        for temperature in ("cold", "warm"):
            outputs = llm.generate(prompts, params, lora_request=chosen)
            found = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
            assert found == expected, f"{name}, {temperature}"
            llm.engine.scheduler.check_integrity()
        assert llm.engine.block_manager.stats.hits > 0
        assert (llm.stats()["num_preemptions"] > 3) == (name == "preemption")


@pytest.mark.parametrize("variant", ["qwen2", "qwen3-moe", "mistral-window"])
def test_other_architectures(checkpoint, tmp_path, variant):
    folder = checkpoint(variant)
    paths = [make_adapter(tmp_path / str(i), folder, i, r=4 + i, target_modules=ATTENTION[i:]) for i in range(2)]
    chosen = [None, *(LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths))]
    llm = LLM(str(folder), dtype="float32", enable_lora=True, block_size=4)
    prompts = [SHARED[:9]] * 3
    for prompt, lora, output in zip(prompts, chosen, llm.generate(prompts, GREEDY, lora_request=chosen), strict=True):
        assert_greedy(folder, lora, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("options", [dict(quantization="int8"), dict(dtype="bfloat16")], ids=["int8", "bf16"])
def test_other_numbers(base, adapters, options):
    """Rounding is small beside what an adapter changes."""
    llm = LLM(str(base), **{"dtype": "float32"} | options, enable_lora=True)
    params, tokens = SamplingParams(temperature=0, max_tokens=1, logprobs=-1), torch.tensor([SHARED])
    for lora in adapters:
        [output] = llm.generate([SHARED], params, lora_request=lora)
        entries = output.outputs[0].logprobs[0]
        with torch.inference_mode():
            models = reference(base, None), reference(base, lora.lora_path)
            plain, expected = (model(tokens).logits[0, -1].log_softmax(-1) for model in models)
        found = torch.tensor([entries[token].logprob for token in range(len(expected))])
        assert (found - expected).norm() < 0.3 * (plain - expected).norm()


def test_prompt_logprobs_of_an_adapter_that_changes_the_head(base, adapters):
    llm = LLM(str(base), dtype="float32", enable_lora=True, max_num_batched_tokens=9)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    chosen = [None, adapters[2], adapters[0]]
    for lora, output in zip(chosen, llm.generate([SHARED] * 3, params, lora_request=chosen), strict=True):
        with torch.inference_mode():
            model = reference(base, None if lora is None else lora.lora_path)
            logprobs = model(torch.tensor([SHARED])).logits[0].log_softmax(-1)
        for position, token in enumerate(SHARED[1:], start=1):
            found = output.prompt_logprobs[position][token].logprob
            assert found == pytest.approx(float(logprobs[position - 1, token]), abs=1e-4)


# -- hashes of blocks -------------------------------------------------------------------------------------------------


def test_blocks_are_shared_under_one_adapter_and_never_between_two(base, adapters):
    llm = LLM(str(base), dtype="float32", enable_lora=True, block_size=4)
    manager, found = llm.engine.block_manager, {}
    for lora in (None, adapters[0], adapters[1]):
        for hits in (0, len(SHARED) - 1):  # the last block is not full
            [output] = llm.generate([SHARED], GREEDY, lora_request=lora)
            assert output.num_cached_tokens == hits // 4 * 4
        seq = Sequence(SHARED, lora_id=lora and lora.lora_int_id)
        assert manager.allocate_with_prefix(seq)
        blocks = [manager.blocks[i] for i in seq.block_table[: seq.num_cached_tokens // 4]]
        k_cache, v_cache = llm.engine.model_runner.kv_cache.layers[1]
        found[lora] = [block.block_hash for block in blocks], k_cache[seq.block_table[0]], v_cache[seq.block_table[0]]
        assert all(block.extra_keys == (() if lora is None else (("lora", lora.lora_int_id),)) for block in blocks)
        manager.free(seq)
    names = [name for hashes, _, _ in found.values() for name in hashes]
    assert len(set(names)) == len(names) == 3 * 6
    values = [v for _, _, v in found.values()]
    assert not any(torch.allclose(values[i], values[j]) for i in range(3) for j in range(i))


def test_an_id_stands_for_one_adapter(base, adapters):
    llm = LLM(str(base), dtype="float32", enable_lora=True)
    llm.generate([SHARED], GREEDY, lora_request=adapters[0])
    other = LoRARequest(adapters[1].lora_name, 1, adapters[1].lora_path)
    expect("lora_int_id 1 is LoRARequest(lora_name='adapter 0'", llm.generate, [SHARED], GREEDY, lora_request=other)
    same = LoRARequest(adapters[0].lora_name, 1, adapters[0].lora_path + "/")
    [output] = llm.generate([SHARED], GREEDY, lora_request=same)
    assert output.num_cached_tokens > 0


def test_an_adapters_digest(base, adapters):
    """It stands for the adapter in the hashes of blocks, so it must be as hard to collide as they are."""
    llm = LLM(str(base), dtype="float32", enable_lora=True)
    one, other = (llm.engine.known_adapters.check(adapter) for adapter in adapters[:2])
    assert len(bytes.fromhex(one.digest)) == hashlib.sha256().digest_size
    assert one.digest != other.digest


@pytest.mark.parametrize("num_ranks", [1, by_night(3)])
def test_files_that_change_or_go(base, adapters, tmp_path, processes, num_ranks):
    """Requests that are there are answered with what they have named. Later ones are refused, and nobody else is."""
    folders = [shutil.copytree(adapters[0].lora_path, tmp_path / name) for name in ("changed", "gone")]
    changed, gone = (LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, start=7))
    options = dict(dtype="float32", enable_lora=True, max_loras=1, num_gpu_blocks_override=64, block_size=4)
    llm = processes.llm(base, num_ranks, **options) if num_ranks > 1 else LLM(str(base), **options)
    requests = [llm.engine.make_request(SHARED, GREEDY, lora) for lora in (changed, gone, None, adapters[1])]
    assert llm.engine.known_adapters.check(changed) is requests[0].samples[0].seq.parts["adapter"], (
        "it is in memory once"
    )
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(Path(adapters[3].lora_path, file), folders[0] / file)  # into the same file, and longer
    shutil.rmtree(folders[1])
    llm.engine.enqueue(requests)
    run_to_end(llm.engine)
    for request, lora in zip(requests, (adapters[0], adapters[0], None, adapters[1]), strict=True):
        assert_greedy(base, lora, SHARED, request.output().outputs[0].token_ids)
    del request, requests[:]
    llm.generate([SHARED], GREEDY, lora_request=adapters[1])  # now nobody has the old weights any more
    expect("with other weights than", llm.generate, [SHARED], GREEDY, lora_request=changed)
    expect("adapter 'gone'", llm.generate, [SHARED], GREEDY, lora_request=gone)
    [output] = llm.generate([SHARED], GREEDY, lora_request=adapters[2])
    assert_greedy(base, adapters[2], SHARED, output.outputs[0].token_ids)


def test_numbers_that_the_engines_dtype_does_not_have(base, adapters, tmp_path):
    folder = shutil.copytree(adapters[0].lora_path, tmp_path / "adapter")
    edit(folder / "adapter_config.json", lora_alpha=1e9)
    llm = LLM(str(base), dtype="float16", enable_lora=True)
    lora = LoRARequest("large", 1, str(folder))
    expect("infinite in torch.float16", llm.generate, [SHARED], GREEDY, lora_request=lora)


# -- slots ------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_adapter_leaves(base, adapters):
    llm = LLM(str(base), dtype="float32", enable_lora=True, max_loras=2)
    kept = llm.engine.model_runner.parts["adapters"]
    slots, layers = kept.slots, kept.layers
    for i, expected in ((0, [1]), (1, [1, 2]), (0, [2, 1]), (2, [1, 3]), (3, [3, 4]), (0, [4, 1])):
        [output] = llm.generate([SHARED], GREEDY, lora_request=adapters[i])
        assert list(slots) == expected and set(slots.values()) <= {0, 1}
        for weights in (layer.weights for layer in layers if layer.weights is not None):
            for slot, rank in enumerate(weights.ranks):  # nothing is left of the adapter that was there
                assert not weights.a[slot, :, rank:].any() and not weights.b[slot, rank:].any()
        assert_greedy(base, adapters[i], SHARED, output.outputs[0].token_ids)


def test_no_more_adapters_run_than_have_room():
    manager = BlockManager(64, 4)
    may_run = KnownAdapters(None, SimpleNamespace(max_loras=2)).may_run
    scheduler = Scheduler(manager, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=32, may_run=may_run)
    for lora_id in (1, None, 2, 1, 3, 1):
        scheduler.add(Sequence([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True), lora_id=lora_id))
    first = scheduler.schedule()
    assert [chunk.seq.lora_id for chunk in first.chunks] == [1, None, 2, 1]  # nobody overtakes the third adapter
    scheduler.update(first, [[9]] * 4)
    scheduler.update(scheduler.schedule(), [[9]] * 4)
    assert [chunk.seq.lora_id for chunk in scheduler.schedule().chunks] == [3, 1]


@pytest.mark.parametrize("num_layers", [0, 3, 7])
def test_a_load_that_breaks_off_leaves_no_half_adapter(base, adapters, monkeypatch, num_layers):
    llm = LLM(str(base), dtype="float32", enable_lora=True, max_loras=1)
    llm.generate([SHARED], GREEDY, lora_request=adapters[0])
    plant(monkeypatch, AdapterSlots, "_load_layer", [num_layers + 1], KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([SHARED], GREEDY, lora_request=adapters[1])
    for lora in (adapters[0], adapters[1], None):
        [output] = llm.generate([SHARED], GREEDY, lora_request=lora)
        assert_greedy(base, lora, SHARED, output.outputs[0].token_ids)


def test_without_adapters_nothing_is_in_the_way(base, adapters):
    plain, able = LLM(str(base), dtype="float32"), LLM(str(base), dtype="float32", enable_lora=True)
    assert "adapters" not in plain.engine.model_runner.parts
    kept = able.engine.model_runner.parts["adapters"]
    assert len(kept.layers) == 4 * SIZES["num_hidden_layers"] + 1
    able.generate([SHARED], GREEDY)
    assert all(layer.weights is None for layer in kept.layers)
    expect("built without enable_lora=True", plain.generate, [SHARED], GREEDY, lora_request=adapters[0])


# -- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("in_size", "out_sizes", "num_rows"), [(64, (64, 32, 32), 11), (300, (5,), 1), (600, (70, 9), 23)]
)
def test_kernel(dtype, in_size, out_sizes, num_rows):
    torch.manual_seed(0)
    weights = LoRAWeights.empty(3, 6, in_size, out_sizes, dtype, torch.device("cpu"))
    for slot, rank in ((0, 6), (2, 3)):  # slot 1: an adapter that leaves this layer as it is
        weights.a[slot, :, :rank, :in_size] = torch.randn(len(out_sizes), rank, in_size) / in_size**0.5
        weights.b[slot, :rank] = torch.randn(rank, sum(out_sizes))
        weights.ranks[slot] = rank
    slots = torch.randint(-1, 3, (num_rows,))
    rows = AdapterRows.of(slots, torch.device("cpu"))
    x, y = torch.randn(num_rows, in_size).to(dtype), torch.randn(num_rows, sum(out_sizes)).to(dtype)
    found, expected = y.clone(), y.clone()
    kernel_for(TORCH_KERNELS)(expected, x, rows, weights)
    kernel_for(kernels(dtype))(found, x, rows, weights)
    torch.testing.assert_close(found, expected, atol=2e-5 if dtype == torch.float32 else 0.03, rtol=2e-2)
    untouched = (slots == -1) | (slots == 1)
    assert torch.equal(found[untouched], y[untouched])


# -- what is refused --------------------------------------------------------------------------------------------------


def edit_tensors(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, EMBEDDING = f"{Q}.lora_A.weight", "base_model.model.model.embed_tokens.lora_embedding_A"
HEAD = "base_model.model.lm_head.base_layer.weight"
MISTAKES = {
    "DoRA": (dict(use_dora=True), "use_dora=True is not supported"),
    "bias": (dict(bias="lora_only"), "bias='lora_only' is not supported"),
    "modules_to_save": (dict(modules_to_save=["lm_head"]), "modules_to_save=['lm_head'] is not supported"),
    "another method": (dict(peft_type="IA3"), "peft_type is 'IA3', only 'LORA'"),
    "another base": (dict(init_lora_weights="pissa_niter_4"), "changed the base model's weights, too"),
    "a field of tomorrow": (dict(use_magic=True), "use_magic=True is not supported"),
    "parameters": (dict(target_parameters=["experts"]), "target_parameters=['experts'] is not supported"),
    "alpha": (dict(lora_alpha="much"), "lora_alpha must be a number"),
    "a magnitude": (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(96)}), "lora_magnitude_vector"),
    "an embedding": (lambda t: t.update({EMBEDDING: torch.ones(4, 321)}), "embed_tokens.lora_embedding_A is no"),
    "another size": (lambda t: t.update({HEAD: torch.ones(322, 96)}), "save_embedding_layers=False"),
    "no prefix": (lambda t: t.update({A.removeprefix("base_model.model."): t.pop(A)}), "is no A or B of a"),
    "a number": (lambda t: t.update({A: torch.tensor(1.0)}), "q_proj.lora_A.weight is [], not a matrix"),
    "a pattern": (dict(alpha_pattern={"q_proj(": 4}), "'q_proj(' is no regular expression"),
    "a slow pattern": (dict(rank_pattern={"([a-z_.0-9]+)*x": 4}), "to match its regular expressions takes"),
    "no B": (lambda t: t.pop(A.replace("_A.", "_B.")), "q_proj has A [4, 96], not A [4, 96] and B [96, 4]"),
    "a lower rank": (dict(r=8), "q_proj has A [4, 96], B [96, 4], not A [8, 96] and B [96, 8]"),
    "a rank": (lambda t: t.update({A: t[A].repeat(2, 1)}), "q_proj has A [8, 96], B [96, 4], not"),
    "numbers": (lambda t: t[A].fill_(float("nan")), "has numbers that are NaN, or infinite in torch.float32"),
    "integers": (lambda t: t.update({A: t[A].to(torch.int8)}), "is int8, only bfloat16, float16, float32 are read"),
    "nothing": (dict.clear, "it has no tensors"),
}


QUICK = [name for name in MISTAKES if name != "a slow pattern"]


@pytest.mark.parametrize("name", [*QUICK, pytest.param("a slow pattern", marks=pytest.mark.slow)])
def test_an_adapter_that_does_not_fit_is_refused_with_the_names(llm, adapters, tmp_path, name, monkeypatch):
    monkeypatch.setattr(sandbox, "_guards", name == "a slow pattern")  # which a server's client has named
    change, text = MISTAKES[name]
    folder = shutil.copytree(adapters[0].lora_path, tmp_path / "adapter")
    if isinstance(change, dict):
        edit(folder / "adapter_config.json", **change)
    else:
        edit_tensors(folder, change)
    expect(text, llm.generate, [SHARED], GREEDY, lora_request=LoRARequest("bad", 1, str(folder)))
    assert not llm.engine.has_unfinished_requests()


def test_the_wrong_base_and_too_high_a_rank(checkpoint, base, adapters):
    llm = LLM(str(checkpoint("llama")), dtype="float32", enable_lora=True)
    text = "q_proj has A [4, 96], B [96, 4], not A [4, 64] and B [64, 4]"
    expect(text, llm.generate, [SHARED], GREEDY, lora_request=adapters[0])
    llm = LLM(str(base), dtype="float32", enable_lora=True, max_lora_rank=8)
    expect("up_proj has rank 16, and max_lora_rank is 8", llm.generate, [SHARED], GREEDY, lora_request=adapters[3])
    bad = [adapters[0], adapters[3], "adapter"]
    expect("prompts[2]: lora_request must be a LoRARequest", llm.generate, [SHARED] * 3, GREEDY, lora_request=bad)
    expect("3 prompts need 3 lora_request (or one for all), found 2", llm.generate, [SHARED] * 3, lora_request=bad[:2])


def test_files_that_are_not_there(llm, adapters, tmp_path, monkeypatch):
    def refused(text: str, path: Path | str) -> None:
        expect(text, llm.generate, [SHARED], GREEDY, lora_request=LoRARequest("x", 1, str(path)))

    refused("is neither a directory nor a hub id", tmp_path / "nowhere")
    refused("has no adapter_config.json; PEFT's save_pretrained() writes it", tmp_path)
    folder = shutil.copytree(adapters[0].lora_path, tmp_path / "adapter")
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 100) + b"{")
    refused("cannot be read", folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    refused("has no adapter_model.safetensors", folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: str(folder))
    refused("has no adapter_model.safetensors", "owner/name")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", 1, "p"), "lora_name must be text that is not empty"),
        (("a", 0, "p"), "lora_int_id must be a whole number between 1 and"),
        (("a", 1), "lora_path must be text that is not empty"),
        (("a", True, "p"), "lora_int_id must be a whole number"),
    ],
)
def test_requests_that_say_nothing(arguments, text):
    expect(text, LoRARequest, *arguments)


def test_vllms_names():
    lora = LoRARequest("a", 1, Path("p"), base_model_name="x", load_inplace=False, tensorizer_config_dict=None)
    assert lora == LoRARequest(lora_name="a", lora_int_id=1, lora_path="p")
    assert lora == LoRARequest("a", 1, "p", load_inplace=True), "it says when to read, not which adapter"
    expect("load_inplace must be True or False", LoRARequest, "a", 1, "p", load_inplace=1)
    expect("takes 'is_3d_lora_weight' only as False (found True)", LoRARequest, "a", 1, "p", is_3d_lora_weight=True)


@pytest.fixture(scope="module", params=[["v_proj"], ["q_proj", "k_proj"], ["down_proj"]], ids=str)
def huge(request, base, tmp_path_factory) -> LoRARequest:
    """Finite weights whose products are not."""
    folder = tmp_path_factory.mktemp("huge")
    make_adapter(folder, base, r=4, target_modules=request.param, lora_alpha=1e30)
    return LoRARequest("huge", 1, str(folder))


@pytest.mark.parametrize("options", [dict(), dict(enforce_eager=True), dict(quantization="int8")], ids=str)
def test_numbers_that_are_too_large_end_their_request_only(base, huge, caplog, options):
    """No arbitrary token, in whatever layer numbers become infinite."""
    llm, prompts = LLM(str(base), dtype="float32", enable_lora=True, **options), [SHARED, SHARED, [5, 6, 7]]
    params = [GREEDY, SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True, logprobs=1), GREEDY]
    alone = llm.generate(prompts, GREEDY)
    for _ in ("cold", "warm"):
        outputs = llm.generate(prompts, params, lora_request=[None, huge, None])
        assert [o.outputs[0].token_ids for o in outputs[::2]] == [o.outputs[0].token_ids for o in alone[::2]]
        for sample in outputs[1].outputs:
            assert sample.finish_reason == "error" and len(sample.token_ids) == len(sample.logprobs) < 12
    assert "ends with an error: there is no token to choose" in caplog.text
    llm.engine.scheduler.check_integrity()
    assert not llm.engine.has_unfinished_requests()
