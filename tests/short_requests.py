"""A prompt and parameters for tests in which neither matters."""

from nanovllm import SamplingParams

TEXT = "the quick brown fox jumps over the lazy dog"


def sampled(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | options)
