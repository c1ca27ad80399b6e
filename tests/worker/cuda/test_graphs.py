"""CUDA graphs of decode steps, with a stand-in for the recording where there is no GPU."""

import random

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.worker.cuda import graphs as cuda_graphs
from nanovllm.worker.cuda.graphs import DecodeGraphs
from tests.features.speculation.test_speculation import OPTIONS, assert_same, generate, hostile, random_requests


def recorded_on_cpu(forward, pool):
    """Like cuda_graphs.record: the result stays in one place, and replay() computes it from the buffers once more."""
    result = forward()
    return lambda: result.copy_(forward()), result, pool


def test_decode_graphs_compute_what_single_launches_do(checkpoint, monkeypatch):
    """Batches of 1 to 11, which lie on, between and beyond the sizes that were recorded; padding writes nothing."""
    monkeypatch.setattr(cuda_graphs, "record", recorded_on_cpu)
    monkeypatch.setattr(cuda_graphs, "LADDER", [1, 2, 4, 8])
    options = dict(dtype="float32", block_size=4, num_gpu_blocks_override=120, max_num_seqs=11, max_model_len=64)
    plain, graphed = LLM(str(checkpoint()), **options), LLM(str(checkpoint()), **options)
    runner = graphed.engine.model_runner
    with torch.inference_mode():
        graphs = DecodeGraphs(runner.forward, 8, 64, 4, runner.device)
    assert not runner.kv_cache.data.any(), "recording wrote to the cache"
    replayed = []

    def run(batch):
        logits = graphs_run(batch)
        replayed.append((batch.max_query_len, len(batch.seqlens_k), logits is not None))
        return logits

    graphs_run, graphs.run = graphs.run, run
    runner._graphs = graphs
    rng = random.Random(0)
    prompts = [rng.choices(range(10, 300), k=rng.randint(3, 20)) for _ in range(11)]
    params = [SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True) for i in range(11)]
    expected, found = plain.generate(prompts, params), graphed.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    torch.testing.assert_close(runner.kv_cache.data, plain.engine.model_runner.kv_cache.data, atol=1e-5, rtol=0)
    assert {size for _, size, was_replayed in replayed if was_replayed} == set(range(1, 9))
    assert all(was_replayed == (rows == 1 and size <= 8) for rows, size, was_replayed in replayed)


def test_a_step_with_guesses_is_launched_and_decodes_around_it_are_replayed(checkpoint, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "record", recorded_on_cpu)
    requests = random_requests(random.Random(4), 8)
    expected = generate(LLM(str(checkpoint()), **OPTIONS), requests)
    llm = LLM(str(checkpoint()), **OPTIONS)
    hostile(llm, expected, seed=1)
    runner = llm.engine.model_runner
    with torch.inference_mode():
        graphs = DecodeGraphs(runner.forward, 6, 96, 4, runner.device)
    kinds, run = set(), graphs.run

    def noted(batch):
        logits = run(batch)
        kinds.add((batch.max_query_len > 1, logits is not None))
        return logits

    graphs.run, runner._graphs = noted, graphs
    assert_same(generate(llm, requests), expected)
    assert kinds == {(True, False), (False, True)} and llm.stats()["num_accepted_tokens"] > 10
