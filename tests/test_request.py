"""request.py and outputs.py: a request and its samples, up to the RequestOutput."""

from nanovllm import SamplingParams
from tests.checkpoints import EOS
from tests.short_requests import TEXT, sampled


def test_n_samples_share_the_prompt(llm):
    prompt = list(range(20, 52))
    [output] = llm.generate([prompt], sampled(n=4, seed=3, temperature=1.5))
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert output.num_cached_tokens == 0
    assert llm.stats()["num_prefill_tokens"] == 32 + 3, "the other three compute one token each"
    [again] = llm.generate([prompt], sampled(n=2, seed=3, temperature=1.5))
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs[:2]]


def test_stop_string_and_stop_token(llm):
    [free] = llm.generate([TEXT], sampled(temperature=0, max_tokens=40))
    text, ids = free.outputs[0].text, free.outputs[0].token_ids
    stop = text[10:14]
    [output] = llm.generate([TEXT], sampled(temperature=0, max_tokens=40, stop=["never found", stop]))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text[: text.index(stop)]
    assert completion.token_ids == ids[: len(completion.token_ids)]

    stop_id = ids[7]
    [output] = llm.generate([TEXT], sampled(temperature=0, max_tokens=40, stop_token_ids=[stop_id]))
    completion = output.outputs[0]
    expected = ids[: ids.index(stop_id) + 1]
    assert (completion.finish_reason, completion.stop_reason, completion.token_ids) == ("stop", stop_id, expected)
    assert completion.text == llm.get_tokenizer().decode(expected[:-1], skip_special_tokens=True)


def test_eos_may_be_a_list_and_may_be_ignored(llm):
    assert llm.engine.model_config.eos_token_ids == {EOS, 3}
    # A vocabulary of 320 and a hot distribution: EOS comes soon enough.
    outputs = llm.generate([[i] for i in range(4, 24)], SamplingParams(temperature=20.0, max_tokens=100))
    stopped = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert stopped and {c.token_ids[-1] for c in stopped} == {EOS, 3}
    assert all(c.stop_reason is None for c in stopped)
    params = SamplingParams(temperature=20.0, max_tokens=60, ignore_eos=True)
    assert {o.outputs[0].finish_reason for o in llm.generate([[i] for i in range(4, 24)], params)} == {"length"}


def test_max_tokens_none_fills_max_model_len(llm):
    [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 256 - 3 and output.outputs[0].finish_reason == "length"
