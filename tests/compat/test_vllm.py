"""What vLLM was recorded to do (record_vllm.py), done again by this engine: outputs, prompts of chats, names."""

import copy
import inspect
from collections.abc import Collection
from pathlib import Path

import pytest

import tests.compat.vllm_cases as cases
from nanovllm import LLM, SamplingParams
from nanovllm.checks.names import neutral_options
from nanovllm.checks.values import size_of
from nanovllm.config import EngineConfig
from nanovllm.features.beam_search.params import BeamSearchParams
from nanovllm.features.cache_reports.kv_events_config import KVEventsConfig
from nanovllm.features.callers.profile import ProfilerConfig
from nanovllm.features.chat_template.chat import OPTIONS as CHAT_OPTIONS
from nanovllm.features.lora.lora_request import LoRARequest
from nanovllm.features.pooling.params import PoolerConfig, PoolingParams
from nanovllm.features.pooling.requests import Truncation
from nanovllm.features.speculation.speculative_config import SpeculativeConfig
from nanovllm.prompts import PROMPT_KEYS
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.openai.openai_request import KNOWN_BY_URL
from nanovllm.serving.openai.pooling import KNOWN_BY_URL as KNOWN_OF_POOLING
from nanovllm.serving.openai.responses.responses_request import PASSED_ON, READ_HERE
from nanovllm.serving.openai.shown import CHAT
from tests.compat.recorded import RECORDED
from tests.marks import by_night

PAGE = Path(__file__).parents[2] / "examples" / "move_to_vllm.md"


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
                assert text == expected_text
                assert abs(rank - expected_rank) <= expected_rank / 500, "a thousand ranks behind, many are level"
                assert logprob == pytest.approx(expected, abs=2e-3)


# Neighbours of cases that are left by day.
REPEATED = [f"min_tokens={n}, a stop token" for n in (1, 4, 5)] + [f"min_tokens={n}, a stop string" for n in (1, 2, 5)]
REPEATED += [f"cut after {n} tokens of emojis" for n in range(1, 6)]


@pytest.mark.parametrize("name", [by_night(name) if name in REPEATED else name for name in cases.GENERATE])
def test_outputs(llm, name):
    prompt, given = cases.GENERATE[name]
    expected = RECORDED["outputs"][name]
    given = {"temperature": 0.0, "max_tokens": 8, **given}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    [output] = llm.generate([prompt], SamplingParams(**given), use_tqdm=False)
    if given["temperature"] > 0:  # other random numbers
        assert [len(sample.token_ids) for sample in output.outputs] == [
            len(s["token_ids"]) for s in expected["samples"]
        ]
        return
    [sample], [other] = output.outputs, expected["samples"]
    ids = other["token_ids"]
    if "structured_outputs" in given:
        # A grammar that allows nothing but EOS ends the sequence here; there, one more step samples EOS.
        assert ids[-1] == cases.IM_END and other["finish_reason"] == "stop"
        ids = ids[:-1]
        if "logprobs" in other:
            other["logprobs"] = other["logprobs"][:-1]
    assert (sample.text, sample.token_ids) == (other["text"], ids)
    assert (sample.finish_reason, sample.stop_reason) == (other["finish_reason"], other.get("stop_reason"))
    assert sample.finished()
    assert_same_logprobs(entries(sample.logprobs), other.get("logprobs"))
    assert_same_logprobs(entries(output.prompt_logprobs), expected.get("prompt_logprobs"))


def test_cached_tokens(llm):
    """A prompt whose logprobs are asked for is computed anew, and those after it find its blocks all the same."""
    names = ["a long prompt", "a long prompt again", "a long prompt again, prompt_logprobs"]
    llm.reset_prefix_cache()
    for name in names:
        prompt, given = cases.GENERATE[name]
        [output] = llm.generate([prompt], SamplingParams(temperature=0.0, **given), use_tqdm=False)
        assert output.num_cached_tokens == RECORDED["outputs"][name]["cached"]


@pytest.mark.parametrize("name", cases.CHAT)
def test_prompts_of_chats(llm, name):
    messages, options = cases.CHAT[name]
    before = copy.deepcopy(messages)
    assert llm.chat_prompt(messages, **options)["prompt"] == RECORDED["prompts"][name]
    assert messages == before


@pytest.mark.parametrize("text", cases.LENGTHS)
def test_lengths(text):
    assert size_of("max_model_len", text) == RECORDED["lengths"][text]


def parameters(method) -> set[str]:
    return {name for name, p in inspect.signature(method).parameters.items() if p.kind is not p.VAR_KEYWORD} - {"self"}


# What errors call it -> what it takes.
TAKEN: dict[str, Collection[str]] = {
    "LLM": EngineConfig.__dataclass_fields__,
    "SamplingParams": SamplingParams.__dataclass_fields__,
    "StructuredOutputsParams": StructuredOutputsParams.__dataclass_fields__,
    "BeamSearchParams": BeamSearchParams.__dataclass_fields__,
    "PoolingParams": PoolingParams.__dataclass_fields__,
    "PoolerConfig": PoolerConfig.__dataclass_fields__,
    "SpeculativeConfig": SpeculativeConfig.__dataclass_fields__,
    "LoRARequest": LoRARequest.__dataclass_fields__,
    "ProfilerConfig": ProfilerConfig.__dataclass_fields__,
    "KVEventsConfig": KVEventsConfig.__dataclass_fields__,
    "a prompt": {*PROMPT_KEYS, "multi_modal_data", "mm_processor_kwargs"},
    "tokenization_kwargs": Truncation.__dataclass_fields__,
    "generate": parameters(LLM.generate),
    "chat": parameters(LLM.chat) | {*CHAT_OPTIONS},
    "AsyncLLM.generate": parameters(AsyncLLM.generate),
    "nanovllm serve": {*ServeOptions.__dataclass_fields__},
    "body": set().union(*KNOWN_BY_URL.values()) | {"stream", "stream_options", "request_id"},
    "body of a response": READ_HERE | (KNOWN_BY_URL[CHAT] & PASSED_ON) | {"stream", "stream_options", "request_id"},
    "body of an embedding": {"request_id"}.union(*KNOWN_OF_POOLING.values()),
}


@pytest.mark.parametrize("what", TAKEN)
def test_the_page_lists_what_is_taken(what):
    line = f"- {what}: {', '.join(f'`{name}`' for name in sorted(TAKEN[what]))}\n"
    assert line in PAGE.read_text(encoding="utf-8"), f"the page should have the line\n{line}"


@pytest.mark.parametrize("what", RECORDED["names"])
def test_every_name_of_vllms_is_taken_at_some_value(what):
    ours = {*TAKEN[what], "chat_template", "disable_uvicorn_access_log", "model"}
    missing = {*RECORDED["names"][what].split()} - ours - neutral_options(what).keys()
    assert not missing
