"""What vLLM was recorded to do (record_vllm.py), done again by this engine: outputs, prompts of chats, names."""

import copy
import json
from pathlib import Path

import pytest
import vllm_cases as cases

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.validation import size_of

RECORDED = json.loads((Path(__file__).parent / "vllm_recorded.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def llm(demo_checkpoint):
    return LLM(str(demo_checkpoint), dtype="float32", max_model_len=512, max_num_seqs=4, block_size=32)


def entries(logprobs):
    if logprobs is None:
        return None
    return [row and {t: (e.logprob, e.rank, e.decoded_token) for t, e in row.items()} for row in logprobs]


def assert_same_logprobs(ours, theirs):
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or [], theirs or [], strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert set(map(str, mine)) == set(other)
            for token_id, (logprob, rank, text) in mine.items():
                expected, expected_rank, expected_text = other[str(token_id)]
                assert (rank, text) == (expected_rank, expected_text)
                assert logprob == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("name", cases.GENERATE)
def test_outputs(llm, name):
    prompt, given = cases.GENERATE[name]
    expected = RECORDED["outputs"][name]
    given = {"temperature": 0.0, "max_tokens": 8, **given}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    [output] = llm.generate([prompt], SamplingParams(**given), use_tqdm=False)
    if given["temperature"] > 0:  # other random numbers
        return
    [sample], [other] = output.outputs, expected["samples"]
    ids = other["token_ids"]
    if "structured_outputs" in given:
        # A grammar that allows nothing but EOS ends the sequence here; there, one more step samples EOS.
        assert ids[-1] == cases.IM_END and other["finish_reason"] == "stop"
        ids, other["logprobs"] = ids[:-1], other["logprobs"] and other["logprobs"][:-1]
    assert (sample.text, sample.token_ids) == (other["text"], ids)
    assert (sample.finish_reason, sample.stop_reason) == (other["finish_reason"], other["stop_reason"])
    assert sample.finished()
    assert_same_logprobs(entries(sample.logprobs), other["logprobs"])
    assert_same_logprobs(entries(output.prompt_logprobs), expected["prompt_logprobs"])


@pytest.mark.parametrize("name", cases.CHAT)
def test_prompts_of_chats(llm, name):
    messages, options = cases.CHAT[name]
    before = copy.deepcopy(messages)
    assert llm.chat_prompt(messages, **options)["prompt"] == RECORDED["prompts"][name]
    assert messages == before


@pytest.mark.parametrize("text", cases.LENGTHS)
def test_lengths(text):
    assert size_of("max_model_len", text) == RECORDED["lengths"][text]
