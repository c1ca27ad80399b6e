"""Quantizing is a function of the checkpoint: two loads give equal codes, and equal answers (chapter 12)."""

from itertools import product

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import SMALL, VARIANTS

PLAIN = [("llama", "bfloat16"), ("qwen3-moe", "bfloat16")]
WITH_EXPERTS = ("qwen3.5-moe", "qwen3-next")  # hybrid models; those without experts are for the night
DTYPES, BITS = ("bfloat16", "float16", "float32"), ("int4", "int8")


def crossed():
    """Models that keep parameters in float32, in int4, and two others; by night everything."""
    for variant, dtype, bits in product(VARIANTS, DTYPES, BITS):
        keeps_float32 = variant in WITH_EXPERTS and dtype == "bfloat16"
        is_quick = bits == "int4" and (keeps_float32 or (variant, dtype) in PLAIN)
        yield pytest.param(variant, dtype, bits, marks=[] if is_quick else pytest.mark.nightly)


@pytest.mark.parametrize(("variant", "dtype", "bits"), list(crossed()))
def test_two_loads_are_equal(checkpoint, variant, dtype, bits):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    buffers, answers = [], []
    for _ in range(2):
        llm = LLM(str(checkpoint(variant)), dtype=dtype, quantization=bits, **SMALL)
        model = llm.engine.model_runner.model
        buffers.append({name: x.clone() for name, x in (*model.named_buffers(), *model.named_parameters())})
        (output,) = llm.generate([[5, 6, 7, 8, 9]], params, use_tqdm=False)
        answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    first, second = buffers
    assert first.keys() == second.keys() and len(first) > 0
    assert [name for name, x in first.items() if not torch.equal(x, second[name])] == []
    assert answers[0] == answers[1]
