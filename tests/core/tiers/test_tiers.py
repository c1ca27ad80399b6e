"""What tiers bring back is what was computed, whatever happens meanwhile; and a prompt is computed only once."""

import random
from collections import deque

import pytest

from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.tiers import MAX_FETCHES, MAX_POLLED
from nanovllm.features.tiers.memory_store import MemoryStore
from tests.core.by_hand import fail_step
from tests.core.tiers.world import BLOCK, SlowStore, World

PROMPT = list(range(100, 100 + 9 * BLOCK + 2))
OTHER = list(range(500, 500 + 23 * BLOCK))


def evict(world: World) -> None:
    """Fill the pool with something else."""
    world.add(OTHER)
    world.run()
    assert world.manager.hash_to_block


@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_an_evicted_prompt_comes_back(tier, is_hybrid):
    rng = random.Random(0)
    store = SlowStore(rng) if tier == "disk" else MemoryStore(1000)
    world = World(rng, **{tier: store}, is_hybrid=is_hybrid)
    world.add(PROMPT)
    world.run()
    evict(world)
    before = world.num_computed
    seq = world.add(PROMPT)
    world.run()
    assert seq.num_cached_tokens == 9 * BLOCK
    assert world.num_computed - before == 2 + 3, "the tail, then a token a step"
    assert world.tiers.hit_tokens[tier] == [9 * BLOCK, 0]


def test_others_are_admitted_while_blocks_are_on_their_way():
    world = World(random.Random(0), disk=SlowStore(random.Random(0)))
    world.add(PROMPT)
    world.run()
    evict(world)
    seq, other = world.add(PROMPT), world.add([1, 2, 3])
    world.step()
    assert world.scheduler.running == [other] and [*world.scheduler.waiting] == [seq]
    world.step()
    assert [*world.scheduler.waiting] == [seq], "nothing has come yet"
    world.tiers.disk.deliver()
    world.step()
    assert seq in world.scheduler.running and seq.num_cached_tokens == 9 * BLOCK


def test_a_chain_is_read_once_for_all_who_wait_for_it():
    world = World(random.Random(0), disk=SlowStore(random.Random(0)))
    world.add(PROMPT)
    world.run()
    evict(world)
    seqs = [world.add([*PROMPT, i]) for i in range(3)]
    world.step()
    assert len(world.tiers.disk.promised) == 1
    world.tiers.disk.deliver()
    world.step()
    assert [seq.num_cached_tokens for seq in seqs] == [9 * BLOCK] * 3


def test_what_has_come_twice_is_counted_once():
    """A sequence that runs evicts what has come for one that waits, which then asks for it again."""
    world = World(random.Random(0), disk=SlowStore(random.Random(0)), max_num_seqs=1)
    world.add(PROMPT)
    world.run()
    evict(world)
    world.add([1, 2, 3], max_tokens=80)
    seq = world.add(PROMPT)
    world.run()
    assert seq.num_cached_tokens == 9 * BLOCK == sum(map(sum, world.tiers.hit_tokens.values()))


def test_nothing_to_compute_and_nothing_on_its_way():
    world = World(random.Random(0), disk=SlowStore(random.Random(0)))
    assert not world.tiers.wait(0.0)
    world.add(PROMPT)
    world.run()
    evict(world)
    world.add(PROMPT)
    world.step()
    assert world.tiers.wait(0.0)


def test_an_aborted_sequence_leaves_nothing_behind():
    world = World(random.Random(0), disk=SlowStore(random.Random(0)))
    world.add(PROMPT)
    world.run()
    evict(world)
    seq = world.add(PROMPT)
    world.step()
    world.scheduler.abort(seq.seq_id)
    world.step()
    assert not world.tiers.wait(0.0)
    world.tiers.disk.deliver()
    assert len(world.manager.free_blocks) == len(world.manager.blocks)


