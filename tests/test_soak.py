"""Long runs, off by default: `pytest -m soak -n 0 -s` (shows how far it is)."""

import gc
import json
import os
import random
from collections import Counter

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams
from tests.checkpoints import SIZES

pytestmark = pytest.mark.soak

NUM_REQUESTS, ROUND = 20_000, 1_000
NUM_BLOCKS, MAX_MODEL_LEN = 40, 64
VOCAB_SIZE = SIZES["vocab_size"]
MB = 10**6


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def random_request(rng: random.Random, prefixes: list[list[int]]) -> tuple[dict, SamplingParams]:
    prefix = rng.choice(prefixes)
    prompt = prefix[: rng.randint(0, len(prefix))] + rng.choices(range(4, VOCAB_SIZE), k=rng.randint(1, 8))
    salt = {"cache_salt": rng.choice("ab")} if rng.random() < 0.3 else {}
    options: dict = dict(max_tokens=rng.randint(1, 20), seed=rng.randrange(2**40), temperature=0.0)
    if rng.random() < 0.6:
        options |= dict(temperature=rng.uniform(0.5, 1.5), top_p=rng.choice([1.0, rng.uniform(0.3, 1.0)]))
        options |= dict(top_k=rng.choice([0, rng.randint(1, 50)]), min_p=rng.choice([0.0, rng.uniform(0.0, 0.2)]))
    if rng.random() < 0.3:
        options |= dict(repetition_penalty=rng.uniform(0.8, 1.3), frequency_penalty=rng.uniform(-0.5, 0.5))
    if rng.random() < 0.3:
        options |= dict(stop=rng.sample("aeiou thr", k=2), min_tokens=rng.randint(0, options["max_tokens"]))
    if rng.random() < 0.3:
        options |= dict(stop_token_ids=rng.sample(range(VOCAB_SIZE), k=20), ignore_eos=rng.random() < 0.5)
    if rng.random() < 0.3:
        options["n"] = rng.randint(2, 4)
    if rng.random() < 0.1:
        options["logprobs"] = rng.randint(0, 5)
    return {"prompt_token_ids": prompt, **salt}, SamplingParams(**options)


def assert_same(found: RequestOutput, alone: RequestOutput, is_whole: bool) -> None:
    """An aborted request gives the beginning."""
    for a, b in zip(found.outputs, alone.outputs, strict=True):
        if is_whole:
            assert (a.token_ids, a.logprobs, a.text) == (b.token_ids, b.logprobs, b.text)
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        else:
            assert a.token_ids == b.token_ids[: len(a.token_ids)]


def test_engine(checkpoint):
    """Random requests, aborts and failing steps, in a pool that is always too small."""
    rng, folder = random.Random(0), checkpoint()
    options = dict(block_size=4, max_model_len=MAX_MODEL_LEN, dtype="float32")
    llm = LLM(str(folder), num_gpu_blocks_override=NUM_BLOCKS, max_num_seqs=8, max_num_batched_tokens=24, **options)
    alone = LLM(str(folder), num_gpu_blocks_override=80, enable_prefix_caching=False, **options)
    engine, run, counts = llm.engine, llm.engine.model_runner.run, Counter()
    prefixes = [rng.choices(range(4, VOCAB_SIZE), k=36) for _ in range(6)]

    def failing_run(*work):
        if rng.random() < 0.01:
            counts["failed steps"] += 1
            raise rng.choice([RuntimeError, MemoryError, KeyboardInterrupt])
        result = run(*work)
        if rng.random() < 0.01:  # K/V has been written, and must not be found
            counts["failed steps"] += 1
            raise RuntimeError
        return result

    engine.model_runner.run = failing_run
    flat_from = 0
    for number in range(0, NUM_REQUESTS, ROUND):
        requests = [random_request(rng, prefixes) for _ in range(ROUND)]
        finished: dict[str, RequestOutput] = {}
        ids, in_flight, aborted = [], set(), set()
        while len(finished) < ROUND:
            while len(ids) < ROUND and len(in_flight) < 24:
                prompt, params = requests[len(ids)]
                ids.append(engine.add_request(None, prompt, params, stream=rng.random() < 0.2))
                in_flight.add(ids[-1])
            outputs = []
            if rng.random() < 0.02:
                victim = rng.choice(sorted(in_flight))
                aborted.add(victim)
                outputs = [engine.abort_request(victim)]
                in_flight.remove(victim)
                finished[victim] = outputs[0]
            try:
                outputs = engine.step()
            except (RuntimeError, MemoryError, KeyboardInterrupt):
                outputs = []
            for output in outputs:
                if output.finished:
                    finished[output.request_id] = output
                    in_flight.remove(output.request_id)
            if engine.stats.num_steps % 50 == 0:
                engine.scheduler.check_integrity()
        assert not engine.has_unfinished_requests() and not engine.scheduler.has_unfinished(), "a sequence is stuck"
        assert len(engine.block_manager.free_blocks) == NUM_BLOCKS, "a block is lost"
        engine.scheduler.check_integrity()
        for request_id, (prompt, params) in zip(ids, requests, strict=True):
            [expected] = alone.generate(prompt, params, use_tqdm=False)
            assert_same(finished[request_id], expected, request_id not in aborted)
        counts["aborts"] += len(aborted)
        gc.collect()
        resident = resident_bytes()
        if number + ROUND == NUM_REQUESTS // 4:
            flat_from = resident
        print(
            f"{number + ROUND:,} requests, {engine.stats.num_steps:,} steps, {engine.scheduler.num_preemptions:,} "
            f"preemptions, {engine.block_manager.stats.hit_rate:.0%} hits, {dict(counts)}, {resident / MB:.0f} MB",
            flush=True,
        )
    assert resident - flat_from < 16 * MB, "memory has grown over the last three quarters"
    assert min(counts["aborts"], counts["failed steps"], engine.scheduler.num_preemptions) > 100, "too little happened"


def peak_bytes_of_job(folder, checkpoint, processes, num_lines: int) -> int:
    source, target = folder / f"{num_lines}.jsonl", folder / f"{num_lines}.out"
    rng = random.Random(0)
    with source.open("w") as file:
        for number in range(num_lines):
            body = {"prompt": [5, 6, 7, 8, *rng.choices(range(VOCAB_SIZE), k=3)], "max_tokens": 1}
            request = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(request) + "\n")
    command = ["-m", "nanovllm.tools.cli", "run-batch", "-i", str(source), "-o", str(target)]
    process = processes.start(*command, "--model", str(checkpoint), "--max-model-len", "64", stdout=None, stderr=None)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    with target.open("rb") as file:
        assert sum(1 for _ in file) == num_lines
    target.unlink()
    source.unlink()
    return usage.ru_maxrss * 1024


def test_memory_of_a_batch_job(tmp_path, checkpoint, processes):
    small, large = (peak_bytes_of_job(tmp_path, checkpoint(), processes, num) for num in (1_000, 1_000_000))
    print(f"peak memory: {small / MB:.0f} MB with 1,000 lines, {large / MB:.0f} MB with 1,000,000")
    assert large - small < 100 * MB
