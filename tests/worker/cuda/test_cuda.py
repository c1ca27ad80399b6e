"""On a GPU: the parity matrix once more, through Triton and through PyTorch, and flash-attn's logits in bf16.

Without one: test_gpu_engine.py has the same engine on a pretend GPU, test_triton_kernels.py runs the kernels in
Triton's interpreter, test_flash_attention.py checks the call to flash-attn, and test_kernels.py the choice between
them.
"""

import random
import re

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams
from tests.checkpoints import reference_logits
from tests.parity import SETTINGS, check_setting, greedy, make_prompts
from tests.worker.cuda.backends import has_flash_attn
from tests.worker.test_model import check_logits, logits_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TRITON, PYTORCH = ("triton", "cuda_graphs"), ()
needs_flash_attn = pytest.mark.skipif(not has_flash_attn(), reason="needs flash-attn")


@pytest.mark.parametrize("optimizations", [TRITON, PYTORCH], ids=["triton", "pytorch"])
def test_logits_at_every_position(every_checkpoint, optimizations):
    check_logits(every_checkpoint, optimizations=optimizations, num_gpu_blocks_override=64)


@pytest.mark.parametrize("optimizations", [TRITON, ("triton",), PYTORCH], ids=["graphs", "triton", "pytorch"])
@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_matrix(checkpoint, setting, block_size, optimizations):
    check_setting(checkpoint(), setting, block_size, optimizations=optimizations)


@pytest.mark.parametrize("optimizations", [TRITON, PYTORCH], ids=["triton", "pytorch"])
def test_masks_and_prompt_logprobs(checkpoint, optimizations):
    """On a CPU: test_structured_outputs.py, test_vllm_surface.py."""
    llm = LLM(str(checkpoint()), dtype="float32", optimizations=optimizations, num_gpu_blocks_override=64)
    prompt = random.Random(3).choices(range(10, 300), k=40)
    fitting = StructuredOutputsParams(regex="[a-z]{3}[0-9]{2,5}")
    params = SamplingParams(n=4, max_tokens=12, prompt_logprobs=0, structured_outputs=fitting, bad_words=["a"])
    [output] = llm.generate([prompt], params)
    assert all(re.fullmatch("[b-z]{3}[0-9]{0,5}", completion.text) for completion in output.outputs)
    expected = reference_logits(checkpoint(), prompt).log_softmax(-1)[range(39), prompt[1:]].tolist()
    found = [row[token_id].logprob for row, token_id in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("optimizations", [TRITON, PYTORCH], ids=["triton", "pytorch"])
def test_drafts_change_nothing(checkpoint, optimizations):
    """On a CPU: test_speculation.py."""
    pytest.importorskip("hypothesis", reason="what test_speculation.py needs")
    from tests.features.speculation.test_speculation import OPTIONS, assert_same, generate, hostile, random_requests

    options, requests = OPTIONS | dict(optimizations=optimizations), random_requests(random.Random(4), 12)
    expected = generate(LLM(str(checkpoint()), **options), requests)
    llm = LLM(str(checkpoint()), **options)
    hostile(llm, expected, seed=1)
    assert_same(generate(llm, requests), expected, tolerance=1e-4)  # other sums for another number of rows
    assert llm.stats()["num_accepted_tokens"] > 10


@needs_flash_attn
def test_flash_attn_logits_in_bf16(demo_checkpoint):
    token_ids = random.Random(2).choices(range(100, 40_000), k=600)
    options = dict(dtype="bfloat16", num_gpu_blocks_override=16, max_model_len=1024)
    flash = logits_of(LLM(str(demo_checkpoint), **options), token_ids, [600])
    plain = logits_of(LLM(str(demo_checkpoint), optimizations=(), **options), token_ids, [600])
    assert (flash - plain).abs().mean() < 0.02 * plain.abs().mean()
    assert (flash.argmax(-1) == plain.argmax(-1)).float().mean() > 0.95


def test_demo_model_in_bf16(demo_checkpoint):
    llm = LLM(str(demo_checkpoint), max_model_len=512)
    [output] = llm.generate(["The capital of France is"], greedy(4))
    assert output.outputs[0].text.startswith(" Paris")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(checkpoint):
    options = dict(dtype="float32", num_gpu_blocks_override=64)
    alone, together = LLM(str(checkpoint()), **options), LLM(str(checkpoint()), tensor_parallel_size=2, **options)
    outputs = [[o.outputs[0].token_ids for o in llm.generate(make_prompts(6), greedy(16))] for llm in (alone, together)]
    assert outputs[0] == outputs[1]
