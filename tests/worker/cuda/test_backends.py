"""On a GPU: every architecture on every backend, beside transformers in float32, and in half precision.

examples/gpu_report.py puts the figures that these tests record into its report, and `pytest -p tests.pretend_gpu` runs
them on the pretend GPU. They need nothing but pytest and what the engine needs.
"""

import random
from functools import cache

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import HYBRIDS, VARIANTS, assert_greedy, make_checkpoint, reference_logits
from tests.worker.cuda.backends import BACKENDS, has_bfloat16, installed_backends

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

IS_PRETEND = torch.cuda.is_available() and torch.cuda.get_device_name() == "a pretend GPU"
OPTIONS, LENGTHS, NUM_OUTPUT = dict(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256), (1, 17, 40, 100), 16
if IS_PRETEND:  # Triton's interpreter is slow
    OPTIONS, LENGTHS, NUM_OUTPUT = dict(max_model_len=32, max_num_seqs=2, max_num_batched_tokens=32), (3, 17), 3
EVERY_BACKEND = pytest.mark.parametrize("backend", installed_backends()[::-1])
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return cache(lambda variant: make_checkpoint(tmp_path_factory.mktemp(variant), variant))


@pytest.fixture
def noted(record_property, variant, backend):
    """noted(name, value): a figure for the report."""
    record_property("architecture", variant)
    record_property("backend", backend)
    return record_property


def prompts_of() -> list[list[int]]:
    """The last one begins as another does."""
    rng = random.Random(0)
    prompts = [rng.choices(range(4, 320), k=length) for length in LENGTHS]
    return [*prompts, prompts[-1][: LENGTHS[-1] // 2] + prompts[0]]


def generate(folder, backend: str, dtype: str, **more) -> tuple[LLM, list]:
    llm = LLM(str(folder), optimizations=BACKENDS[backend], dtype=dtype, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, **more)
    return llm, [output.outputs[0] for output in llm.generate(prompts_of(), params, use_tqdm=False)]


@EVERY_BACKEND
@EVERY_VARIANT
def test_greedy_tokens_are_those_of_transformers(folder_of, noted, variant, backend):
    """In float32, without TF32. Where transformers' two best logits are equal, either token is right."""
    if backend.startswith("flash-attn"):
        pytest.skip("flash-attn computes in half precision only")
    llm, answers = generate(folder_of(variant), backend, "float32")
    is_recorded = llm.engine.model_runner.recorded_steps is not None
    noted("tokens in float32", "differ")
    for prompt, answer in zip(prompts_of(), answers, strict=True):
        assert_greedy(folder_of(variant), prompt, answer.token_ids)
    noted("tokens in float32", "as transformers'")
    noted("attention", attention_of(llm))
    noted("decodes", "replayed" if is_recorded else "launched one by one")
    assert is_recorded == ("graphs" in backend and variant not in HYBRIDS and "moe" not in variant)


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@EVERY_VARIANT
def test_log_probabilities_in_half_precision(folder_of, noted, variant, dtype, backend):
    """Beside transformers in float32, after the same tokens; no farther from it than PyTorch's backend, or hardly."""
    if dtype == "bfloat16" and not has_bfloat16():
        pytest.skip("this GPU does not compute in bfloat16")
    if IS_PRETEND and dtype == "bfloat16" and backend != "PyTorch":
        pytest.skip("Triton's interpreter multiplies no bfloat16")
    attention, largest = in_half_precision(folder_of(variant), backend, dtype)
    noted(dtype, f"{largest:.4f} ({attention})")
    _, of_pytorch = in_half_precision(folder_of(variant), "PyTorch", dtype)
    assert largest < 3 * of_pytorch + 0.01


def attention_of(llm: LLM) -> str:
    """The module that computes it."""
    return llm.engine.model_runner.kernels.paged_attention.__module__.rpartition(".")[2]


@cache
def in_half_precision(folder, backend: str, dtype: str) -> tuple[str, float]:
    """(whose attention, the largest difference in the log-probability of any word, at any position of an answer)"""
    llm, answers = generate(folder, backend, dtype, logprobs=-1)
    largest = 0.0
    for prompt, answer in zip(prompts_of(), answers, strict=True):
        logits = reference_logits(folder, [*prompt, *answer.token_ids])
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        found = torch.tensor([[row[token_id].logprob for token_id in range(len(row))] for row in answer.logprobs])
        largest = max(largest, (found - expected).abs().max().item())
    return attention_of(llm), largest
