"""What vLLM was recorded to do (record_vllm.py), done again by this engine: outputs, prompts of chats, names."""

import copy
import inspect
from pathlib import Path

import pytest

import tests.compat.vllm_cases as cases
from nanovllm import LLM, EngineArgs, LLMEngine, SamplingParams
from nanovllm.checks.values import size_of
from nanovllm.compat import names as vllm_names
from nanovllm.compat import refused as vllm_refused
from nanovllm.features.chat_template.chat import OPTIONS as CHAT_OPTIONS
from nanovllm.features.pooling.params import PoolerConfig, PoolingParams
from nanovllm.features.speculation.speculative_config import SpeculativeConfig
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.openai.openai_request import KNOWN_BY_URL
from nanovllm.serving.openai.pooling import KNOWN_BY_URL as KNOWN_OF_POOLING
from nanovllm.serving.openai.responses.responses_request import READ_HERE
from nanovllm.serving.openai.shown import CHAT
from tests.compat.recorded import RECORDED

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


@pytest.mark.parametrize("name", cases.GENERATE)
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
        ids, other["logprobs"] = ids[:-1], other["logprobs"] and other["logprobs"][:-1]
    assert (sample.text, sample.token_ids) == (other["text"], ids)
    assert (sample.finish_reason, sample.stop_reason) == (other["finish_reason"], other["stop_reason"])
    assert sample.finished()
    assert_same_logprobs(entries(sample.logprobs), other["logprobs"])
    assert_same_logprobs(entries(output.prompt_logprobs), expected["prompt_logprobs"])


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


def surface() -> dict[str, tuple[list[str], set[str], dict]]:
    """For each heading of the page: vLLM's names, ours, and the table of what is refused."""

    def methods(cls: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(cls, callable)}

    def parameters(method) -> set[str]:
        return set(inspect.signature(method).parameters)

    reasons = {name: (reason, ()) for name, reason in vllm_refused.METHODS["vLLM"].items()}
    flags = sorted({*RECORDED["serve_flags"]} - {*RECORDED["engine_args"], "model", "model_tag"})
    our_flags = {*ServeOptions.__dataclass_fields__, "disable_uvicorn_access_log"}
    paths = {path for path in RECORDED["paths"] if "{" not in path}
    instead = {path: (reason, ()) for path, reason in vllm_names.PATHS.items()}
    fields = set().union(*KNOWN_BY_URL.values()) | {"stream", "stream_options", "request_id"}
    tables = vllm_names.TABLES
    no_template = {"chat_template": ("a program of whoever asks", (None,))}
    return {
        "Options of `LLM` and `EngineArgs`": (
            sorted({*RECORDED["engine_args"], "chat_template", "pooler_config"}),
            set(EngineArgs.__dataclass_fields__),
            vllm_names.ENGINE,
        ),
        "`SamplingParams`": (
            RECORDED["sampling_params"],
            set(SamplingParams.__dataclass_fields__),
            vllm_names.SAMPLING,
        ),
        "`StructuredOutputsParams`": (
            RECORDED["structured_outputs"],
            set(StructuredOutputsParams.__dataclass_fields__),
            tables["StructuredOutputsParams"],
        ),
        "`speculative_config`": (
            RECORDED["speculative_config"],
            set(SpeculativeConfig.__dataclass_fields__),
            tables["SpeculativeConfig"],
        ),
        "Methods of `LLM`": (RECORDED["llm"], methods(LLM), reasons),
        "Methods of `LLMEngine`": (RECORDED["llm_engine"], methods(LLMEngine), reasons),
        "Methods of `AsyncLLM`": (RECORDED["async_llm"], methods(AsyncLLM), reasons),
        "Parameters of `generate`": (RECORDED["generate"], parameters(LLM.generate), vllm_names.CALL),
        "Parameters of `AsyncLLM.generate`": (
            RECORDED["async_generate"],
            parameters(AsyncLLM.generate),
            vllm_names.ASYNC_CALL,
        ),
        "Flags of `vllm serve`, beside the options of `LLM`": (flags, our_flags, tables["nanovllm serve"]),
        "Paths of the server": (sorted(paths | {*vllm_names.PATHS}), paths - {*vllm_names.PATHS}, instead),
        "Fields of a request's body": (RECORDED["body"], fields - {*no_template}, vllm_names.BODY | no_template),
        "Fields of a body of `/v1/responses`": (
            cases.RESPONSE_FIELDS,
            {*READ_HERE, *KNOWN_BY_URL[CHAT], "stream", "stream_options", "request_id"}
            - {*tables["body of a response"]},
            vllm_names.BODY | tables["body of a response"],
        ),
        "`PoolingParams`": (cases.POOLING_PARAMS, set(PoolingParams.__dataclass_fields__), tables["PoolingParams"]),
        "`pooler_config`": (cases.POOLER_CONFIG, set(PoolerConfig.__dataclass_fields__), tables["PoolerConfig"]),
        "Fields of a body of `/v1/embeddings`, `/rerank`, `/score` and `/pooling`": (
            cases.POOLING_BODY,
            {"request_id"}.union(*KNOWN_OF_POOLING.values()),
            tables["body of an embedding"],
        ),
        "Parameters of `chat`": (RECORDED["chat"], parameters(LLM.chat) | set(CHAT_OPTIONS), vllm_names.CALL),
    }


def section(heading: str) -> str:
    names, ours, refused = surface()[heading]
    has = [name for name in names if name in ours]
    rows = []
    for name in names:
        if name in refused and name not in ours:
            reason, neutral = refused[name]
            fine = [repr(value) for value in neutral if value is not vllm_names.ANY and value is not None]
            taken = "any value" if vllm_names.ANY in neutral else ", ".join(f"`{value}`" for value in fine) or "`None`"
            rows.append(f"| `{name}` | {taken if neutral else ''} | {reason or 'changes no answer here'} |")
    lacks = [name for name in names if name not in ours and name not in refused]

    def listed(found: list[str]) -> str:
        return ", ".join(f"`{name}`" for name in found) or "nothing"

    table = ["| refused | taken at | another value asks for |", "|---|---|---|", *rows, ""] if rows else []
    if rows and not any(refused[name][1] for name in names if name in refused):
        table = ["| refused | instead |", "|---|---|", *(row.replace(" |  | ", " | ") for row in rows), ""]
    return "\n".join([f"## {heading}", "", f"Has: {listed(has)}.", "", *table, f"Lacks: {listed(lacks)}.", ""])


@pytest.mark.parametrize("heading", surface())
def test_page_says_what_the_code_does(heading):
    """This file prints the section that the page should have."""
    assert section(heading) in PAGE.read_text(encoding="utf-8"), section(heading)
