"""LLM's public API on a tiny checkpoint."""

import itertools
import math
import os
import random
import signal
import threading
import time

import pytest
from checkpoints import EOS

from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import SequenceStatus

TEXT = "the quick brown fox jumps over the lazy dog"


def sampled(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | options)


def test_every_form_of_a_prompt(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer(TEXT).input_ids
    forms = [TEXT, ids, {"prompt": TEXT}, {"prompt_token_ids": ids}, {"prompt": "shown", "prompt_token_ids": ids}]
    outputs = llm.generate(forms, sampled(temperature=0))
    assert [o.prompt for o in outputs] == [TEXT, None, TEXT, None, "shown"]
    assert all(o.prompt_token_ids == ids for o in outputs)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert len(llm.generate(TEXT, sampled())) == len(llm.generate(ids, sampled())) == 1
    assert llm.generate([]) == []


def test_outputs_are_in_the_callers_order_and_one_params_each(llm):
    prompts = [[i, i + 1, i + 2] for i in (200, 7, 150, 9)]
    outputs = llm.generate(prompts, [sampled(temperature=0, max_tokens=i + 1) for i in range(4)])
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4]
    assert [int(o.request_id) for o in outputs] == sorted(int(o.request_id) for o in outputs)


def test_seed_decides_the_tokens_whatever_else_runs(llm):
    params = sampled(seed=11, temperature=1.5)
    [alone] = llm.generate([TEXT], params)
    crowd = llm.generate([[i + 10, 5] for i in range(9)] + [TEXT], [sampled()] * 9 + [params])
    assert crowd[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    [other] = llm.generate([TEXT], sampled(seed=12, temperature=1.5))
    assert other.outputs[0].token_ids != alone.outputs[0].token_ids


def test_without_a_seed_the_engines_seed_and_the_request_decide(checkpoint):
    def run(seed):
        llm = LLM(str(checkpoint()), num_gpu_blocks_override=64, seed=seed)
        return [o.outputs[0].token_ids for o in llm.generate([TEXT] * 3, sampled(temperature=1.5))]

    assert run(0) == run(0) != run(1)
    assert len({tuple(ids) for ids in run(0)}) == 3


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
    outputs = llm.generate([[i] for i in range(4, 36)], SamplingParams(temperature=20.0, max_tokens=200))
    stopped = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert stopped and {c.token_ids[-1] for c in stopped} == {EOS, 3}
    assert all(c.stop_reason is None for c in stopped)
    params = SamplingParams(temperature=20.0, max_tokens=100, ignore_eos=True)
    assert {o.outputs[0].finish_reason for o in llm.generate([[i] for i in range(4, 36)], params)} == {"length"}


def test_max_tokens_none_fills_max_model_len(llm):
    [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 256 - 3 and output.outputs[0].finish_reason == "length"


def test_logprobs(llm):
    [output] = llm.generate([TEXT], sampled(temperature=1.0, logprobs=2, seed=5))
    completion = output.outputs[0]
    assert len(completion.logprobs) == 12
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert token_id in entries and 2 <= len(entries) <= 3
        assert {entry.rank for entry in entries.values()} >= {1, 2}
        assert entries[token_id].decoded_token == llm.get_tokenizer().decode([token_id], skip_special_tokens=True)
    chosen = [e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(math.fsum(chosen))
    assert llm.generate([TEXT], sampled())[0].outputs[0].logprobs is None


def test_chat_uses_the_template(llm):
    conversation = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    [output] = llm.chat(conversation, sampled())
    assert (
        output.prompt
        == "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert output.prompt_token_ids[0] == 2, "<|im_start|> is one token"
    assert len(llm.chat([conversation, conversation], sampled())) == 2


def test_cache_salt_separates(llm):
    prompt = list(range(40, 60))

    def cached(salt):
        prompt_dict = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        return llm.generate([prompt_dict], sampled())[0].num_cached_tokens

    assert [cached(s) for s in (None, "a", "b", "a", None, "b")] == [0, 0, 0, 19, 19, 19]


def test_what_other_salts_hold_changes_neither_hits_nor_work(llm):
    def work(salts):
        """Per request of salt "a": tokens cached, and tokens computed for it."""
        llm.reset_prefix_cache()
        seen = []
        for salt in salts:
            before = llm.stats()["num_prefill_tokens"]
            prompt = {"prompt_token_ids": list(range(40, 60)), "cache_salt": salt}
            [output] = llm.generate([prompt], sampled(temperature=0, max_tokens=3))
            if salt == "a":
                seen.append((output.num_cached_tokens, llm.stats()["num_prefill_tokens"] - before))
        return seen

    assert work(["a", "a"]) == work(["b", "a", "b", "c", "a"]) == [(0, 20), (19, 1)]


def test_chat_takes_a_salt(llm):
    conversation = [{"role": "user", "content": "two gulls circled above a red boat"}]
    cached = [llm.chat(conversation, sampled(), cache_salt=s)[0].num_cached_tokens for s in ("a", "b", "a", None)]
    assert cached[2] > 0 and cached[:2] == [0, 0] and cached[3] == 0


def test_a_shuffled_retrieval_workload_reuses_what_a_small_pool_allows(checkpoint):
    """12 documents of 20 blocks, 10 questions each, shuffled; the pool holds fewer than three documents."""
    rng = random.Random(0)
    documents = [[rng.randrange(4, 320) for _ in range(80)] for _ in range(12)]
    prompts = [document + [rng.randrange(4, 320) for _ in range(6)] for document in documents for _ in range(10)]
    rng.shuffle(prompts)

    def hits(num_blocks):
        options = dict(block_size=4, num_gpu_blocks_override=num_blocks, max_model_len=96, max_num_seqs=4)
        llm = LLM(str(checkpoint()), **options)
        outputs = llm.generate(prompts, sampled(temperature=0, max_tokens=4))
        assert [o.prompt_token_ids for o in outputs] == prompts
        return llm.stats()["prefix_cache"]["hits"]

    unlimited = hits(12 * 20 + 120 * 3)
    assert unlimited == 12 * 9 * 20
    assert hits(56) >= 0.95 * unlimited


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


def test_metrics_and_stats(llm):
    outputs = llm.generate([TEXT] * 3, sampled(temperature=0, max_tokens=5))
    for output in outputs:
        metrics = output.metrics
        assert 0 <= metrics.queue_time_s <= metrics.ttft_s and metrics.tpot_s > 0 and metrics.num_output_tokens == 5
    num_prompt = len(outputs[0].prompt_token_ids)
    stats = llm.stats()
    shared = num_prompt // 4 * 4
    num_computed = num_prompt + 2 * (num_prompt - shared)
    assert stats["num_prefill_tokens"] == num_computed and stats["num_decode_tokens"] == 3 * 4
    assert stats["num_steps"] == 5 and stats["num_finished_requests"] == 3
    assert stats["prefix_cache"]["hits"] == 2 * (shared // 4)
    assert stats["kv_pool"]["num_referenced_blocks"] == 0 and stats["kv_pool"]["num_cached_blocks"] > 0
    assert llm.reset_prefix_cache() and llm.stats()["kv_pool"]["num_cached_blocks"] == 0


def test_defaults_come_from_generation_config(tmp_path, checkpoint):
    import json
    import shutil

    folder = shutil.copytree(checkpoint(), tmp_path / "model")
    path = folder / "generation_config.json"
    config = json.loads(path.read_text()) | {"temperature": 0.7, "top_k": 5, "max_new_tokens": 9, "do_sample": True}
    path.write_text(json.dumps(config))
    llm = LLM(str(folder), num_gpu_blocks_override=64)
    assert llm.default_sampling_params() == SamplingParams(temperature=0.7, top_k=5, max_tokens=9)
    assert len(llm.generate(TEXT)[0].outputs[0].token_ids) <= 9


# -- what must survive ------------------------------------------------------------------------------------------------


def test_an_exception_in_a_step_leaves_the_llm_usable(llm, monkeypatch):
    expected = llm.generate([TEXT, [5, 6, 7]], sampled(temperature=0))
    llm.reset_prefix_cache()
    run, calls = llm.engine.model_runner.run, 0

    def failing(*work):
        nonlocal calls
        calls += 1
        if calls in (1, 4):
            raise RuntimeError("no memory left")
        return run(*work)

    monkeypatch.setattr(llm.engine.model_runner, "run", failing)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory left"):
            llm.generate([TEXT, [5, 6, 7]], sampled(temperature=0))
        llm.engine.scheduler.check_integrity()
        assert not llm.engine.has_unfinished_requests() and not llm._outputs
    again = llm.generate([TEXT, [5, 6, 7]], sampled(temperature=0))
    assert [o.outputs for o in again] == [o.outputs for o in expected]


def test_ctrl_c_takes_effect_between_steps(llm, monkeypatch):
    run, interrupted_seqs = llm.engine.model_runner.run, []

    def interrupted(*work):
        [seq] = llm.engine.scheduler.running
        if seq.num_generated_tokens == 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # a handler that raised would do so here
            interrupted_seqs.append(seq)
        return run(*work)

    monkeypatch.setattr(llm.engine.model_runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT], sampled())
    [seq] = interrupted_seqs
    assert seq.num_generated_tokens == 5, "the step was finished"
    assert seq.status is SequenceStatus.FINISHED and not llm.engine.has_unfinished_requests()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    assert len(llm.generate([TEXT], sampled())[0].outputs[0].token_ids) == 12


def test_a_second_ctrl_c_interrupts_at_once(llm, monkeypatch):
    def stuck(*work):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("still here")

    monkeypatch.setattr(llm.engine.model_runner, "run", stuck)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT], sampled())
    assert not llm.engine.has_unfinished_requests()


def test_generate_in_another_thread(llm):
    results = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate([TEXT], sampled())))
    thread.start()
    thread.join(30)
    assert len(results) == 1
