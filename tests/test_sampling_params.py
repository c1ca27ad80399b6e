"""SamplingParams: what they refuse, and how they say so."""

import numpy as np
import pytest

from nanovllm import SamplingParams
from nanovllm.checks import values as validation
from tests.errors import expect


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(temprature=1), "did you mean 'temperature'"),
        (dict(best_of=2), "SamplingParams takes 'best_of' only as 1 (found 2)"),
        (dict(temperature=-0.1), "temperature must be a number from 0.0, found -0.1"),
        (dict(temperature="warm"), "found 'warm' (str)"),
        (dict(temperature=float("nan")), "temperature must be a number"),
        (dict(top_p=0), "top_p must be a number between 1e-10 and 1.0, found 0"),
        (dict(top_p=1.5), "top_p must be a number between 1e-10 and 1.0, found 1.5"),
        (dict(top_k=2.5), "top_k must be a whole number"),
        (dict(top_k=-2), "top_k must be a whole number from -1"),
        (dict(min_p=2), "min_p must be a number between"),
        (dict(n=0), "n must be a whole number between 1 and 16384, found 0"),
        (dict(n=True), "found True (bool)"),
        (dict(max_tokens=0), "max_tokens must be a whole number from 1"),
        (dict(max_tokens=3, min_tokens=4), "min_tokens (4) is larger than max_tokens (3)"),
        (dict(stop=""), "empty string"),
        (dict(stop=[1]), "stop must be a list of strings"),
        (dict(stop_token_ids="7"), "stop_token_ids must be a list of ids"),
        (dict(seed=1.5), "seed must be a whole number"),
        (dict(logprobs=-2), "logprobs must be a whole number from -1"),
        (dict(repetition_penalty=0), "repetition_penalty must be a number between 1e-10 and 10000000000.0"),
        (dict(presence_penalty=3), "presence_penalty must be a number between -2.0 and 2.0"),
        (dict(ignore_eos="yes"), "ignore_eos must be True or False"),
        (dict(ignore_eos=np.True_), "ignore_eos must be True or False"),
        (dict(top_k=2**63), "top_k must be a whole number between -1 and"),
        (dict(n=None), "n must be a whole number"),
        (dict(seed=10**400), "seed must be a whole number between"),
        (dict(stop_token_ids=[10**400]), "stop_token_ids must be a whole number between"),
        (dict(repetition_penalty=10**25), "repetition_penalty must be a number between 1e-10 and"),
        (dict(repetition_penalty=1e-300), "repetition_penalty must be a number between 1e-10 and"),
        (dict(top_p=1e-50), "top_p must be a number between 1e-10 and"),
        (dict(temperature=1e300), "temperature must be a number between 0.0 and 3.4e+38"),
    ],
)
def test_sampling_params(options, text):
    expect(text, SamplingParams, **options)


def test_numpy_numbers_are_kept_as_plain_ones():
    params = SamplingParams(n=np.int64(2), top_p=np.float32(0.5), seed=np.uint8(3), stop_token_ids=[np.int32(7)])
    assert params == SamplingParams(n=2, top_p=0.5, seed=3, stop_token_ids=[7])
    assert {type(v) for v in (params.n, params.seed, *params.stop_token_ids)} == {int} and type(params.top_p) is float


def test_many_ids_are_looked_at_by_two_of_them(monkeypatch):
    looked_at = []
    real = validation.check_number
    monkeypatch.setattr(validation, "check_number", lambda *given: looked_at.append(given) or real(*given))
    params = SamplingParams(stop_token_ids=[7, 5] * 1000, allowed_token_ids=list(range(50_000)))
    assert params.stop_token_ids == [7, 5] and len(params.allowed_token_ids) == 50_000
    assert len([given for given in looked_at if given[0].endswith("token_ids")]) <= 4
    with pytest.raises(ValueError, match="found -9223372036854775808"):
        SamplingParams(allowed_token_ids=[*range(50_000), -(2**63)])
