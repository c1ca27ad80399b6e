"""The last word on correctness: transformers on the same checkpoint, in float32."""

import itertools
import random

import pytest

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


def test_greedy_batch_of_32(every_checkpoint):
    llm = LLM(str(every_checkpoint), dtype="float32", num_gpu_blocks_override=256)
    prompts = make_prompts(32)
    check(llm, every_checkpoint, prompts)  # cold
    hits = llm.engine.block_manager.stats.hits
    check(llm, every_checkpoint, prompts)  # warm: prompts and answers are in the cache now
    assert llm.engine.block_manager.stats.hits > hits


SETTINGS = ["alone", "batch", "tiny budget", "tiny pool"]


@pytest.mark.parametrize(
    ("variant", "setting", "block_size", "caching"),
    [
        *itertools.product(["llama", "mistral-window"], SETTINGS, [1, 4, 16, 256], [True, False]),
        *itertools.product(["smollm3", "qwen2-window", "qwen3-yarn", "qwen3-moe"], SETTINGS, [4, 16], [True]),
    ],
)
def test_greedy_matrix(checkpoint, variant, setting, block_size, caching):
    check_setting(checkpoint(variant), setting, block_size, enable_prefix_caching=caching)


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


def test_answers_are_cached_too(checkpoint):
    """Turn two of a conversation finds turn one's answer: generated tokens fill blocks that are registered."""
    folder = checkpoint("llama")
    llm = LLM(str(folder), dtype="float32", block_size=4, num_gpu_blocks_override=64)
    prompt = make_prompts(2)[1]
    [first] = llm.generate([prompt], greedy())
    turn_two = prompt + first.outputs[0].token_ids + [7, 8, 9]
    [second] = llm.generate([turn_two], greedy())
    assert second.num_cached_tokens >= len(prompt) + NUM_OUTPUT - 4
    assert_greedy(folder, turn_two, second.outputs[0].token_ids)


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["PyTorch", "C"])
@pytest.mark.parametrize("variant", ["mistral-window", "qwen2-window", "smollm3"])
def test_prefixes_much_longer_than_the_window(checkpoint, variant, enforce_eager):
    """Cold and warm give the same, also where most of the prefix lies in front of every window of the new rows."""
    folder, rng = checkpoint(variant), random.Random(7)
    shared = rng.choices(range(4, 320), k=150)
    prompts = [shared + rng.choices(range(4, 320), k=n) for n in (1, 9, 30, 45)]
    options = dict(dtype="float32", block_size=4, max_model_len=224, enforce_eager=enforce_eager)
    llm = LLM(str(folder), **options, num_gpu_blocks_override=68, max_num_batched_tokens=37)
    for _ in ("cold", "warm"):
        check(llm, folder, prompts)
    assert llm.stats()["num_preemptions"] > 0 and llm.engine.block_manager.stats.hits > 150 // 4
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    llm = LLM(str(folder), **options)
    [cold], [warm] = llm.generate([prompts[2]], params), llm.generate([prompts[2]], params)
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens > 170
    for token_id, entry in cold.outputs[0].logprobs[0].items():
        assert abs(warm.outputs[0].logprobs[0][token_id].logprob - entry.logprob) < 1e-4


def test_demo_checkpoint_greedy_tokens(demo_checkpoint):
    """8 prompts, 64 tokens each, on real weights in float32."""
    texts = [
        "The capital of France is",
        "Once upon a time, in a village by the sea,",
        "def fibonacci(n):",
        "The three laws of thermodynamics say that",
        "Q: What is 12 times 12?\nA:",
        "Dear Sir or Madam,",
        "In 1969,",
        "Photosynthesis is the process by which plants use sunlight, water and carbon dioxide to",
    ]
    llm = LLM(str(demo_checkpoint), dtype="float32", max_num_batched_tokens=40, max_model_len=256)
    outputs = llm.generate(texts, greedy(64))
    for text, output in zip(texts, outputs, strict=True):
        assert output.prompt_token_ids == llm.get_tokenizer()(text).input_ids
        assert_greedy(demo_checkpoint, output.prompt_token_ids, output.outputs[0].token_ids)
