"""Prompts and parameters for tests in which they do not matter, or in which the answer is given."""

import torch

from nanovllm import SamplingParams

TEXT = "the quick brown fox jumps over the lazy dog"


def sampled(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | options)


def saying(answer: list[int]) -> SamplingParams:
    """The answer has these tokens."""

    def say(generated: list[int], row: torch.Tensor) -> torch.Tensor:
        row[answer[len(generated)]] = torch.inf
        return row

    return SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True, logits_processors=[say])
