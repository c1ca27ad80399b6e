"""SamplingParams: what they refuse, and how they say so."""

import pytest
from errors import expect

from nanovllm import SamplingParams


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(temprature=1), "did you mean 'temperature'"),
        (dict(best_of=2), "SamplingParams has no argument 'best_of'"),
        (dict(temperature=-0.1), "temperature must be a number from 0.0, found -0.1"),
        (dict(temperature="warm"), "found 'warm' (str)"),
        (dict(temperature=float("nan")), "temperature must be a number"),
        (dict(top_p=0), "top_p must be above 0"),
        (dict(top_p=1.5), "top_p must be a number between 0.0 and 1.0, found 1.5"),
        (dict(top_k=2.5), "top_k must be a whole number"),
        (dict(top_k=-2), "top_k must be a whole number from -1"),
        (dict(min_p=2), "min_p must be a number between"),
        (dict(n=0), "n must be a whole number from 1, found 0"),
        (dict(n=True), "found True (bool)"),
        (dict(max_tokens=0), "max_tokens must be a whole number from 1"),
        (dict(max_tokens=3, min_tokens=4), "min_tokens (4) is larger than max_tokens (3)"),
        (dict(stop=""), "empty string"),
        (dict(stop=[1]), "stop must be a list of strings"),
        (dict(stop_token_ids="7"), "stop_token_ids must be a list of ids"),
        (dict(seed=1.5), "seed must be a whole number"),
        (dict(logprobs=-1), "logprobs must be a whole number from 0"),
        (dict(repetition_penalty=0), "repetition_penalty must be above 0"),
        (dict(presence_penalty=3), "presence_penalty must be a number between -2.0 and 2.0"),
        (dict(ignore_eos="yes"), "ignore_eos must be True or False"),
    ],
)
def test_sampling_params(options, text):
    expect(text, SamplingParams, **options)
