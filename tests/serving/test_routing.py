"""What a router expects of an engine is what the engine finds, whatever has been evicted, cleared or salted."""

import random

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.cache_reports.events import AllBlocksCleared, BlockRemoved, BlockStored
from nanovllm.serving.routing import Announced, Traffic, soonest
from tests.checkpoints import SMALL

SIZE = SMALL["block_size"]
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
A, B = list(range(10, 10 + 8 * SIZE)), list(range(60, 60 + 8 * SIZE))


def stored(names: list[bytes], medium: str = "GPU") -> BlockStored:
    return BlockStored(names, None, [0] * SIZE * len(names), SIZE, None, medium, None)


@pytest.mark.parametrize("hash_algo", ["xxh64", "sha256"])
def test_two_engines_find_what_they_have_announced(checkpoint, hash_algo):
    options = dict(num_gpu_blocks_override=40, max_model_len=100, prefix_caching_hash_algo=hash_algo)
    engines = [LLM(str(checkpoint()), **SMALL | options, kv_events_config=EVENTS) for _ in range(2)]
    traffic, rng = Traffic(SIZE), random.Random(0)
    traffic.announced = announced = Announced(SIZE, hash_algo)
    for index, llm in enumerate(engines):
        llm.on_kv_events = lambda batch, index=index: traffic.take(index, batch.events)
    beginnings = [rng.choices(range(10, 300), k=6 * SIZE) for _ in range(5)]
    num_found = 0
    for number in range(80):
        prompt = rng.choice(beginnings)[: SIZE * rng.randint(1, 6)] + rng.choices(range(10, 300), k=rng.randint(0, 9))
        salt = rng.choice([None, None, "mine"])
        index = traffic.choose(str(number), prompt, salt, [0, 1])
        expected = announced.num_tokens(index, announced.names_of(prompt, salt))
        assert expected == max(announced.num_tokens(each, announced.names_of(prompt, salt)) for each in (0, 1))
        given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        [output] = engines[index].generate([given], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert output.num_cached_tokens == min(expected, len(prompt) - 1)
        num_found += output.num_cached_tokens
        traffic.ended(str(number))
        if number % 30 == 29:
            assert engines[index].reset_prefix_cache() and not announced.names[index]
        for each, llm in enumerate(engines):
            manager = llm.engine.scheduler.block_manager
            assert announced.names.get(each, set()) == manager.hash_to_block.keys()
    assert num_found > 500 and any(llm.stats()["prefix_cache"]["evictions"] for llm in engines)


def test_where_a_prompt_goes():
    traffic = Traffic(SIZE)
    assert traffic.choose("first", A, None, [0, 1]) == 0
    assert traffic.choose("second", B, None, [0, 1]) == 1, "engine 0 has the first to compute"
    assert traffic.load(0) == traffic.load(1) == 8 * SIZE
    traffic.take(0, [stored(traffic.announced.names_of(A)[:4])])
    assert traffic.load(0) == 4 * SIZE, "half of it is computed"
    traffic.take(0, [stored(traffic.announced.names_of(A))])
    assert traffic.load(0) == 1, "it is being answered"
    assert traffic.choose("third", A + B, None, [0, 1]) == 0
    assert traffic.choose("fourth", A + B, None, [0, 1]) == 0, "8 blocks before it, and it lacks 8"
    assert traffic.choose("fifth", A + B, None, [0, 1]) == 1, "16 before it and 8 that it lacks; there 8 and 16"
    assert traffic.load(1) == 24 * SIZE
    assert traffic.choose("fifth", A + B, None, [0]) == 0, "it was refused, and counts once"
    assert traffic.load(1) == 8 * SIZE
    for name in ("first", "third", "fourth", "fifth", "unknown"):
        traffic.ended(name)
    assert traffic.load(0) == 0
    assert traffic.choose("salted", A, "mine", [1, 0]) == 0 and traffic.load(0) == 8 * SIZE, "it is another prompt"


def test_who_has_died_has_nothing():
    traffic = Traffic(SIZE)
    names = traffic.announced.names_of(A)
    traffic.take("one", [stored(names)])
    traffic.take("two", [stored(names[:2])])
    assert traffic.choose("first", A, None, ["two", "one"]) == "one"
    traffic.forget("one")
    assert traffic.known() == {"two": {"num_blocks": 2, "load": 0}} and not traffic.under_way
    assert traffic.choose("again", A, None, ["two", "three"]) == "two"


def test_what_events_say():
    announced = Announced(SIZE)
    names = announced.names_of([*A, 1])
    assert len(names) == 8 and announced.num_tokens(0, names) == 0
    announced.take(0, [stored(names), BlockRemoved(names[5:], "GPU"), BlockRemoved(names[5:], "GPU")])
    announced.take(1, [stored(names, medium="disk"), BlockRemoved(names, "disk")])
    assert announced.num_tokens(0, names) == 5 * SIZE and announced.num_tokens(1, names) == 0
    assert soonest(names, {1: 5 * SIZE - 1, 0: 10 * SIZE}, announced) == 1
    assert soonest(names, {1: 5 * SIZE, 0: 9 * SIZE}, announced) == 0
    announced.take(0, [BlockRemoved(names, "disk"), AllBlocksCleared(), stored(names[:1])])
    assert announced.num_tokens(0, names) == SIZE
