"""Greedy answers of an engine beside those of transformers."""

import random

from nanovllm import LLM, SamplingParams
from tests.checkpoints import assert_greedy

NUM_OUTPUT = 16


def greedy(num_tokens: int = NUM_OUTPUT) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def make_prompts(num: int, seed: int = 0) -> list[list[int]]:
    """Mixed lengths, multiples of the block sizes among them, half of them with a common beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(4, 320) for _ in range(24)]
    lengths = [1, 2, 4, 8, 15, 16, 17, 32, 33, 48]
    prompts = []
    for i in range(num):
        prompt = [rng.randrange(4, 320) for _ in range(lengths[i % len(lengths)])]
        prompts.append(shared + prompt if i % 2 else prompt)
    return prompts


def check(llm: LLM, folder, prompts: list[list[int]]) -> None:
    outputs = llm.generate(prompts, greedy())
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert len(answer) == NUM_OUTPUT
        assert_greedy(folder, prompt, answer)
    llm.engine.scheduler.check_integrity()
    assert len(llm.engine.block_manager.free_blocks) == len(llm.engine.block_manager.blocks)


SETTINGS = ["alone", "batch", "tiny budget", "tiny pool"]


def check_setting(folder, setting: str, block_size: int, **options) -> None:
    """A batch, cold and warm, in a small engine of this kind."""
    options |= dict(
        dtype="float32", block_size=block_size, max_model_len=96, num_gpu_blocks_override=4096 // block_size
    )
    if setting == "tiny budget":
        options |= dict(max_num_batched_tokens=5, max_num_seqs=8)
    if setting == "tiny pool":
        options["num_gpu_blocks_override"] = -(-96 // block_size) + (1 if block_size == 256 else 20 // block_size)
    llm, prompts = LLM(str(folder), **options), make_prompts(10)
    for _ in ("cold", "warm"):
        for batch in [[prompt] for prompt in prompts[:4]] if setting == "alone" else [prompts]:
            check(llm, folder, batch)
    stats, cache = llm.stats(), llm.engine.block_manager.stats
    if setting == "tiny pool" and block_size < 256:
        assert stats["num_preemptions"] > 3
    if setting == "tiny budget":
        assert stats["num_steps"] > stats["num_prefill_tokens"] / 5
    if not options.get("enable_prefix_caching", True):
        assert cache.queries == 0
    elif block_size < 256:
        assert cache.hits > 0
