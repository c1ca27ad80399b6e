"""Who follows the events of the prefix cache holds the hashes that are in the pool, whatever happens."""

import gc
import json
import random
import stat
import weakref
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from nanovllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.block_manager import BlockManager, broadcast
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.tiers.store import BLOCK, STATE, Record
from nanovllm.features.cache_reports import kv_events
from nanovllm.features.cache_reports.kv_events import KVEvents
from nanovllm.features.tiers.memory_store import MemoryStore
from tests import test_interruptions as interruptions
from tests.checkpoints import SMALL
from tests.core.by_hand import CacheModel, admit, compute, fail_step, sequence
from tests.core.tiers.world import BLOCK as BLOCK_SIZE
from tests.core.tiers.world import SlowStore, World
from tests.errors import expect
from tests.faults import Instants

ON = {"enable_kv_cache_events": True, "publisher": "null"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Follower:
    """What a router keeps: {(medium, name): (parent, token ids)}. It checks that no event is of what it cannot know."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, bytes], tuple[bytes | None, list[int]]] = {}

    def __call__(self, batch: KVEventBatch) -> None:
        assert KVEventBatch.from_json(batch.to_json()) == batch
        for event in batch.events:
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                assert parent is None or (event.medium, parent) in self.blocks, "a parent that nobody has heard of"
                for i, name in enumerate(event.block_hashes):
                    self.blocks[event.medium, name] = parent, event.token_ids[i * size : (i + 1) * size]
                    parent = name
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self.blocks.pop((event.medium, name), None)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks.clear()

    @property
    def names(self) -> set[bytes]:
        return {name for _, name in self.blocks}


class Strict(Follower):
    """Nothing is told of twice, or removed before it was stored."""

    def __call__(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            for name in getattr(event, "block_hashes", ()):
                is_known = (event.medium, name) in self.blocks
                assert is_known == isinstance(event, BlockRemoved), event
            super().__call__(KVEventBatch(batch.ts, [event]))


def followed(num_blocks: int, block_size: int, follower, **options) -> tuple[BlockManager, KVEvents]:
    """A block manager, and its events, which the follower is told of."""
    manager = BlockManager(num_blocks, block_size)
    events = KVEvents(manager, **options)
    events.on_batch = follower
    manager.on_event = events.on_event
    return manager, events


def holds(follower: Follower, manager) -> bool:
    """Does it hold exactly what is in the pool?"""
    pool = {name: next(iter(copies.values())) for name, copies in manager.hash_to_block.items()}
    return follower.blocks == {("GPU", name): (b.parent_hash, b.token_ids) for name, b in pool.items()}


class Broken(Exception):
    pass


@pytest.mark.parametrize("seed", range(6))
def test_a_follower_holds_the_hashes_in_the_pool(seed):
    """Random schedules with preemptions, aborts, resets and steps that fail before or after they were computed."""
    rng, model, seen = random.Random(seed), CacheModel(4), {"preempted": 0, "failed": 0, "cleared": 0, "copies": 0}
    follower = Follower()
    manager, _ = followed(14, 4, follower)
    scheduler = Scheduler(manager, max_num_seqs=5, max_num_batched_tokens=16, max_model_len=40)
    for _ in range(1000):
        if rng.random() < 0.3:
            prompt = [*range(rng.choice((0, 4, 9, 17))), *rng.sample(range(90, 94), rng.randint(1, 4))]
            scheduler.add(sequence(prompt, max_tokens=rng.randint(1, 12)))
        if rng.random() < 0.05 and scheduler.seqs:
            scheduler.abort(rng.choice(list(scheduler.seqs)))
        if rng.random() < 0.05 and manager.reset_prefix_cache():
            seen["cleared"] += 1
            assert not follower.blocks
        output = scheduler.schedule()
        seen["preempted"] += len(output.preempted)
        tokens = model.execute(output)
        if rng.random() < 0.02:
            if rng.random() < 0.5:
                scheduler.update(output, tokens)
            fail_step(scheduler, output)
            seen["failed"] += 1
            continue
        scheduler.update(output, tokens)
        seen["copies"] += any(len(copies) > 1 for copies in manager.hash_to_block.values())
        assert holds(follower, manager)
    assert all(seen.values()) and manager.stats.evictions > 0, seen


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_with_tiers_below_the_pool(is_hybrid):
    """What tiers bring back is registered as what is computed, and may be evicted in the same step."""
    rng = random.Random(7)
    world = World(rng, MemoryStore(40 * BLOCK_SIZE), SlowStore(rng, 0.1), 20, is_hybrid, max_num_seqs=4)
    follower = Follower()
    events = KVEvents(world.manager)
    events.on_batch = follower
    world.manager.on_event = broadcast(world.tiers.on_event, events.on_event)
    for _ in range(600):
        if rng.random() < 0.3:
            prompt = [*range(rng.choice((0, 20, 45))), *rng.sample(range(90, 94), rng.randint(1, 4))]
            world.add(prompt, rng.randint(1, 12), cache_salt=rng.choice((None, "pepper")))
        if rng.random() < 0.5:
            world.tiers.disk.deliver()
        fails = rng.choice((None,) * 8 + ("schedule", "compute"))
        world.step(fails)
        assert fails or holds(follower, world.manager)
    assert world.tiers.hit_tokens["disk"] != [0, 0] and world.scheduler.num_preemptions > 0


def test_after_an_exception_out_of_any_line(checkpoint):
    instants = Instants(*interruptions.LINES.files, f"{nanovllm.__path__[0]}/features/cache_reports/")
    options = dict(block_size=interruptions.BLOCK_SIZE, num_gpu_blocks_override=interruptions.NUM_BLOCKS)
    llm = LLM(str(checkpoint()), **options, max_model_len=40, kv_events_config=ON)
    llm.engine.model_runner = interruptions.StandIn(llm.engine.model_config.vocab_size)
    follower = Follower()
    llm.on_kv_events = follower
    lines = instants.of(lambda: interruptions.answers(llm), interruptions.EXECUTIONS)
    for line in random.Random(0).sample(lines, 25):
        with suppress(interruptions.Interrupted):
            instants.interrupt({line}, lambda: interruptions.answers(llm), interruptions.interrupt)
        llm.generate([[7]], GREEDY, use_tqdm=False)
        assert holds(follower, llm.engine.block_manager), f"after an exception at line {line}"


def test_what_a_router_needs(checkpoint, tmp_path):
    """Hashes that it can compute itself, a file that it can read, and no salt."""
    path = tmp_path / "events.jsonl"
    llm = LLM(str(checkpoint()), **SMALL, kv_events_config=ON | {"publisher": "jsonl", "path": path})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "prompts are in it"
    batches: list[KVEventBatch] = []
    llm.on_kv_events = batches.append
    prompt = list(range(10, 22))
    llm.generate([{"prompt_token_ids": prompt, "cache_salt": "pepper"}], GREEDY, use_tqdm=False)
    num_steps = llm.stats()["num_steps"]
    assert 0 < len(batches) <= num_steps
    [stored] = batches[0].events
    names, hasher = [None], BlockHasher(4)
    for i in range(3):
        names.append(hasher.hash_block(names[-1], prompt[i * 4 : i * 4 + 4], (("salt", "pepper"),) if i == 0 else ()))
    assert stored == BlockStored(names[1:], None, prompt, 4, None, "GPU", None, [("salt",), None, None])
    llm.generate([prompt], GREEDY, use_tqdm=False)
    assert batches[-2].events[0].extra_keys is None
    llm.reset_prefix_cache()
    lines = path.read_text().splitlines()
    assert "pepper" not in path.read_text()
    assert [KVEventBatch.from_json(line).events for line in lines] == [
        [AllBlocksCleared()],
        *(batch.events for batch in batches),
    ]
    first = json.loads(lines[1])["events"][0]
    assert first["type"] == "BlockStored" and first["block_hashes"] == [name.hex() for name in names[1:]]
    assert json.loads(lines[-1])["events"] == [{"type": "AllBlocksCleared"}]

    path.unlink()
    path.mkdir()
    assert llm.generate([prompt], GREEDY, use_tqdm=False), "a file that cannot be written to stops nobody"
    assert isinstance(batches[-1].events[0], BlockStored)


@pytest.mark.parametrize("max_events", [kv_events.MAX_EVENTS, 3])
def test_what_a_follower_raises_is_logged_and_told_again(llm, checkpoint, caplog, monkeypatch, tmp_path, max_events):
    """It takes no tokens back. What it would not hear is bounded: then all that is there is told anew.

    Who reads the file hears all of it once.
    """
    monkeypatch.setattr(kv_events, "MAX_EVENTS", max_events)
    prompt = list(range(20))
    [expected] = llm.generate([prompt], GREEDY, use_tqdm=False)
    path = tmp_path / "events.jsonl"
    told = LLM(str(checkpoint()), **SMALL, kv_events_config=ON | {"publisher": "jsonl", "path": path})
    follower = Follower()
    told.on_kv_events = planted = Mock(side_effect=Broken)
    [output] = told.generate([prompt], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert told.stats()["num_steps"] == len(output.outputs[0].token_ids)
    for i in range(20):
        told.generate([[i] * 9], GREEDY, use_tqdm=False)
    assert planted.call_count > 20 and caplog.text.count("which is told of every step, has failed") > 20
    assert max_events > 3 or len(told.engine.kv_events._events) <= 1 + 21, "one for each prompt"
    told.on_kv_events = follower
    told.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert holds(follower, told.engine.block_manager) and len(follower.blocks) >= 5
    reader = Strict()
    for written in path.read_text().splitlines():
        reader(KVEventBatch.from_json(written))
    assert holds(reader, told.engine.block_manager)


def test_what_is_evicted_in_the_step_that_registered_it_is_not_told():
    """Tiers bring blocks in for a sequence that waits; another one may take them before it is admitted."""
    manager, _ = followed(2, 2, follower := Follower())
    seq = admit(manager, [1, 2])
    manager.free(seq)
    admit(manager, [7, 7, 7])
    assert not manager.hash_to_block.keys() & {*seq.block_hashes}
    manager.step_done()
    assert holds(follower, manager) and len(follower.blocks) == 1


def test_a_copy_that_was_not_computed_is_no_copy():
    manager, _ = followed(2, 2, follower := Follower())
    manager.free(admit(manager, [1, 2]))
    manager.step_done()
    again = sequence([1, 2])
    again.scores_prompt = True
    assert manager.allocate_with_prefix(again)
    compute(manager, again)
    admit(manager, [7])  # evicts the first block, while the second is cached, too
    manager.clear()
    assert not manager.hash_to_block and not follower.blocks


def test_adapters_have_their_names():
    batches = []
    manager, _ = followed(4, 2, batches.append, name_of_adapter={3: "sailor"}.get)
    admit(manager, [1, 2, 3, 4], lora_id=3, cache_salt="pepper")
    manager.step_done()
    [stored] = batches[0].events
    assert (stored.lora_id, stored.lora_name, stored.extra_keys) == (3, "sailor", [("salt",), None])


def test_stores_tell_of_theirs():
    manager, events = followed(4, 2, follower := Follower())
    a = Record(b"a" * 32, None, [1, 2], b"\1" * 16)
    b = Record(b"b" * 32, a.block_hash, [3, 4], bytes(16))
    state = Record(b.block_hash, None, (), bytes(16), STATE)
    assert a.kind == BLOCK
    events.listen(store := SimpleNamespace(), "CPU")
    store.on_stored([a, b, state])
    events.take_notes()
    [stored] = events._events
    assert (stored.extra_keys, stored.lora_id, stored.lora_name) == ([("01" * 16,), None], None, None)
    manager.step_done()
    assert follower.blocks == {("CPU", a.block_hash): (None, [1, 2]), ("CPU", b.block_hash): (a.block_hash, [3, 4])}
    store.on_removed([b.key, state.key])
    manager.step_done()
    assert follower.names == {a.block_hash}


def test_a_store_that_gets_children_first():
    """As memory does: the pool evicts the deepest block first. A follower hears of it after its parent."""
    manager, events = followed(4, 2, follower := Strict())
    a, b, c = (Record(x * 32, y and y * 32, [1, 2], bytes(16)) for x, y in ((b"a", None), (b"b", b"a"), (b"c", b"b")))
    memory, disk = SimpleNamespace(), SimpleNamespace()
    events.listen(memory, "CPU")
    events.listen(disk, "DISK")
    memory.on_removed([a.block_hash])  # never told of
    memory.on_stored([c])
    disk.on_stored([a])
    manager.step_done()
    assert [*follower.blocks] == [("DISK", a.block_hash)]
    memory.on_stored([b])
    memory.on_removed([b.block_hash])
    memory.on_stored([a])
    manager.step_done()
    assert ("CPU", c.block_hash) not in follower.blocks and ("CPU", a.block_hash) in follower.blocks
    memory.on_stored([b])
    memory.on_stored([b])
    manager.step_done()
    assert {("CPU", record.block_hash) for record in (a, b, c)} <= follower.blocks.keys()
    manager.clear()
    memory.on_stored([c])
    memory.on_removed([a.block_hash])
    manager.step_done()
    assert not follower.blocks, "after a clear nothing is known"
    memory.on_stored([a, b])
    manager.step_done()
    assert len(follower.blocks) == 3


def test_tiers_of_an_engine(checkpoint, tmp_path):
    """A pool, a memory and a disk that are too small, a restart, and resets of all kinds."""
    rng = random.Random(3)
    options = dict(block_size=4, num_gpu_blocks_override=20, max_model_len=64, max_num_seqs=3, kv_events_config=ON)
    stems = [[*range(10 * i, 10 * i + 18)] for i in range(5, 9)]
    for life in range(2):
        llm = LLM(str(checkpoint()), **options, cpu_cache_bytes=40_000, prefix_cache_dir=tmp_path / "cache")
        llm.on_kv_events = follower = Strict()
        disk, seen = llm.engine.tiers.disk, set()
        for _ in range(30):
            prompts = [[*rng.choice(stems), *rng.choices(range(200), k=rng.randint(1, 9))] for _ in range(3)]
            llm.generate(prompts, GREEDY, use_tqdm=False)
            if rng.random() < 0.15:
                disk.flush()  # or its thread may tell of a block that it has written just now
                assert llm.reset_prefix_cache(reset_connector=rng.random() < 0.3)
                assert not follower.blocks
            seen |= {medium for medium, _ in follower.blocks}
        disk.flush()
        llm.generate([[1, 2]], GREEDY, use_tqdm=False)
        assert seen == {"GPU", "CPU", "DISK"}
        there = {(store, block_hash) for store, block_hash in follower.blocks if store != "GPU"}
        memory = llm.engine.tiers.memory
        assert all((disk if store == "DISK" else memory).may_have(block_hash) for store, block_hash in there)
        assert life == 0 or llm.stats()["tiers"]["disk"]["hit_tokens"] > 0
        disk.close()


def test_a_follower_that_refers_to_its_engine_does_not_keep_it(checkpoint, tmp_path):
    llm = LLM(
        str(checkpoint()), **SMALL, kv_events_config=ON, prefix_cache_dir=tmp_path / "cache", cpu_cache_bytes=40_000
    )
    llm.on_kv_events = lambda batch, llm=llm: None
    llm.generate([[*range(5, 30)]], GREEDY, use_tqdm=False)
    engine = weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert engine() is None


def test_only_who_asks_is_told(llm, checkpoint):
    assert type(llm.engine.block_manager).__name__ == "BlockManager" and llm.on_kv_events is None
    expect("KV events are not gathered", setattr, llm, "on_kv_events", print)
    options = dict(model=str(checkpoint()), **SMALL)
    for config, message in [
        ({"enable_kv_cache_events": True}, "opens no sockets; say 'jsonl'"),
        (ON | {"publisher": "zmq"}, "opens no sockets; say 'jsonl'"),
        (ON | {"publisher": "jsonl"}, "path is the file of publisher 'jsonl'"),
        (ON | {"path": "events"}, "path is the file of publisher 'jsonl'"),
        (ON | {"publisher": "jsonl", "path": 5}, "path must be a file's, found 5"),
        (ON | {"publisher": "jsonl", "path": "/dev/null/no"}, "/dev/null/no cannot be written to: Not a directory"),
        (ON | {"paths": ""}, "did you mean 'path'"),
        (5, "must be a dict or a KVEventsConfig, found 5"),
    ]:
        expect(message, LLM, **options, kv_events_config=config)
    expect("without enable_prefix_caching", LLM, **options, enable_prefix_caching=False, kv_events_config=ON)
