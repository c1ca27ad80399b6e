"""LLM on a tiny checkpoint: generate, chat, stream, abort."""

import itertools

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import edit
from tests.errors import expect
from tests.short_requests import TEXT, sampled


def test_outputs_are_in_the_callers_order_and_one_params_each(llm):
    prompts = [[i, i + 1, i + 2] for i in (200, 7, 150, 9)]
    outputs = llm.generate(prompts, [sampled(temperature=0, max_tokens=i + 1) for i in range(4)])
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4]
    assert [int(o.request_id) for o in outputs] == sorted(int(o.request_id) for o in outputs)


def test_chat_takes_a_salt(llm):
    conversation = [{"role": "user", "content": "two gulls circled above a red boat"}]
    cached = [llm.chat(conversation, sampled(), cache_salt=s)[0].num_cached_tokens for s in ("a", "b", "a", None)]
    assert cached[2] > 0 and cached[:2] == [0, 0] and cached[3] == 0


def test_stream_grows_and_agrees_with_generate(llm):
    params = sampled(temperature=1.2, seed=4, max_tokens=40)
    [whole] = llm.generate([TEXT], params)
    texts, counts = [], []
    for output in llm.stream(TEXT, params):
        texts.append(output.outputs[0].text)
        counts.append(len(output.outputs[0].token_ids))
    assert output.finished and output.outputs[0].finish_reason == "length"
    assert counts == list(range(1, 41))
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == whole.outputs[0].text


def test_streams_interleave_with_each_other_and_with_generate(llm):
    params = sampled(temperature=0)
    expected = [o.outputs[0].text for o in llm.generate([TEXT, "two gulls"], params)]
    last = [None, None]
    for pair in itertools.zip_longest(llm.stream(TEXT, params), llm.stream("two gulls", params)):
        last = [new or old for new, old in zip(pair, last, strict=True)]
        llm.generate(["in between"], sampled(max_tokens=1))
    assert [output.outputs[0].text for output in last] == expected


def test_a_stream_left_early_is_aborted(llm):
    for output in llm.stream(TEXT, sampled(max_tokens=100)):
        if len(output.outputs[0].token_ids) == 3:
            break
    assert not llm.engine.has_unfinished_requests()
    llm.stream(TEXT, sampled())  # never read: never queued
    assert not llm.engine.has_unfinished_requests()


def test_abort_ends_a_stream(llm):
    outputs = []
    for output in llm.stream(TEXT, sampled(max_tokens=100)):
        outputs.append(output)
        if len(outputs) == 3:
            llm.abort(output.request_id)
    assert len(outputs) == 4 and outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs[-1].outputs[0].token_ids) == 3
    llm.abort("no such request")


def test_defaults_come_from_generation_config(broken):
    edit(broken / "generation_config.json", temperature=0.7, top_k=5, max_new_tokens=9, do_sample=True)
    llm = LLM(str(broken), num_gpu_blocks_override=64)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=5, max_tokens=9)
    assert len(llm.generate(TEXT)[0].outputs[0].token_ids) <= 9


def test_all_bad_prompts_are_listed_and_nothing_is_started(llm):
    with pytest.raises(ValueError) as info:
        llm.generate(["fine", "", [999], "fine too"])
    assert str(info.value).splitlines()[0].startswith("prompts[1]: ")
    assert str(info.value).splitlines()[1].startswith("prompts[2]: ")
    with pytest.raises(ValueError, match="and 80 more"):
        llm.generate([""] * 100)
    everything = SamplingParams(min_tokens=2, stop_token_ids=list(range(320)))
    expect("before min_tokens=2, so many stop_token_ids leave no token", llm.generate, ["a"], everything)
    expect("2 prompts need 2 sampling_params", llm.generate, ["a", "b"], [SamplingParams()])
    expect("must be a SamplingParams, found dict", llm.generate, ["a"], {"temperature": 0})
    expect(
        "a token id of stop_token_ids must be a whole number between 0 and 319",
        llm.generate,
        "a",
        SamplingParams(stop_token_ids=[320]),
    )
    expect("logprobs must be a whole number between 0 and 320", llm.generate, "a", SamplingParams(logprobs=321))
    assert llm.stats()["num_steps"] == 0 and not llm.engine.scheduler.waiting


@pytest.mark.parametrize("options", [dict(), dict(enforce_eager=True)], ids=["C", "PyTorch"])
@pytest.mark.parametrize("variant", ["llama", "mistral-window"])
def test_nan_in_the_cache_reaches_nobody_else(checkpoint, variant, options):
    """Requests beside a token whose keys and values are NaN, before it in a shared prefix, later in its blocks."""
    sizes = dict(block_size=4, num_gpu_blocks_override=40, max_model_len=64)
    llm = LLM(str(checkpoint(variant)), dtype="float32", **sizes, **options)
    greedy, prefix = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), list(range(20, 43))
    sound = [[*prefix, 9], [9, 8], [5]]
    expected = [output.outputs[0].token_ids for output in llm.generate(sound, greedy)]
    assert llm.reset_prefix_cache()
    llm.engine.model_runner.model.embed_tokens.data[7] = torch.nan

    def check(bad: list[list[int]]) -> None:
        outputs = llm.generate(bad + sound, greedy)
        assert [o.outputs[0].finish_reason for o in outputs[: len(bad)]] == ["error"] * len(bad)
        assert [o.outputs[0].token_ids for o in outputs[len(bad) :]] == expected

    check([[*prefix, 7]])  # in one step, with blocks in common
    check([])  # from the cache
    assert llm.reset_prefix_cache()
    check([[7] * 6])  # block 0, with which tables are padded
    check([[7, 3] * 24, [7, 4] * 24, [7, 5] * 24])  # all blocks
    assert llm.reset_prefix_cache()
    check([])  # in the places where NaN was
