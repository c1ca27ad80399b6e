"""Tensor parallelism on gloo ranks: the same tokens, a share of the memory each, and no rank that outlives trouble."""

import math
import os
import random
import re
import signal
import sys
import time

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.parallel import ranks as parallel
from nanovllm.sampling_params import StructuredOutputsParams
from tests.checkpoints import make_checkpoint
from tests.marks import by_night
from tests.processes import LIMIT_S

OPTIONS = dict(dtype="float32", block_size=4, num_gpu_blocks_override=24, max_model_len=64)


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = rng.choices(range(10, 300), k=17)
    return [shared + rng.choices(range(10, 300), k=n) for n in (1, 3, 8, 2)] + [rng.choices(range(10, 300), k=20)]


def tokens_of(llm: LLM) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    random_ones = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=8, repetition_penalty=1.1, logprobs=2)
    outputs = [output for _ in ("cold", "warm") for output in llm.generate(make_prompts(), greedy)]
    outputs += llm.generate(make_prompts()[:2], random_ones)
    assert all(len(entries) >= 2 for output in outputs[-2:] for entries in output.outputs[0].logprobs)
    grammar = StructuredOutputsParams(regex="[a-z]{3}[0-9]{2,9}")
    masked = SamplingParams(temperature=1.0, seed=5, n=2, prompt_logprobs=0, structured_outputs=grammar)
    outputs += llm.generate(make_prompts()[:3], masked)
    for output in outputs[-3:]:
        assert re.fullmatch("[a-z]{3}[0-9]{0,9}", output.outputs[1].text) and len(output.prompt_logprobs) > 17
        assert all(math.isfinite(entry.logprob) for row in output.prompt_logprobs[1:] for entry in row.values())
    return [output.outputs[0].token_ids for output in outputs]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a rank outlived its engine"
        time.sleep(0.1)


@pytest.fixture
def two_ranks(checkpoint, processes):
    llm = processes.llm(checkpoint(), 2, **OPTIONS)
    return llm, [process.pid for process in llm.engine.model_runner._processes]


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        # With a tied table, of which each rank keeps its share.
        ("llama-biases", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        by_night("llama-biases", {}),
        by_night("qwen2", {"num_key_value_heads": 1}),
        *(by_night(variant, {}) for variant in ("qwen3", "mistral-window")),
    ],
)
def test_ranks_give_the_same_tokens_and_hold_a_share_each(tmp_path, processes, variant, sizes):
    folder, size = make_checkpoint(tmp_path, variant, **sizes), 2
    alone, together = LLM(str(folder), **OPTIONS), processes.llm(folder, size, **OPTIONS)
    assert tokens_of(together) == tokens_of(alone)
    stats = together.stats()
    assert stats["num_preemptions"] > 0 and stats["prefix_cache"]["hits"] > 0
    together.engine.scheduler.check_integrity()

    single, config = alone.engine.model_runner, alone.engine.model_config
    whole_names = ("norm", "o_proj.bias", "down_proj.bias")
    replicated = sum(p.nbytes for name, p in single.model.named_parameters() if any(n in name for n in whole_names))
    # Where ranks outnumber KV heads, some hold a copy of the same one.
    num_kv_heads = max(1, config.num_key_value_heads // size)
    num_copies = num_kv_heads * size - config.num_key_value_heads
    num_rows = config.hidden_size + bool(config.qkv_bias)
    copied = 2 * config.num_hidden_layers * num_copies * config.head_dim * num_rows * 4
    for usage in together.engine.model_runner.usage():
        assert usage["weights"] == replicated + (single.weight_bytes - replicated + copied) / size
        assert usage["kv_cache"] == alone.engine.kv_pool.num_bytes * num_kv_heads / config.num_key_value_heads
        assert usage["all_reduced"] > 0

    # Whatever a rank says of its failure, it is the engine's last word. A mistake is the caller's.
    runner, pids = together.engine.model_runner, [process.pid for process in together.engine.model_runner._processes]
    assert len(pids) == size and all(map(is_alive, pids))
    if variant == "qwen2":
        with pytest.raises(FileNotFoundError):
            runner._ask("load", tmp_path / "nowhere")
    else:
        with pytest.raises(RuntimeError, match=r"rank [01] failed: AttributeError"):
            runner._ask("run_packed", "no batch", "no sampling")
    assert not any(map(is_alive, pids))


@pytest.mark.nightly
def test_a_mistake_that_a_rank_finds_is_the_callers(checkpoint, processes):
    with pytest.raises(ValueError, match="does not fit in the KV pool"):
        processes.llm(checkpoint(), 2, **OPTIONS | dict(num_gpu_blocks_override=3))


@pytest.mark.nightly
def test_two_engines_at_once_one_that_is_dropped_and_one_whose_rank_dies(two_ranks, checkpoint, processes):
    other = processes.llm(checkpoint(), 2, **OPTIONS)
    assert tokens_of(two_ranks[0]) == tokens_of(other)
    others = [process.pid for process in other.engine.model_runner._processes]
    del other
    llm, pids = two_ranks
    assert not any(map(is_alive, others)) and all(map(is_alive, pids))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1 died, exit code -9"):
        llm.generate([[5, 6, 7]])
    assert not any(map(is_alive, pids)) and not llm.engine.has_unfinished_requests()
    with pytest.raises(RuntimeError, match="has ended"):
        llm.generate([[5, 6, 7]])


@pytest.mark.nightly
def test_a_rank_that_hangs_ends_the_engine(two_ranks, monkeypatch):
    llm, pids = two_ranks
    monkeypatch.setattr(parallel, "TIMEOUT_S", 5.0)  # the driver's; a rank that lives is heard every 2 s
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="rank 0 hangs"):
        llm.generate([[5, 6, 7]])
    assert not any(map(is_alive, pids))


@pytest.mark.nightly
def test_a_rank_that_hangs_while_much_is_sent(two_ranks, monkeypatch):
    """As of a picture: more than a socket holds."""
    llm, pids = two_ranks
    monkeypatch.setattr(parallel, "TIMEOUT_S", 5.0)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"rank \d hangs"):
        llm.engine.model_runner._ask("get", "x" * 10_000_000)
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("program", "timeout_s", "message"),
    [("exit 3", LIMIT_S, r"rank \d died, exit code"), ("exec sleep 600", 2.0, "rank 0 hangs")],
)
def test_a_rank_that_never_starts(checkpoint, processes, tmp_path, monkeypatch, program, timeout_s, message):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(parallel, "TIMEOUT_S", timeout_s)
    with pytest.raises(RuntimeError, match=message):
        processes.llm(checkpoint(), 2, **OPTIONS)


# No `if __name__ == "__main__"`, as in every script in the wild.
SCRIPT = """
import sys
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, max_model_len=200, block_size=4)
print(*(process.pid for process in llm.engine.model_runner._processes), flush=True)
while True:
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    print("once", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9"])
def test_nothing_outlives_the_driver(checkpoint, processes, tmp_path, how):
    (tmp_path / "script.py").write_text(SCRIPT)
    driver = processes.start(str(tmp_path / "script.py"), str(checkpoint()))
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    try:
        assert len(pids) == 2 and all(map(is_alive, pids)) and driver.stdout.readline() == "once\n"
        os.killpg(driver.pid, signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
        _, errors = driver.communicate(timeout=LIMIT_S)
        assert errors.strip().endswith("KeyboardInterrupt") if how == "Ctrl-C" else not errors
        wait_until_gone(pids)
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
