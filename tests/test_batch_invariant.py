"""The same bits always: tokens and log-probabilities of a prompt are equal, with ==, in any company (chapter 10)."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import SIZES
from tests.features.speculation.test_speculation import Hostile, reckless
from tests.marks import by_night

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=1)
SEEDED = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, logprobs=1, seed=3)
BLOCK_SIZE, MAX_MODEL_LEN = 4, 352
ROOMY, ALONE = (
    dict(block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN),
    dict(max_num_seqs=1, enable_prefix_caching=False),
)
TIGHT = dict(num_gpu_blocks_override=MAX_MODEL_LEN // BLOCK_SIZE + 8)
# Each of these changes which rows are computed together, or where a row's keys are cut, or who computes them.
SCHEDULES: dict[str, dict[str, Any]] = {
    "batch": dict(),
    "small chunks": dict(max_num_batched_tokens=23, max_num_seqs=4),
    "blocks of 16, tokens in chunks of 64": dict(block_size=16, max_num_batched_tokens=64),
    "blocks of 5": dict(block_size=5, max_num_batched_tokens=100),
    "prompts of more than 11 tokens are cut": dict(long_prefill_token_threshold=11, max_num_batched_tokens=64),
    "tight pool": TIGHT,
    "draft tokens": dict(),
    "draft tokens, tight pool, small chunks": dict(max_num_batched_tokens=19) | TIGHT,
}
# By day one model in bfloat16 has all of them, the others a few: each way to cut rows, keys and blocks differently.
FEW = ["batch", "small chunks", "blocks of 5", "draft tokens, tight pool, small chunks"]
WHICH = {"all": list(SCHEDULES), "few": FEW, "others": [name for name in SCHEDULES if name not in FEW]}
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": dict(dtype="bfloat16"),
    "float32": dict(dtype="float32"),
    "int8": dict(dtype="float32", quantization="int8"),
    "int4": dict(dtype="float32", quantization="int4"),
    "int8 keys and values": dict(dtype="float32", kv_cache_dtype="int8"),
}


def make_prompts() -> list[list[int]]:
    """Some with a common beginning, some that repeat themselves, and one with more keys than a core takes at a time."""
    rng = random.Random(0)
    ids = range(4, SIZES["vocab_size"])
    shared, loop = rng.choices(ids, k=130), rng.choices(ids, k=5)
    own = [rng.choices(ids, k=n) for n in (1, 9, 64, 200)]
    return [shared + own[0], own[1], loop * 3, shared + own[3], shared[:70] + loop * 4, own[2]]


def bits(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    """All that is said of each prompt: tokens, and log-probabilities as they are."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.prompt_logprobs, [(x.token_ids, x.logprobs) for x in output.outputs]) for output in outputs]


def crossed(variants: list[str]) -> Iterator[Any]:
    """By day two models of two kinds of layers in bfloat16, the first in every kind; by night each in each."""
    for variant, kind in product(variants, KINDS):
        if (variant, kind) == (variants[0], "bfloat16"):
            yield variant, kind, "all"
        elif variant == variants[0] or (variant, kind) == ("qwen3.5", "bfloat16"):
            yield variant, kind, "few"
            yield by_night(variant, kind, "others")
        else:
            yield by_night(variant, kind, "all")


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("variant", "kind", "which"),
    list(crossed(["llama", "qwen3", "qwen3-moe", "mistral-window", "qwen3.5", "qwen3-next"])),
)
def test_schedules(checkpoint, variant, kind, which):
    folder, prompts = str(checkpoint(variant)), make_prompts()
    params = [replace(PARAMS, prompt_logprobs=None), PARAMS, *[replace(PARAMS, prompt_logprobs=None)] * 3, SEEDED]
    alone = LLM(folder, **KINDS[kind], **ROOMY | ALONE)
    expected = [bits(alone, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]
    answers = [samples[0][0] for _, samples in expected]
    continuations = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    for name in WHICH[which]:
        options = SCHEDULES[name]
        if "draft tokens" in name:  # so that there is a log of them
            options = options | dict(speculative_config={"method": "ngram", "num_speculative_tokens": 8})
        llm = LLM(folder, **KINDS[kind], **ROOMY | options)
        if "draft tokens" in name:  # some of them right
            llm.engine.wings["speculation"] = reckless(Hostile(continuations, random.Random(0)), random.Random(0))
        for temperature in ("cold", "warm"):
            assert bits(llm, prompts, params) == expected, f"{name}, {temperature}"
        stats = llm.stats()
        assert (stats["num_preemptions"] > 0) == ("tight pool" in name)
        assert (stats["num_accepted_tokens"] > 0) == ("draft tokens" in name)
        assert stats["prefix_cache"]["hits"] > 0


@pytest.mark.compiler
def test_bfloat16_with_weights_of_8_bits(checkpoint):
    llm = LLM(str(checkpoint("llama")), dtype="bfloat16", quantization="int8", **ROOMY)
    assert llm.stats()["batch_invariant"] == "on every processor"
    prompts = make_prompts()
    together = bits(llm, prompts, PARAMS)
    assert [bits(llm, [prompt], PARAMS)[0] for prompt in prompts] == together


@pytest.mark.compiler
def test_threads_and_samples(checkpoint, monkeypatch):
    """One thread, two, five; four samples of a prompt, each as if it were the only one."""
    prompts, answers = make_prompts(), []
    for num_threads in (1, 2, 5):
        monkeypatch.setattr("nanovllm.worker.cpu.threads.num_threads", lambda num=num_threads: num)
        llm = LLM(str(checkpoint("llama")), dtype="bfloat16", **ROOMY)
        answers += [bits(llm, prompts, PARAMS), bits(llm, prompts[::-1], PARAMS)[::-1]]
        four = [samples for _, samples in bits(llm, prompts, replace(PARAMS, n=4, prompt_logprobs=None))]
        assert four == [samples * 4 for _, samples in answers[0]]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.compiler
def test_what_is_said_of_the_promise(checkpoint, caplog):
    caplog.set_level("INFO", "nanovllm")
    folder, line = str(checkpoint("llama")), "Batch invariance: not promised"
    assert LLM(folder, dtype="float32").stats()["batch_invariant"] == "on every processor" and line not in caplog.text
    assert LLM(folder, dtype="bfloat16").stats()["batch_invariant"].startswith("on ")
    plain = {"optimizations": ("c_kernels",)}  # PyTorch multiplies; with adapters, as a part of their product
    torch_multiplies = [{"enforce_eager": True}, plain, plain | {"enable_lora": True}]
    for options in torch_multiplies:
        assert LLM(folder, dtype="float32", **options).stats()["batch_invariant"] == "not promised"
    assert caplog.text.count(line) == len(torch_multiplies)


@pytest.mark.compiler
@pytest.mark.parametrize("variant", ["qwen2", "smollm3", "llama-mha-tied"])
def test_other_models(checkpoint, variant):
    """Biases and tied heads, layers without rotary embedding, a KV head for each query head; in float16."""
    prompts = make_prompts()
    llm = LLM(str(checkpoint(variant)), dtype="float16", **ROOMY)
    together = bits(llm, prompts, PARAMS)
    assert [bits(llm, [prompt], PARAMS)[0] for prompt in prompts] == together
    assert not any(torch.isnan(torch.tensor(x.logprob)) for entry in together[0][0][1:] for x in entry.values())
