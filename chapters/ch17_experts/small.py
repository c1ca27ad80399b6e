"""What both exercises are tried in at the end: the lab's model with random weights, in the engine."""

from functools import cache
from typing import Any

from chapters.ch17_experts.sparse import load_sparse
from chapters.expect import expect
from chapters.grading import Bench
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.features.experts import layer, rows

PROMPTS = ["12 + 30 = ", "the keeper mends the ", "if(x[i]<j){", "1 + 1 = 2; the gull", "x"]
OUR_FORWARD = layer.Experts.forward


@cache
def sparse_engine() -> LLM:
    return load_sparse(0)


def answers(prompts: list[str] = PROMPTS) -> list[list[int]]:
    llm = sparse_engine()
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@cache
def expected_answers() -> list[list[int]]:
    with replaced(layer.Experts, "forward", OUR_FORWARD), replaced(layer, "kernels_for", rows.kernels_for):
        return answers()


def check_generates(function: Any, bench: Bench) -> None:
    """The engine generates with a model of three layers of experts: the same tokens"""
    for prompt, expected, got in zip(PROMPTS, expected_answers(), answers(), strict=True):
        expect(expected, got, f"the model with experts answers {prompt!r} with different tokens")
