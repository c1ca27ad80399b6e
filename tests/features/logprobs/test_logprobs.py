"""Logprobs of what was chosen and of prompts: in chunks, beside others, after preemption and failed steps."""

import math

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.worker import model_runner
from tests.checkpoints import reference_logits
from tests.errors import expect
from tests.faults import plant, run_to_end
from tests.short_requests import TEXT, sampled, token_logprobs

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(model=str(checkpoint("llama")), dtype="float32", block_size=4, max_num_batched_tokens=7)


def test_logprobs(llm):
    [output] = llm.generate([TEXT], sampled(temperature=1.0, logprobs=2, seed=5))
    completion = output.outputs[0]
    assert len(completion.logprobs) == 12
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert token_id in entries and 2 <= len(entries) <= 3
        assert {entry.rank for entry in entries.values()} >= {1, 2}
        text = llm.get_tokenizer().decode([token_id])
        assert entries[token_id].decoded_token == ("" if text.endswith("\ufffd") else text)
    chosen = [e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(math.fsum(chosen))
    assert llm.generate([TEXT], sampled())[0].outputs[0].logprobs is None


def test_all_logprobs(llm, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    [output] = llm.generate([PROMPT], params)
    assert [len(row) for row in output.outputs[0].logprobs] == [320, 320]
    assert [row and len(row) for row in output.prompt_logprobs] == [None] + [320] * (len(PROMPT) - 1)
    tokenizer, convert, converted = llm.get_tokenizer(), llm.get_tokenizer().convert_ids_to_tokens, []
    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", lambda ids: converted.append(ids) or convert(ids))
    assert llm.generate([PROMPT], params)[0].prompt_logprobs == output.prompt_logprobs
    assert not converted, "texts are known"


def test_logprobs_of_chosen_tokens(llm):
    """Beside requests that ask for the top tokens, or for none: the values and ranks that all of them have."""
    ids = [300, 7, 5]
    params = [SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=ids, ignore_eos=True)]
    params += [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=k) for k in (-1, None, 2)]
    some, every, none, _ = llm.generate([PROMPT] * 4, params)
    assert some.outputs[0].token_ids == every.outputs[0].token_ids and none.outputs[0].logprobs is None
    for chosen, found, all_of_them in zip(
        some.outputs[0].token_ids, some.outputs[0].logprobs, every.outputs[0].logprobs, strict=True
    ):
        assert list(found) == list(dict.fromkeys([chosen, *ids]))
        assert found == {token_id: all_of_them[token_id] for token_id in found}
    assert len(SamplingParams(logprob_token_ids=list(range(128))).logprob_token_ids) == 128
    expect("logprob_token_ids may have 128 tokens, found 129", SamplingParams, logprob_token_ids=list(range(129)))
    expect("logprobs=2 asks for the top tokens", SamplingParams, logprobs=2, logprob_token_ids=ids)
    expect("a token id of logprob_token_ids must be", llm.generate, [PROMPT], SamplingParams(logprob_token_ids=[320]))


def expected_prompt_logprobs(folder, token_ids) -> list[float]:
    logprobs = reference_logits(folder, token_ids).log_softmax(-1)
    return logprobs[range(len(token_ids) - 1), token_ids[1:]].tolist()


def found_prompt_logprobs(output) -> list[float]:
    rows = output.prompt_logprobs
    assert rows[0] is None and len(rows) == len(output.prompt_token_ids)
    return [row[token_id].logprob for row, token_id in zip(rows[1:], output.prompt_token_ids[1:], strict=True)]


def test_prompt_logprobs(llm, checkpoint):
    """In chunks of 7 tokens, beside others, with the prefix in the cache: the same as transformers gives."""
    expected = expected_prompt_logprobs(checkpoint("llama"), PROMPT)
    llm.generate([PROMPT], SamplingParams(max_tokens=1))
    params = [SamplingParams(max_tokens=3, prompt_logprobs=2, n=2, seed=1), SamplingParams(max_tokens=5)]
    for _ in range(2):
        scored, other = llm.generate([PROMPT, PROMPT[:9]], params)
        assert found_prompt_logprobs(scored) == pytest.approx(expected, abs=1e-4)
        assert scored.num_cached_tokens == 0 and other.num_cached_tokens > 0 and other.prompt_logprobs is None
        for row in scored.prompt_logprobs[1:]:
            assert 2 <= len(row) <= 3 and {entry.rank for entry in row.values()} >= {1, 2}
    llm.engine.scheduler.check_integrity()


WHOLE = [5 + i * 7 % 300 for i in range(40)]