def test_the_more_important_are_not_held_up_by_those_who_fetch():
    """All fetches that there may be at once are of sequences that are not looked at any more: others came before."""
    world = World(random.Random(0), disk=SlowStore(random.Random(0)), num_blocks=24)
    prompts = [[*range(1000 * i, 1000 * i + 2 * BLOCK), 7] for i in range(1, MAX_FETCHES + 1)]
    for prompt in prompts:
        world.add(prompt)
    world.run()
    evict(world)
    for prompt in prompts:
        world.add(prompt, priority=1)
    world.step()
    assert len(world.tiers.disk.promised) == MAX_FETCHES and not world.scheduler.running
    for i in range(MAX_POLLED + 1):
        world.add([1, 2, 3, i], priority=0)
    world.tiers.disk.deliver()
    for _ in range(200):
        world.step()
        world.tiers.disk.deliver()
    assert not world.scheduler.has_unfinished(), "nobody is admitted, though nothing is on its way"


class Unending(deque):
    """A queue of which a step looks at a few: there may be a hundred thousand in it."""

    def __iter__(self):
        yield from list(super().__iter__())[:MAX_POLLED]
        raise AssertionError("looked through")


@pytest.mark.parametrize("reason", ["seats", "tokens", "blocks", "fetches"])
def test_a_step_that_can_admit_nobody_does_not_look_through_the_queue(reason):
    limits = {"seats": {"max_num_seqs": 1}, "tokens": {"max_num_batched_tokens": 1}}
    world = World(random.Random(0), disk=SlowStore(random.Random(0)), **limits.get(reason, {}))
    world.add(PROMPT)
    world.run()
    evict(world)
    running = world.add(range(700, 700 + 22 * BLOCK) if reason == "blocks" else [1, 2, 3], max_tokens=9)
    while running.num_generated_tokens == 0:
        world.step()
    for i in range(MAX_POLLED + 1):
        world.add([*PROMPT, i])
    queue = world.scheduler.waiting
    world.scheduler.waiting = Unending(queue)
    world.scheduler.candidates = world.tiers.poll(world.scheduler.waiting)
    assert [chunk.seq for chunk in world.scheduler.schedule().chunks] == [running]
    num_asked = 0 if reason == "blocks" else 1
    assert len(world.tiers.disk.promised) == num_asked, "blocks for which there is room are read ahead"


def test_who_waits_for_a_seat_is_looked_up_once(monkeypatch):
    """Not in each step, as long as nothing is on its way to it."""
    world = World(random.Random(0), disk=SlowStore(random.Random(0)), max_num_seqs=1, num_blocks=40)
    world.add(PROMPT)
    world.add(OTHER)
    world.run()
    running = world.add([1, 2, 3], max_tokens=50)
    waiting = [world.add(prompt) for prompt in (PROMPT, OTHER)]
    looked_up, look_up = [], world.manager.get_computed_blocks
    monkeypatch.setattr(world.manager, "get_computed_blocks", lambda seq: looked_up.append(seq) or look_up(seq))
    while len(running.tokens) < 40:
        world.step()
        world.tiers.disk.deliver()
    assert len(looked_up) < 10
    world.run()
    assert [seq.num_cached_tokens for seq in waiting] == [9 * BLOCK, 23 * BLOCK - 1]


def test_who_could_not_ask_is_looked_up_again():
    """It came when as many fetches as there may be were on their way, and all seats were taken."""
    world = World(random.Random(0), disk=SlowStore(random.Random(0)), max_num_seqs=1, num_blocks=60)
    prompts = [[*range(1000 * i, 1000 * i + 4 * BLOCK), 7] for i in range(1, MAX_FETCHES + 2)]
    for prompt in prompts:
        world.add(prompt)
    world.add(range(10_000, 10_000 + 58 * BLOCK))
    world.run()
    world.add([1, 2, 3], max_tokens=60)
    world.step()
    for prompt in prompts[1:]:
        world.add(prompt, priority=1)
    world.step()
    first = world.add(prompts[0], priority=0)
    world.step()
    for _ in range(20):
        world.tiers.disk.deliver()
        world.step()
    assert not first.awaits_blocks


def test_blocks_whose_parent_is_not_kept_are_not_offered():
    class SmallStore(SlowStore):
        def put(self, records, read):
            super().put(records[:2], read)  # which asserts that their parents are there

    world = World(random.Random(0), disk=SmallStore(random.Random(0)), max_num_batched_tokens=4 * BLOCK)
    world.add(PROMPT)
    world.run()
    assert len(world.tiers.disk.kept) == 2


