"""LLMEngine: seeds, salts, the order of admission, counters, and a step that fails."""

import random
import time

import pytest

from nanovllm import LLM, SamplingParams
from tests.errors import expect
from tests.faults import plant
from tests.short_requests import TEXT, sampled


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


def test_request_id_in_use(llm):
    llm.engine.add_request("x", "a", SamplingParams(), stream=False)
    expect("request id 'x' is already in use", llm.engine.add_request, "x", "b", SamplingParams())
    assert len(llm.engine.scheduler.waiting) == 1
    llm.abort("x")


def test_ids_of_one_call_differ(llm):
    """Chosen twice, or chosen as the number that would come next: nothing is queued, or another number is taken."""

    def make(request_id=None):
        return llm.engine.make_request([5, 6, 7], sampled(max_tokens=1), request_id=request_id)

    expect("request id 'a' is already in use", llm.engine.enqueue, [make("a"), make("a")])
    assert not llm.engine.requests and not llm.engine.scheduler.waiting
    coming = str(llm.engine._next_index + 1)
    ids = llm.engine.enqueue([make(), make(coming), make()])
    assert len(set(ids)) == 3 and ids[1] == coming
    while llm.engine.requests:
        llm.engine.step()


def test_a_token_that_was_taken_back_was_not_the_first(llm, monkeypatch):
    [request_id] = llm.engine.enqueue([request := llm.engine.make_request([5, 6, 7], sampled(max_tokens=2))])
    plant(monkeypatch, llm.engine, "update", [1], after=True)
    with pytest.raises(RuntimeError):
        llm.engine.step()
    failed = time.perf_counter()
    while request_id in llm.engine.requests:
        llm.engine.step()
    assert request.metrics.first_token_time > failed


def test_priorities_change_the_order_and_no_answer(checkpoint):
    prompts, priorities = [[i + 10, 5, 6, 7] for i in range(5)], [3, 0, 2, -1, 2]
    params = sampled(seed=4, max_tokens=3)
    expected = LLM(str(checkpoint())).generate(prompts, params)
    llm = LLM(str(checkpoint()), max_num_seqs=1, scheduling_policy="priority")
    order: list[int] = []
    llm.engine.on_step = lambda output, progressed: order.extend(chunk.seq.tokens[0] - 10 for chunk in output.chunks)
    outputs = llm.generate(prompts, params, priority=priorities)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert list(dict.fromkeys(order)) == [3, 1, 2, 4, 0]
    order.clear()
    for index, priority in enumerate(priorities):
        llm.engine.add_request(f"request {index}", prompts[index], params, priority=priority)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert list(dict.fromkeys(order)) == [3, 1, 2, 4, 0]
    [output] = llm.chat([{"role": "user", "content": "two gulls"}], params, priority=-7)
    assert output.finished
