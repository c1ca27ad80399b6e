"""What a router expects of an engine is what the engine finds, whatever has been evicted, cleared or salted.

The router before a fleet of engines, in virtual time: examples/bench_routing.py in test_examples.py.
"""

import random

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.cache_reports.events import AllBlocksCleared, BlockRemoved, BlockStored
from nanovllm.serving.routing import MAX_ENDED_IDS, Announced, InTurn, Traffic, soonest
from tests.checkpoints import SMALL

SIZE = SMALL["block_size"]
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
A, B = list(range(10, 10 + 8 * SIZE)), list(range(60, 60 + 8 * SIZE))


def stored(block_hashes: list[bytes], medium: str = "GPU") -> BlockStored:
    return BlockStored(block_hashes, None, [0] * SIZE * len(block_hashes), SIZE, None, medium, None)


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
        known = [announced.num_tokens(each, announced.block_hashes_of(prompt, salt)) for each in (0, 1)]
        index = traffic.choose(str(number), prompt, salt, [0, 1])
        expected = known[index]
        assert expected == max(known)
        given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        [output] = engines[index].generate([given], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert output.num_cached_tokens == min(expected, len(prompt) - 1)
        num_found += output.num_cached_tokens
        traffic.ended(str(number))
        if number % 30 == 29:
            assert engines[index].reset_prefix_cache() and not announced.block_hashes[index]
        for each, llm in enumerate(engines):
            manager = llm.engine.scheduler.block_manager
            assert announced.block_hashes.get(each, set()) == manager.hash_to_block.keys()
    assert num_found > 500 and any(llm.stats()["prefix_cache"]["evictions"] for llm in engines)


def test_where_a_prompt_goes():
    traffic = Traffic(SIZE)
    assert traffic.choose("first", A, None, [0, 1]) == 0
    assert traffic.choose("second", B, None, [0, 1]) == 1, "engine 0 has the first to compute"
    assert traffic.loads([0, 1]) == {0: 8 * SIZE, 1: 8 * SIZE}
    traffic.take(0, [stored(traffic.announced.block_hashes_of(A)[:4])])
    assert traffic.loads([0]) == {0: 4 * SIZE}, "half of it is computed"
    traffic.take(0, [stored(traffic.announced.block_hashes_of(A))])
    assert traffic.loads([0]) == {0: 1}, "it is being answered"
    assert traffic.choose("third", A + B, None, [0, 1]) == 0
    assert traffic.loads([0]) == {0: 1 + 8 * SIZE}
    assert traffic.choose("third", A + B, None, [1]) == 1, "it was refused, and counts once"
    assert traffic.loads([0, 1]) == {0: 1, 1: 24 * SIZE}
    for name in ("first", "second", "third", "unknown"):
        traffic.ended(name)
    assert traffic.loads([0, 1]) == {0: 0, 1: 0}
    assert traffic.choose("salted", A, "mine", [1, 0]) == 0, "it is another prompt, and engine 1 had the last one"
    assert traffic.loads([0]) == {0: 8 * SIZE}


def test_a_beginning_that_is_being_computed_counts():
    """A step may take seconds, and its blocks are announced when it has ended."""
    traffic = Traffic(SIZE)
    assert traffic.choose("a", A, None, [0, 1]) == 0
    assert traffic.choose("b", B, None, [0, 1]) == 1
    assert traffic.choose("more of a", A + B, None, [1, 0]) == 0
    assert traffic.choose("more of b", B + A, None, [0, 1]) == 1
    assert traffic.loads([0, 1]) == {0: 16 * SIZE, 1: 16 * SIZE}, "the common beginning is computed once"
    for name in ("a", "more of a"):
        traffic.ended(name)
    assert traffic.announced.num_tokens(0, traffic.announced.block_hashes_of(A)) == 0, "nothing was announced"
    assert not traffic.announced.under_way[0]
    assert traffic.announced.num_tokens(1, traffic.announced.block_hashes_of(B + A)) == 16 * SIZE


def test_a_beginning_that_everybody_asks_for_gets_a_second_home():
    traffic = Traffic(SIZE)
    prompts = [A + [number] * SIZE for number in range(20)]
    chosen = [traffic.choose(str(number), prompt, None, [0, 1]) for number, prompt in enumerate(prompts)]
    assert chosen[0] != chosen[1], "engine 0 has 9 blocks before this prompt; engine 1 has none, and must compute 9"
    assert chosen.count(0) == chosen.count(1) == 10


def test_of_equal_engines_each_has_its_turn():
    """Otherwise new prompts would push each other out of the first one's pool while the others idle."""
    traffic, rng = Traffic(SIZE), random.Random(0)
    chosen = []
    for number in range(9):
        chosen.append(traffic.choose(str(number), rng.choices(range(300), k=2 * SIZE), None, [0, 1, 2]))
        traffic.ended(str(number))
    assert chosen == [0, 1, 2] * 3


def test_in_turn_whoever_comes_and_goes():
    traffic = Traffic(SIZE)
    traffic.use(InTurn())

    def chosen(*engines: int) -> list[int]:
        return [traffic.choose("again", A, None, list(engines)) for _ in engines]

    assert chosen(0, 1, 2) == chosen(0, 1, 2) == [0, 1, 2]
    assert chosen(2, 0) == [0, 2] and sorted(chosen(0, 2, 3)) == [0, 2, 3]


def test_loads_and_beginnings_are_what_counting_anew_gives():
    """The slow twin: from all events and all prompts under way, each time."""
    traffic, rng = Traffic(SIZE), random.Random(3)
    beginnings = [rng.choices(range(300), k=6 * SIZE) for _ in range(4)]
    under_way: dict[str, tuple[int, list[bytes], set[bytes]]] = {}  # what each alone has to compute
    announced: dict[int, set[bytes]] = {0: set(), 1: set(), 2: set()}
    for number in range(600):
        action = rng.random()
        if action < 0.4:
            prompt = rng.choice(beginnings)[: SIZE * rng.randint(0, 6)] + rng.choices(range(300), k=rng.randint(0, 40))
            block_hashes = traffic.announced.block_hashes_of(prompt)
            known = {engine: set(announced[engine]) for engine in announced}
            for engine, others, _ in under_way.values():
                known[engine].update(others)
            found = {}
            for engine in announced:
                found[engine] = next(
                    (i for i, block_hash in enumerate(block_hashes) if block_hash not in known[engine]),
                    len(block_hashes),
                )
                assert traffic.announced.num_tokens(engine, block_hashes) == found[engine] * SIZE
            loads = traffic.loads(announced)
            engine = traffic.choose(str(number), prompt, None, list(announced))
            cost = {each: loads[each] - found[each] * SIZE for each in announced}
            assert cost[engine] == min(cost.values())
            under_way[str(number)] = engine, block_hashes, set(block_hashes[found[engine] :])
        elif under_way and action < 0.7:
            engine, block_hashes, _ = rng.choice(list(under_way.values()))
            announced[engine].update(block_hashes)
            traffic.take(engine, [stored(block_hashes)])
        elif under_way:
            ended = rng.choice(list(under_way))
            traffic.ended(ended)
            del under_way[ended]
        expected = dict.fromkeys(announced, 0)
        for engine, _, own in under_way.values():
            expected[engine] += max(1, SIZE * len(own - announced[engine]))
        assert traffic.loads(announced) == expected


def test_who_has_died_has_nothing():
    traffic = Traffic(SIZE)
    block_hashes = traffic.announced.block_hashes_of(A)
    traffic.take("one", [stored(block_hashes)])
    traffic.take("two", [stored(block_hashes[:2])])
    assert traffic.choose("first", A, None, ["two", "one"]) == "one"
    traffic.forget("one")
    assert traffic.known() == {"two": {"num_blocks": 2, "load": 0}} and not traffic.under_way
    traffic.ended("first")
    traffic.take("one", [stored(block_hashes)])
    assert "one" not in traffic.known(), "an engine that leaves announces blocks while it ends its requests"
    assert traffic.choose("again", A, None, ["two", "three"]) == "two"
    assert traffic.choose("new", B, None, ["three", "one"]) in ("one", "three")
    traffic.take("one", [stored(block_hashes)])
    assert traffic.known()["one"]["num_blocks"] == 8, "it is there again"


def test_who_leaves_before_an_engine_is_chosen_counts_nowhere():
    """Whoever tells of an end need not wait for whoever asks for an engine."""
    traffic = Traffic(SIZE)
    traffic.ended("left")
    assert traffic.choose("left", A, None, [0, 1]) == 0
    assert traffic.choose("refused", A, None, [0, 1]) == 1
    traffic.ended("refused")
    assert traffic.choose("refused", A, None, [0, 1]) == 0
    assert traffic.loads([0, 1]) == {0: 0, 1: 0} and not traffic.under_way
    assert traffic.announced.num_tokens(1, traffic.announced.block_hashes_of(A)) == 0
    assert traffic.choose("stays", A, None, [0]) == 0 and traffic.loads([0]) == {0: 8 * SIZE}
    for number in range(2 * MAX_ENDED_IDS):
        traffic.ended(str(number))
    assert len(traffic.ended_ids) == MAX_ENDED_IDS


def test_what_events_say():
    announced = Announced(SIZE)
    block_hashes = announced.block_hashes_of([*A, 1])
    assert len(block_hashes) == 8 and announced.num_tokens(0, block_hashes) == 0
    announced.take(
        0, [stored(block_hashes), BlockRemoved(block_hashes[5:], "GPU"), BlockRemoved(block_hashes[5:], "GPU")]
    )
    announced.take(1, [stored(block_hashes, medium="disk"), BlockRemoved(block_hashes, "disk")])
    assert announced.num_tokens(0, block_hashes) == 5 * SIZE and announced.num_tokens(1, block_hashes) == 0
    assert soonest(block_hashes, {1: 5 * SIZE - 1, 0: 10 * SIZE}, announced) == 1
    assert soonest(block_hashes, {1: 5 * SIZE, 0: 9 * SIZE}, announced) == 0
    announced.take(0, [BlockRemoved(block_hashes, "disk"), AllBlocksCleared(), stored(block_hashes[:1])])
    assert announced.num_tokens(0, block_hashes) == SIZE