def test_a_prompt_of_the_whole_context_is_scored(checkpoint, monkeypatch):
    """Nothing follows it. In chunks, in a pool for one, beside others, through a failed step, in a stream."""
    options = dict(dtype="float32", max_model_len=40, num_gpu_blocks_override=10, block_size=4)
    small = LLM(str(checkpoint("llama")), max_num_batched_tokens=7, **options)
    expected = expected_prompt_logprobs(checkpoint("llama"), WHOLE)
    scoring = SamplingParams(prompt_logprobs=1, max_tokens=0, n=2)
    plant(monkeypatch, small.engine.model_runner, "run", [3])
    ids = [small.engine.add_request(None, WHOLE, scoring), small.engine.add_request(None, WHOLE[:39], sampled())]
    found = run_to_end(small.engine, RuntimeError)
    assert found_prompt_logprobs(found[ids[0]]) == pytest.approx(expected, abs=1e-4)
    assert len(found[ids[1]].outputs[0].token_ids) == 1
    outputs = small.generate([WHOLE, WHOLE[:9], WHOLE[:39]], [scoring, scoring.clone(), sampled()])
    for output, num in zip(outputs, (40, 9, 39), strict=True):
        if num != 39:
            assert found_prompt_logprobs(output) == pytest.approx(expected[: num - 1], abs=1e-4)
            for sample in output.outputs:
                assert (sample.token_ids, sample.text, sample.finish_reason) == ([], "", "length")
    [*_, last] = small.stream(WHOLE, scoring)
    assert last.finished and found_prompt_logprobs(last) == pytest.approx(expected, abs=1e-4)
    expect("has 41 tokens; max_model_len is 40, prompt and output together, so at most 40 fit",
           small.generate, [[*WHOLE, 5]], scoring)  # fmt: skip
    expect("so at most 39 fit", small.generate, [WHOLE], SamplingParams(prompt_logprobs=1))
    small.engine.scheduler.check_integrity()


def test_a_text_of_the_whole_context_is_scored(checkpoint):
    text = " jumps" * 40
    llm = LLM(str(checkpoint("llama")), dtype="float32", max_model_len=40)
    [output] = llm.generate(text, SamplingParams(prompt_logprobs=0, max_tokens=0), use_tqdm=False)
    assert len(output.prompt_token_ids) == 40 == len(output.prompt_logprobs)
    expect("max_tokens must be a whole number from 1, found 0", SamplingParams, max_tokens=0)
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    params.prompt_logprobs = None
    expect("max_tokens must be a whole number from 1, found 0", llm.generate, "x", params)


def test_prompt_logprobs_survive_preemption_and_failed_steps(checkpoint, monkeypatch):
    small = LLM(str(checkpoint("llama")), dtype="float32", max_model_len=40, num_gpu_blocks_override=12, block_size=4)
    expected = expected_prompt_logprobs(checkpoint("llama"), PROMPT)
    params = SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=0)
    ids = [small.engine.add_request(None, PROMPT[i:], params, stream=False) for i in range(3)]
    fault = plant(monkeypatch, small.engine.model_runner, "run", [2])
    outputs = run_to_end(small.engine, RuntimeError)
    assert small.engine.scheduler.num_preemptions > 0 and fault.num_calls > 3
    assert found_prompt_logprobs(outputs[ids[0]]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_a_sample_that_overtakes_the_one_that_scores_the_prompt(checkpoint, kind):
    """The first sample computes all of it, in chunks that the threshold cuts; the second one reuses its blocks."""
    small = LLM(str(checkpoint("llama")), dtype="float32", block_size=4, long_prefill_token_threshold=4)
    params = SamplingParams(n=2, max_tokens=4, temperature=0, prompt_logprobs=0, ignore_eos=True, output_kind=kind)
    outputs = list(small.stream(PROMPT, params))
    seen = [len(output.prompt_logprobs) for output in outputs if output.prompt_logprobs is not None]
    assert set(seen) == {len(PROMPT)} and (kind is RequestOutputKind.CUMULATIVE or len(seen) == 1)
    tokens = [
        sum(len(sample.token_ids) for output in outputs for sample in output.outputs if sample.index == i)
        for i in (0, 1)
    ]
    assert kind is RequestOutputKind.CUMULATIVE or tokens == [4, 4]


def test_prompt_logprobs_of_a_step_that_failed_are_forgotten(llm, monkeypatch):
    plant(monkeypatch, model_runner, "sample_rows", [1])
    params = SamplingParams(prompt_logprobs=0, max_tokens=2)
    with pytest.raises(RuntimeError):
        llm.generate([PROMPT[:6]], params)
    assert llm.generate([[5]], params)[0].prompt_logprobs == [None]


def test_of_equally_likely_tokens_the_first_ones_are_named():
    """In whatever batch: topk alone takes any of them."""
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (40, 3000)).float()  # hundreds of equal ones
    together = token_logprobs(logits, [7] * 40, [3] * 40)
    for row, found in enumerate(together):
        best = logits[row].max()
        assert found.top_token_ids == (logits[row] == best).nonzero().flatten().tolist()[:3]
        assert token_logprobs(logits[row : row + 1], [7], [3]) == [found]