def test_those_who_were_not_looked_at_are_not_admitted():
    world = World(random.Random(0), disk=SlowStore(random.Random(0)), num_blocks=80, max_num_seqs=80)
    seqs = [world.add([1, i]) for i in range(MAX_POLLED + 3)]
    world.step()
    assert len(world.scheduler.running) == 16, "as many as the budget of 32 tokens allows"
    world.scheduler.max_num_batched_tokens = 300
    world.step()
    assert world.scheduler.running == seqs, "the others have been looked at now"
    many = [world.add([2, i]) for i in range(MAX_POLLED + 3)]
    world.step()
    assert [*world.scheduler.waiting] == many[MAX_POLLED:], "nobody has searched the tiers for these"


def test_what_is_not_delivered_is_computed():
    world = World(random.Random(0), disk=SlowStore(random.Random(0), loses=1.0))
    world.add(PROMPT)
    world.run()
    evict(world)
    seq = world.add(PROMPT)
    world.run()
    assert seq.num_cached_tokens == 0


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens(seed):
    """Shared prompts, a small pool, preemption, failing steps, requests that leave, resets, stores that lose things."""
    rng = random.Random(seed)
    disk = SlowStore(rng, loses=0.1) if seed % 4 != 3 else None
    memory = MemoryStore(40 * BLOCK) if seed % 4 != 2 else None
    world = World(rng, memory, disk, num_blocks=20, is_hybrid=seed % 2 == 1)
    stems = [[rng.randrange(50) for _ in range(rng.randrange(4, 30))] for _ in range(4)]
    keys = [{}, {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_id": 1}]
    for _ in range(400):
        action = rng.random()
        if action < 0.35 and len(world.scheduler.waiting) < 6:
            stem = rng.choice(stems)
            tail = [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
            world.add(stem[: rng.randrange(1, len(stem) + 1)] + tail, rng.randrange(1, 20), **rng.choice(keys))
        elif action < 0.4 and world.scheduler.seqs:
            world.scheduler.abort(rng.choice([*world.scheduler.seqs]))
        elif action < 0.41:
            fail_step(world.scheduler)
            assert world.manager.reset_prefix_cache()
        elif action < 0.5 and disk is not None:
            disk.deliver()
        else:
            world.step(fails=rng.choice([None] * 12 + ["schedule", "compute"]))
    if disk is not None:
        disk.deliver()
    world.run()
    hits = world.tiers.hit_tokens
    assert all(sum(tokens) > 0 for tokens in hits.values()), hits
    assert any(again for _, again in hits.values()) or world.scheduler.num_preemptions == 0, hits


def test_hashes_hold_in_every_process_and_tell_everything_apart():
    numbers = {1: "weights a", 2: "weights b", 7: "weights a"}

    def block_hash(*, tokens=(1, 2, 3), **options):
        manager = BlockManager(16, BLOCK)
        manager.hasher = BlockHasher(BLOCK, "sha256", numbers.__getitem__)
        seq = Sequence([*range(40, 40 + BLOCK), *tokens, 9][: 2 * BLOCK], **options)
        manager.hash_block(seq, 0)
        return manager.hash_block(seq, 1)[0]

    known = [
        block_hash(),
        block_hash(tokens=(1, 2, 4)),
        block_hash(cache_salt="a"),
        block_hash(cache_salt="b"),
        block_hash(lora_id=1),
        block_hash(lora_id=2),
        block_hash(lora_id=1, cache_salt="a"),
        block_hash(mm_spans=((5, 2, "an image"),)),
        block_hash(mm_spans=((5, 2, "another"),)),
    ]
    assert len({*known}) == len(known)
    assert block_hash(lora_id=7) == block_hash(lora_id=1), "a number is this process's, the weights are the same"
    written = "2ef11dce2a41df98392341323f0a7c63"
    assert block_hash(cache_salt="a").hex()[:32] == written, "a directory of an earlier process is found again"
