"""Lifetimes of cached blocks, and hits by tier: with a clock by hand, in stats(), get_metrics() and options."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanovllm import LLM, SamplingParams
from nanovllm.core.block_manager import BlockManager
from nanovllm.features.cache_reports.block_times import BUCKETS, NAMES, BlockTimes
from nanovllm.serving.http.metrics import Metrics
from tests.checkpoints import SMALL
from tests.core.by_hand import admit
from tests.errors import expect


def test_times_of_a_block():
    clock = [0.0]
    manager, times = BlockManager(2, 2), BlockTimes(1.0, lambda: clock[0])
    manager.on_event = times.on_event
    for clock[0] in (0.0, 3.0, 4.5):  # allocated, hit, hit
        manager.free(admit(manager, [1, 2, 3]))
    clock[0] = 64.5
    admit(manager, [7, 8, 9, 9])  # takes both blocks: that of [1, 2] and an uncached one
    lifetime, idle, gap = (times.as_dict()[name] for name in NAMES)
    assert (lifetime["count"], lifetime["sum"]) == (1, 64.5)
    assert (idle["count"], idle["sum"]) == (1, 60.0)
    assert (gap["count"], gap["sum"]) == (1, 1.5)
    assert (idle["buckets"]["30.0"], idle["buckets"]["60.0"], idle["buckets"]["+Inf"]) == (0, 1, 1)
    assert (lifetime["buckets"]["60.0"], lifetime["buckets"]["120.0"]) == (0, 1)
    assert len(gap["buckets"]) == len(BUCKETS) + 1


def test_a_reset_is_no_eviction():
    manager, times = BlockManager(1, 2), BlockTimes(1.0)
    manager.on_event = times.on_event
    manager.free(admit(manager, [1, 2]))
    manager.reset_prefix_cache()
    manager.free(admit(manager, [3, 4]))
    assert times.lifetime.as_dict()["count"] == 0
    admit(manager, [5, 6])
    assert times.lifetime.as_dict()["count"] == 1


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_of_the_blocks_is_measured(share):
    manager, times = BlockManager(1, 1), BlockTimes(share)
    manager.on_event = times.on_event
    for token_id in range(2000):
        manager.free(admit(manager, [token_id]))
    assert abs(times.lifetime.as_dict()["count"] / 1999 - share) < 0.05


def test_an_llm_tells_what_its_cache_does(checkpoint):
    options = SMALL | dict(num_gpu_blocks_override=11, max_model_len=40)
    llm = LLM(str(checkpoint()), **options, kv_cache_metrics=True, kv_cache_metrics_sample=1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for first in (10, 10, 60, 10):
        llm.generate([[first, *range(20 + first, 31 + first)], [5] * 12], params, use_tqdm=False)
    stats = llm.stats()
    assert stats["num_preemptions"] > 0
    cache, times = stats["prefix_cache"], stats["block_times"]
    found = cache["hit_tokens"]["pool"]
    assert found["first"] > 0 and found["again"] > 0
    assert found["first"] + found["again"] == cache["hits"] * 4 and found["again"] == cache["preempted_hits"] * 4
    assert times["kv_block_lifetime_seconds"]["count"] == times["kv_block_idle_before_evict_seconds"]["count"]
    assert 0 < times["kv_block_lifetime_seconds"]["count"] <= cache["evictions"]
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["vllm:prefix_cache_hits"].value == found["first"]
    assert metrics["vllm:prefix_cache_queries"].value == (cache["queries"] - cache["preempted_queries"]) * 4
    for name, measured in times.items():
        histogram = metrics[f"vllm:{name}"]
        assert (histogram.count, histogram.sum, histogram.buckets) == tuple(measured[key] for key in measured)

    text = Metrics(llm.engine, "tiny").text(stats)
    families = text_string_to_metric_families(text)
    samples = {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}
    assert samples["vllm:prefix_cache_hits_total", "0", "tiny"] == found["first"]
    for which, num_tokens in found.items():
        assert samples["nanovllm_prefix_cache_hit_tokens_total", which, "pool"] == num_tokens
    for name, measured in times.items():
        assert samples[f"vllm:{name}_sum", "0", "tiny"] == pytest.approx(measured["sum"])
        for bound, num in measured["buckets"].items():
            assert samples[(f"vllm:{name}_bucket", *sorted(("0", "tiny", bound)))] == num


def test_tiers_have_their_hits(checkpoint):
    options = SMALL | dict(num_gpu_blocks_override=12, max_model_len=40)
    llm = LLM(str(checkpoint()), **options, cpu_cache_bytes=1 << 20)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for first in (10, 60, 110, 10, 10):
        llm.generate([[*range(first, first + 30)]], params, use_tqdm=False)
    stats, metrics = llm.stats(), {metric.name: metric for metric in llm.get_metrics()}
    found = stats["prefix_cache"]["hit_tokens"]
    [medium] = found.keys() - {"pool"}
    assert found[medium] == {"first": 28, "again": 0} and found["pool"] == {"first": 28, "again": 0}
    assert metrics["vllm:prefix_cache_hits"].value == metrics["vllm:external_prefix_cache_hits"].value == 28
    assert metrics["vllm:prefix_cache_queries"].value == 5 * 28
    assert metrics["vllm:external_prefix_cache_queries"].value == 4 * 28


def test_without_the_option_nothing_is_measured(llm, checkpoint):
    assert "block_times" not in llm.stats() and llm.engine.block_times is None
    assert {f"vllm:{name}" for name in NAMES}.isdisjoint(metric.name for metric in llm.get_metrics())
    for share in (0, 1.1, "some"):
        expect("kv_cache_metrics_sample must be", LLM, str(checkpoint()), kv_cache_metrics_sample=share)
