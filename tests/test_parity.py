"""The last word on correctness: transformers on the same checkpoint, in float32."""

import itertools
import random

import pytest

from nanovllm import LLM, SamplingParams
from tests.checkpoints import assert_greedy
from tests.marks import by_night
from tests.parity import NUM_OUTPUT, SETTINGS, check, check_setting, greedy, make_prompts


@pytest.mark.parametrize("num_prompts", [12, by_night(32)])
def test_greedy_batch(every_checkpoint, num_prompts):
    llm = LLM(str(every_checkpoint), dtype="float32", num_gpu_blocks_override=256)
    prompts = make_prompts(num_prompts)
    check(llm, every_checkpoint, prompts)  # cold
    hits = llm.engine.block_manager.stats.hits
    check(llm, every_checkpoint, prompts)  # warm: prompts and answers are in the cache now
    assert llm.engine.block_manager.stats.hits > hits


@pytest.mark.parametrize(
    ("variant", "setting", "block_size", "caching"),
    [
        *itertools.product(["llama"], SETTINGS, [1, 4, 16, 256], [True]),
        *itertools.product(["llama"], SETTINGS, [4], [False]),
        *(by_night(*case) for case in itertools.product(["llama"], SETTINGS, [1, 16, 256], [False])),
        *itertools.product(["mistral-window"], SETTINGS, [1, 4, 16, 256], [True]),
        *itertools.product(["smollm3", "qwen2-window", "qwen3-yarn", "qwen3-moe"], SETTINGS, [4], [True]),
    ],
)
def test_greedy_matrix(checkpoint, variant, setting, block_size, caching):
    check_setting(checkpoint(variant), setting, block_size, enable_prefix_caching=caching)


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


@pytest.mark.parametrize("num_tokens", [12, by_night(64)])
def test_demo_checkpoint_greedy_tokens(demo_checkpoint, num_tokens):
    """Real weights in float32."""
    texts = [
        "The capital of France is",
        "def fibonacci(n):",
        "Q: What is 12 times 12?\nA:",
        "Photosynthesis is the process by which plants use sunlight, water and carbon dioxide to",
    ]
    llm = LLM(str(demo_checkpoint), dtype="float32", max_num_batched_tokens=40, max_model_len=256)
    outputs = llm.generate(texts, greedy(num_tokens))
    for text, output in zip(texts, outputs, strict=True):
        assert output.prompt_token_ids == llm.get_tokenizer()(text).input_ids
        assert_greedy(demo_checkpoint, output.prompt_token_ids, output.outputs[0].token_ids)
