"""What outputs hold while a request runs: in LLMEngine.step() and LLM.stream(). AsyncLLM's: tests/serving."""

from enum import Enum

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.callers.output_kind import RequestOutputKind
from tests.checkpoints import SMALL
from tests.errors import expect
from tests.faults import plant

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint()), **SMALL)


def params(kind, **options) -> SamplingParams:
    return SamplingParams(**dict(max_tokens=14, temperature=0.9, seed=3, ignore_eos=True) | options, output_kind=kind)


def test_values():
    class Theirs(Enum):
        DELTA = 1

    assert SamplingParams().output_kind is RequestOutputKind.CUMULATIVE
    assert SamplingParams(output_kind=Theirs.DELTA) == SamplingParams(output_kind=1)
    for bad in (True, 3, "DELTA", None):
        expect("must be a RequestOutputKind (CUMULATIVE, DELTA, FINAL_ONLY)", SamplingParams, output_kind=bad)


def stepped(llm, *requests) -> dict[str, list]:
    for number, given in enumerate(requests):
        llm.engine.add_request(str(number), PROMPT, given)
    outputs = {str(number): [] for number in range(len(requests))}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            outputs[output.request_id].append(output)
    return outputs


def joined(outputs) -> dict[int, tuple]:
    """What the deltas of each sample come to."""
    parts = {}
    for sample in (sample for output in outputs for sample in output.outputs):
        text, token_ids, logprobs = parts.get(sample.index, ("", [], []))
        parts[sample.index] = text + sample.text, token_ids + sample.token_ids, logprobs + sample.logprobs
    return parts


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"stop": ["a"]}, {"min_tokens": 2, "detokenize": False}])
def test_deltas_of_steps_add_up(llm, options):
    options |= {"logprobs": 2, "prompt_logprobs": 1}
    kinds = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
    found = stepped(llm, *(params(kind, **options) for kind in kinds))
    *_, whole = found["0"]
    assert joined(found["1"]) == joined([whole])
    assert len(found["1"]) > 1 and found["1"][-1].finished
    assert [output.prompt_logprobs is None for output in found["1"]] == [False] + [True] * (len(found["1"]) - 1)
    reasons = [sample.finish_reason for output in found["1"] for sample in output.outputs]
    assert len([reason for reason in reasons if reason]) == options.get("n", 1), "each sample ends once"
    [only] = found["2"]
    assert joined([only]) == joined([whole]) and only.finished


@pytest.mark.compiler
def test_a_step_that_fails_loses_nothing(llm, monkeypatch):
    [whole] = stepped(llm, params(RequestOutputKind.FINAL_ONLY, logprobs=0))["0"]
    llm.engine.add_request("x", PROMPT, params(RequestOutputKind.DELTA, logprobs=0))
    outputs = llm.engine.step() + llm.engine.step()

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="planted"):
        plant(patch, llm.engine, "update", {1}, RuntimeError("planted"), after=True)
        llm.engine.step()
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert joined(outputs) == joined([whole])


def test_stream_and_generate(llm):
    [whole] = llm.generate([PROMPT], params(RequestOutputKind.DELTA, logprobs=0))
    assert len(whole.outputs[0].token_ids) == 14
    assert joined(llm.stream(PROMPT, params(RequestOutputKind.DELTA, logprobs=0))) == joined([whole])
    [only] = llm.stream(PROMPT, params(RequestOutputKind.FINAL_ONLY, logprobs=0))
    assert only.outputs == whole.outputs


def test_leaving_a_stream_of_deltas_frees_its_blocks(llm):
    growing = llm.stream(PROMPT, params(RequestOutputKind.DELTA))
    next(growing)
    growing.close()
    assert not llm.engine.has_unfinished_requests()
