"""How the exercises of chapter 7 are graded. Hashes have a file of their own, and so do the larger trials."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from chapters.ch07_prefix_caching.checks_of_hashes import HASHES, use_hash
from chapters.ch07_prefix_caching.checks_of_tiers import TIERS
from chapters.ch07_prefix_caching.trials import (
    TRIALS,
    admit,
    cached,
    extend,
    listed,
    pool,
    prepared,
    refs,
    state,
    worked_example,
    wrong_text,
)
from chapters.expect import Wrong, ensure, expect, expect_answer, expect_sane
from chapters.grading import Bench, Task
from chapters.patching import our_engine, replaced, yours_to_write
from chapters.stage import Stage, compare_with_ours
from nanovllm.core.block_hash import BlockHasher, ExtraKeys
from nanovllm.core.block_manager import BlockManager, Content
from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.cache import SnapshotCache

# -- allocate_with_prefix ---------------------------------------------------------------------------------------------


def allocates_fresh(allocate: Any, bench: Bench) -> None:
    """nothing is found: all blocks are fresh"""
    manager, seq = pool(6), Sequence(list(range(10)))
    expect_answer(True, allocate(manager, seq), "when 3 blocks are needed and 6 are free")
    expect([0, 1, 2], seq.block_table, "10 tokens need 3 blocks of 4, taken from the head of the queue")
    expect([1, 1, 1, 0, 0, 0], refs(manager), "the reference counts are wrong: take_fresh_blocks sets them")
    expect((0, 0), (seq.num_cached_tokens, seq.num_computed_tokens), "nothing was found, nothing is computed yet")
    expect([3, 4, 5], list(manager.free_blocks), "the free queue must have lost the blocks that were taken")
    expect_sane(manager)


def allocates_hits_in_use(allocate: Any, bench: Bench) -> None:
    """a prefix that another sequence is using"""
    manager = pool(8)
    admit(manager, range(10))
    seq = Sequence([*range(10), 77, 78, 79])
    expect_answer(True, allocate(manager, seq), "when two blocks are found and two fresh ones are free")
    expect_found(manager, seq, [0, 1, 3, 4], 8, "the first 10 of 13 tokens are as before; they fill blocks 0 and 1")
    expect([2, 2, 1, 1, 1, 0, 0, 0], refs(manager), "the reference counts are wrong: each hit has one more reference")
    expect([5, 6, 7], list(manager.free_blocks), "the free queue must have lost only the fresh blocks")
    expect_sane(manager)


def expect_found(manager: BlockManager, seq: Sequence, table: list[int], num_cached: int, why: str) -> None:
    expect(table, seq.block_table, f"the block table is wrong. {why}")
    hint = f"num_cached_tokens is wrong. {why}"
    if seq.num_cached_tokens == len(seq.tokens):
        hint = "nothing is left to compute, so there are no logits to sample from: all but the last token at most"
    expect(num_cached, seq.num_cached_tokens, hint)
    expect(
        num_cached, seq.num_computed_tokens, "num_computed_tokens must be num_cached_tokens: what is found is computed"
    )
    hits = -(-num_cached // 4)
    expect(hits, seq.num_registered_blocks, "num_registered_blocks is the number of hits: they have hashes already")


def allocates_hits_in_the_queue(allocate: Any, bench: Bench) -> None:
    """the blocks of a prefix that nobody is using leave the free queue"""
    manager = pool(8)
    first, second = admit(manager, range(10)), admit(manager, range(50, 59))
    manager.free(second)
    manager.free(first)  # the queue is 2 5 6 7 4 3 1 0
    seq = Sequence([*range(10), 77, 78, 79])
    expect_answer(True, allocate(manager, seq), "when two blocks are found and six others are free")
    expect_found(manager, seq, [0, 1, 2, 5], 8, "Blocks 0 and 1 are found, 2 and 5 are at the head of the queue")
    expect([1, 1, 1, 0, 0, 1, 0, 0], refs(manager), "the reference counts are wrong: each hit has one more reference")
    hint = "hits must leave the free queue, and nothing else may move: what stays in it will be given away again"
    expect([6, 7, 4, 3], list(manager.free_blocks), hint)
    expect_sane(manager)


def allocates_a_cached_prompt(allocate: Any, bench: Bench) -> None:
    """a prompt that is cached to its last token"""
    manager = pool(8)
    first = admit(manager, range(8))
    for when in ("in use", "free"):
        seq = Sequence(list(range(8)))
        expect_answer(True, allocate(manager, seq), f"for a prompt whose blocks are all cached and {when}")
        why = "All 8 tokens are found in blocks 0 and 1; the last one is computed again, and its block stays a hit"
        expect_found(manager, seq, [0, 1], 7, why)
        expect_sane(manager)
        manager.free(seq)
        if first.block_table:
            manager.free(first)


def allocates_all_or_nothing(allocate: Any, bench: Bench) -> None:
    """what just fits is taken, what does not fit changes nothing"""
    manager = pool(4)
    first = admit(manager, range(8))
    seq = Sequence([*range(8), 1, 2, 3, 4, 5])  # two hits in use, two fresh ones: they just fit
    when = "when 2 fresh blocks are needed and 2 are free: hits in use cost nothing"
    expect_answer(True, allocate(manager, seq), when)
    manager.free(seq)
    seq = Sequence([*range(8), *range(20, 29)])  # two hits in use, three fresh
    refuse(allocate, manager, seq, "when 2 blocks are found, 3 fresh ones are needed and 2 are free")
    manager.free(first)
    when = "when 3 fresh ones are needed and 4 are free, of which 2 are the hits: don't count these twice"
    refuse(allocate, manager, seq, when)
    manager.free(admit(manager, range(50, 58)))  # the queue is 1 0 2 3 or 1 0 3 2
    seq = Sequence([*range(8), *range(20, 28)])
    when = "when 2 fresh blocks are needed and 4 are free, of which 2 are the hits"
    expect_answer(True, allocate(manager, seq), when)
    hint = "the hits 0 and 1 were at its head: take them out before fresh ones are popped, or they are taken twice"
    expect([0, 1, 2, 3], [*seq.block_table[:2], *sorted(seq.block_table[2:])], hint)
    expect_sane(manager)


def refuse(allocate: Any, manager: BlockManager, seq: Sequence, when: str) -> None:
    before = state(manager, seq)
    with suppress(AssertionError):  # of an empty queue
        expect_answer(False, allocate(manager, seq), when)
        for name, value in state(manager, seq).items():
            hint = f"it said False, but the {name} changed. Count first: touch nothing until you know that it all fits"
            expect(before[name], value, hint)
        return
    raise Wrong(f"the answer should be False {when}. Instead it took blocks until the free queue was empty")


def allocates_after_preemption(allocate: Any, bench: Bench) -> None:
    """a sequence that comes back finds its own blocks, and starts from them"""
    manager = pool(8)
    seq = admit(manager, range(11))
    manager.free(seq)
    seq.num_computed_tokens, seq.num_cached_tokens, seq.hash_collision = 0, 0, True
    seq.num_registered_blocks, seq.tokens = 2, [*seq.tokens, 5, 6]
    other = admit(manager, [90] * 20)  # takes 2 3 4 5 6
    third = admit(manager, [91] * 8)  # and this 7 and 1
    refuse(allocate, manager, seq, "for a sequence that was preempted, when 4 blocks are needed and 1 is free")
    manager.free(third)
    manager.free(other)
    expect_answer(True, allocate(manager, seq), "for a sequence that was preempted")
    why = "Of its own blocks, 0 is still cached; 1 was taken by others"
    expect(4, seq.num_cached_tokens, f"num_cached_tokens is wrong. {why}")
    expect(1, seq.num_registered_blocks, "num_registered_blocks must be set again: one hit, whatever it was before")
    expect(False, seq.hash_collision, "hash_collision must be set again: there was no collision this time")
    expect_sane(manager)


def allocates_without_caching(allocate: Any, bench: Bench) -> None:
    """with caching off, nothing is hashed and nothing is counted"""
    manager = pool(8, caching=False)
    for _ in range(2):
        seq = Sequence(list(range(8)))
        seq.num_registered_blocks = 2
        expect_answer(True, allocate(manager, seq), "when caching is off and blocks are free")
        found = (seq.num_cached_tokens, seq.num_registered_blocks)
        expect((0, 0), found, "caching is off: num_cached_tokens and num_registered_blocks are 0")
    expect([4, 5, 6, 7], list(manager.free_blocks), "caching is off: each of the two sequences takes two fresh blocks")
    expect(0, manager.stats.queries, "caching is off, so stats.record must not be called")


def allocates_and_counts(allocate: Any, bench: Bench) -> None:
    """the statistics: full blocks asked for, hits, misses"""
    manager = pool(8)
    rows = (range(10), 2, 0), ([*range(8), 1, 2, 3, 4, 5], 5, 2), (range(3), 5, 2), (range(8), 7, 4)
    for tokens, queries, hits in rows:
        manager.free(admit(manager, tokens))
        got = {name: getattr(manager.stats, name) for name in ("queries", "hits", "misses")}
        hint = "stats.record(queries, hits, collisions): queries are all full blocks of seq.tokens, hits those found"
        expect(dict(queries=queries, hits=hits, misses=queries - hits), got, hint)


class Colliding(BlockHasher):
    """A hash is the last digit of the first token id."""

    def hash_block(self, parent_hash: Any, token_ids: Any, extra_keys: ExtraKeys = ()) -> bytes:
        return bytes([token_ids[0] % 10])


def colliding_pool() -> BlockManager:
    manager = pool(12)
    manager.hasher = Colliding(4)
    return manager


def allocates_on_collision(allocate: Any, bench: Bench) -> None:
    """a hash that stands for different content is not a hit"""
    manager = colliding_pool()
    admit(manager, [2, 2, 2, 2, 1, 1, 1, 1, 5])
    hint = "the hash is the same, but the content is not: that is no hit, and the search ends. Ask block.holds(content)"
    seq = Sequence([12, 12, 12, 12, 1, 1, 1, 1, 5])
    expect_answer(True, allocate(manager, seq), "when 3 fresh blocks are needed and 9 are free")
    expect([3, 4, 5], seq.block_table, hint)
    expect((0, True), (seq.num_cached_tokens, seq.hash_collision), f"num_cached_tokens, hash_collision: {hint}")
    expect(1, manager.stats.collisions, "one collision goes into the statistics: the third argument of stats.record")
    others: tuple[dict[str, Any], ...] = (dict(cache_salt="a"), dict(lora_id=1))
    for keys in others:
        seq = Sequence([2, 2, 2, 2, 5], **keys)
        expect_answer(True, allocate(manager, seq), "when 2 fresh blocks are needed and more are free")
        expect((0, True), (seq.num_cached_tokens, seq.hash_collision), f"{keys} makes it different content: {hint}")
    seq = Sequence([12, 12, 12, 12, *[1] * 8])
    refuse(allocate, manager, seq, "after a collision, when 3 fresh blocks are needed and 2 are free")


def allocates_one_of_two_copies(allocate: Any, bench: Bench) -> None:
    """two copies of a block: the first of them serves"""
    manager = pool(8)
    one, two = admit(manager, [1, 2, 3]), admit(manager, [1, 2, 3])
    for seq in (two, one):
        extend(manager, seq, 4)
    manager.free(one)  # block 0; block 1 was registered first and is still in use
    seq = Sequence([1, 2, 3, 4, 5])
    expect_answer(True, allocate(manager, seq), "when one block is found and others are free")
    expect([1, 2], seq.block_table, "blocks 1 and 0 have one hash; the first in hash_to_block[block_hash] is 1")
    expect([0, 2, 1], refs(manager)[:3], "the reference counts of blocks 0, 1, 2: only the copy that is a hit gets one")
    expect_sane(manager)


# -- of a hybrid model ------------------------------------------------------------------------------------------------


def hybrid_pool(num_blocks: int, snapshots_after: tuple[int, ...], max_running: int = 4) -> BlockManager:
    """range(16) is cached in blocks 0 to 3, which nobody uses, with snapshots after some of them."""
    manager = pool(num_blocks)
    with our_engine():
        manager.free(admit(manager, range(16)))
    manager.snapshots = make_snapshots(manager, max_running)
    for index in snapshots_after:
        block_hash = manager.blocks[index].block_hash
        assert block_hash is not None
        manager.snapshots.add(block_hash, manager.snapshots.free_slots.pop(), is_wanted=True)
    return manager


def make_snapshots(manager: BlockManager, max_running: int) -> SnapshotCache:
    snapshots = SnapshotCache(max_running=max_running, max_snapshots=4)
    snapshots.on_event = manager._emit_snapshot
    return snapshots


DEEPEST = "the last hit is the deepest block found after which there is a snapshot"
ONE_LEFT = "one token must be left to be computed, and a state can't give one back: the hits end before the last token"


def allocates_from_a_snapshot(allocate: Any, bench: Bench) -> None:
    """a hybrid model: what is found ends in a snapshot, or is no hit"""
    for snapshots_after, num_tokens, num_hits, hint in (
        ((1,), 20, 2, DEEPEST),
        ((0, 2), 20, 3, DEEPEST),
        ((), 20, 0, "there is no snapshot: the model begins with the first token, whatever K and V there are"),
        ((3,), 20, 4, DEEPEST),
        ((1, 3), 16, 2, ONE_LEFT),
        ((3,), 17, 4, DEEPEST),
        ((3,), 16, 0, ONE_LEFT),
    ):
        manager, seq, told = hybrid_pool(12, snapshots_after), Sequence(list(range(num_tokens))), list[int]()
        with replaced(
            manager.snapshots,
            "allocate",
            lambda seq, num_matched_tokens, block_size: told.append(num_matched_tokens),  # noqa: B023
        ):
            expect_answer(True, allocate(manager, seq), "when there is room for all of it")
        where = f"{num_tokens} tokens; the first 16 are in blocks 0 to 3, with snapshots after {[*snapshots_after]}"
        expect(4 * num_hits, seq.num_cached_tokens, f"num_cached_tokens: {hint} ({where})")
        expect(4 * num_hits, seq.num_computed_tokens, f"num_computed_tokens: {hint} ({where})")
        expect([*range(num_hits)], seq.block_table[:num_hits], f"the hits: {hint} ({where})")
        expect(-(-num_tokens // 4), len(seq.block_table), f"the length of block_table ({where})")
        expect(num_hits, manager.stats.hits, f"the hits that stats.record was told of: {hint} ({where})")
        ensure(bool(told), f"snapshots.allocate was not called: the sequence has no state ({where})")
        expect([16], told, f"num_matched_tokens of snapshots.allocate: all tokens that were found ({where})")
        expect_sane(manager)


def allocates_room_for_a_state(allocate: Any, bench: Bench) -> None:
    """a hybrid model: room for blocks, and for a state"""
    manager, seq = hybrid_pool(5, (1,)), Sequence(list(range(20)))
    when = "when 2 hits and 3 fresh blocks are needed, of 5 that are free; the fresh ones may have been found, too"
    expect_answer(True, allocate(manager, seq), when)
    expect([0, 1], seq.block_table[:2], f"the hits, {when}")
    expect_sane(manager)
    refuse(allocate, hybrid_pool(5, (1,)), Sequence(list(range(24))), "when 2 hits and 4 fresh blocks are needed of 5")
    manager = hybrid_pool(12, (1,), max_running=1)
    expect_answer(True, allocate(manager, Sequence([7])), "when there is room for one state")
    refuse(allocate, manager, Sequence(list(range(20))), "when there is no room for one more state")


def allocates_in_a_hybrid_engine(allocate: Any, bench: Bench) -> None:
    """the real scheduler with snapshots: every step is the same as ours"""
    for seed in range(10):
        limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 40}
        theirs, ours = Stage(11, **limits), Stage(11, **limits)
        for stage in (theirs, ours):
            stage.manager.snapshots = make_snapshots(stage.manager, max_running=4)
        compare_with_ours(theirs, ours, seed)


# -- register_prefix --------------------------------------------------------------------------------------------------


def expect_asked(manager: BlockManager, indexes: list[int], register: Callable[[], None], hint: str) -> None:
    """Which blocks are hashed while registering?"""
    asked: list[int] = []
    hash_block = manager.hash_block

    def noting(seq: Sequence, index: int) -> tuple[bytes, Content]:
        asked.append(index)
        return hash_block(seq, index)

    with replaced(manager, "hash_block", noting):
        register()
    expect(indexes, asked, hint)


def registers_full_blocks(register: Any, bench: Bench) -> None:
    """full blocks can be found, a partly filled one cannot"""
    manager = pool(8)
    seq = prepared(manager, range(10), 10)
    register(manager, seq)
    expect([[0], [1]], listed(manager), "hash_to_block: 10 computed tokens fill blocks 0 and 1, block 2 has room left")
    expect([0, 1], cached(manager), "a block that was registered must say so: block.block_hash is its hash")
    for index in (0, 1):
        content = manager.hash_block(seq, index)[1]
        hint = f"(parent_hash, token_ids, extra_keys) of block {index} must be its content, or no hit can be verified"
        block = manager.blocks[index]
        expect(content, (block.parent_hash, block.token_ids, block.extra_keys), hint)
    expect(2, seq.num_registered_blocks, "num_registered_blocks: two blocks are done")
    expect([1, 1, 1], refs(manager)[:3], "registering changes no reference counts")
    again = Sequence(list(range(10)))
    assert manager.allocate_with_prefix(again)
    expect(8, again.num_cached_tokens, "the same prompt again must find two blocks")
    expect_sane(manager)


def registers_chunks(register: Any, bench: Bench) -> None:
    """a prompt in chunks: only what is computed, each block once"""
    manager = pool(8)
    seq = prepared(manager, range(16), 6)
    hint = "6 of 16 prompt tokens are computed, and they fill only block 0. The rest of the prompt is not in the cache"
    expect_asked(manager, [0], lambda: register(manager, seq), hint)
    expect([0], cached(manager), hint)
    seq.num_computed_tokens = 13
    hint = "now 13 are computed: blocks 1 and 2 are new. Block 0 is done already: begin at seq.num_registered_blocks"
    expect_asked(manager, [1, 2], lambda: register(manager, seq), hint)
    expect([0, 1, 2], cached(manager), hint)
    hint = "nothing new is computed, so nothing must be registered: is num_registered_blocks kept up to date?"
    expect_asked(manager, [], lambda: register(manager, seq), hint)
    expect_sane(manager)


def registers_answers(register: Any, bench: Bench) -> None:
    """blocks that fill up with generated tokens, after hits"""
    manager = pool(8)
    manager.free(admit(manager, range(8)))
    seq = prepared(manager, range(8), 8)  # both blocks are hits, the last token is computed again
    hint = "both blocks are hits and have their hashes. Begin at num_registered_blocks: num_cached_tokens is 7, not 8"
    expect_asked(manager, [], lambda: register(manager, seq), hint)
    for token in range(4):
        seq.append(token)
        assert manager.append_slots(seq)
        seq.num_computed_tokens += 1
        hint = f"{token + 1} of 4 tokens of the answer are computed: which blocks are full now, and which have hashes?"
        expect_asked(manager, [2] if token == 3 else [], lambda: register(manager, seq), hint)
    hint = "the full blocks of an answer are registered, too: the next turn of a chat begins with them"
    expect([0, 1, 2], cached(manager), hint)
    expect_sane(manager)


def registers_copies(register: Any, bench: Bench) -> None:
    """two blocks with the same content: both can be found"""
    manager = pool(8)
    one, two = prepared(manager, range(6), 6), prepared(manager, range(6), 6)  # neither finds the other
    register(manager, one)
    register(manager, two)
    hint = "blocks 0 and 2 have the same content and the same hash: the second joins the first, in the same dict"
    expect([[0, 2]], listed(manager), hint)
    expect(([0, 2], 1), (cached(manager), two.num_registered_blocks), hint)
    expect([0, 1], one.block_table, "tables stay as they are")
    expect([2, 3], two.block_table, "tables stay as they are")
    manager.free(one)
    assert manager.allocate_with_prefix(Sequence([9] * 24))  # everything but blocks 2 and 3
    again = Sequence(list(range(4)))
    assert manager.allocate_with_prefix(again)
    expect([2], again.block_table, "block 0 was evicted; its copy, block 2, must still be found")
    expect_sane(manager)


def registers_nothing(register: Any, bench: Bench) -> None:
    """with caching off, or after a hash collision, nothing is registered"""
    manager = pool(8, caching=False)
    register(manager, prepared(manager, range(10), 10))
    expect([], listed(manager), "caching is off: nothing is registered")
    manager = pool(8)
    seq = prepared(manager, range(10), 10)
    seq.hash_collision = True
    hint = "hash_collision is True already: nothing is hashed any more"
    expect_asked(manager, [], lambda: register(manager, seq), hint)
    expect([], listed(manager), hint)


def registers_on_collision(register: Any, bench: Bench) -> None:
    """a hash that stands for different content: neither this block nor a later one is registered"""
    manager = colliding_pool()
    one, two = prepared(manager, [2] * 4, 4), prepared(manager, [12, 12, 12, 12, 1, 1, 1, 1], 8)
    register(manager, one)
    register(manager, two)
    hint = "block 1 has block 0's hash but different content: ask holds(content), and register nothing from there on"
    expect([[0]], listed(manager), hint)
    expect([0], cached(manager), hint)
    found = two.hash_collision, manager.stats.collisions
    expect((True, 1), found, "hash_collision and stats.collisions after a collision")
    expect(0, two.num_registered_blocks, "a block whose hash collides is not registered: num_registered_blocks stays")
    register(manager, two)
    expect(1, manager.stats.collisions, "the same collision was counted again: hash_collision ends it for good")
    three = prepared(manager, [*[3] * 4, *[4] * 4, *[12] * 4, *[5] * 4], 16)  # its third block collides
    register(manager, three)
    hint = "the third of four blocks collides with block 0: the two before it are registered, it and the fourth are not"
    expect([[0], three.block_table[:1], three.block_table[1:2]], listed(manager), hint)
    expect(2, three.num_registered_blocks, f"num_registered_blocks must be kept up to date. {hint}")


# -- take_fresh -------------------------------------------------------------------------------------------------------


def takes_from_the_head(take: Any, bench: Bench) -> None:
    """from the head of the queue to the end of the table"""
    manager, seq = pool(6), Sequence([1] * 12)
    take(manager, seq, 2)
    hint = "the queue was 0 1 2 3 4 5: its head is taken, and the table lists the blocks in the order taken"
    expect([0, 1], seq.block_table, hint)
    expect([2, 3, 4, 5], list(manager.free_blocks), "two blocks must have left the queue at its head")
    take(manager, seq, 0)
    take(manager, seq, 1)
    expect([0, 1, 2], seq.block_table, "0 more blocks and then 1 more: new ones go after those that are in the table")
    expect([1, 1, 1, 0, 0, 0], refs(manager), "each block that was taken has one reference now")
    expect(0, manager.stats.evictions, "these blocks were not cached: nothing was evicted")
    expect_sane(manager)


def takes_whatever_is_next(take: Any, bench: Bench) -> None:
    """cached and uncached blocks, in the order of the queue"""
    manager, seq = pool(4), Sequence([1])
    first, second = admit(manager, range(8)), admit(manager, range(50, 53))
    manager.free(first)
    manager.free(second)  # the queue is 2 3 1 0; 1 and 0 are cached
    take(manager, seq, 3)
    hint = "the queue was 2 3 1 0, and 1 and 0 are cached: the head is taken, whatever it is"
    expect([2, 3, 1], seq.block_table, f"{hint}. The deepest block is nearest the head, so a text is lost from its end")
    expect(1, manager.stats.evictions, "block 1 was cached, blocks 2 and 3 were not: that is one eviction")
    expect([0], cached(manager), "block 1 must no longer be cached, and block 0 must stay cached")


def forgets_what_it_takes(take: Any, bench: Bench) -> None:
    """nobody can find what was in a block that has been taken"""
    manager = pool(2)
    manager.free(admit(manager, range(8)))
    take(manager, Sequence([1] * 8), 2)
    for block in manager.blocks:
        fields = block.block_hash, block.parent_hash, block.token_ids, block.extra_keys
        is_listed = any(block.block_id in copies for copies in manager.hash_to_block.values())
        if not is_listed and fields == (None, None, [], ()):
            continue
        expected, got = wrong_text(bench)
        if is_listed:
            what = "is still in hash_to_block under its old hash. "
            what += (
                "A request for that text gets the K/V of another one. See what the model writes when a text comes again"
                if got
                else "Hits are verified, so no request gets it; but that text can never be registered again"
            )
        else:
            what = (
                "still says what it was. The scheduler takes a block with a hash for one that is computed already, and "
                "writes nothing there"
            )
            expected, got = expected or "(None, None, [], ())", got or str(fields)
        raise Wrong(f"block {block.block_id} was taken and {what}", expected=expected, got=got)
    expect({}, manager.hash_to_block, "no copy is left under these hashes: hash_to_block must not keep empty dicts")
    expect_sane(manager)


def keeps_the_other_copy(take: Any, bench: Bench) -> None:
    """two copies of a block: one goes, the other is still found"""
    for index in (0, 1):
        manager = pool(4)
        pair = [prepared(manager, range(4), 4), prepared(manager, range(4), 4)]
        for seq in pair:
            manager.register_prefix(seq)
        manager.free(pair[index])
        take(manager, Sequence([1] * 12), 3)  # 2, 3 and the copy that is free
        kept = 1 - index
        hint = f"blocks 0 and 1 have one hash, {index} was taken: only {index} leaves the dict under that hash"
        expect([[kept]], listed(manager), hint)
        again = Sequence(list(range(4)))
        assert manager.allocate_with_prefix(again)
        expect([kept], again.block_table, f"block {kept} must still be found")
        expect_sane(manager)


def forgets_from_the_end(take: Any, bench: Bench) -> None:
    """texts are evicted block by block from the end, beginning with the one released longest ago"""
    manager = pool(6)
    texts = [list(range(12)), list(range(50, 62))]
    for tokens in texts:
        manager.free(admit(manager, tokens))

    def found(tokens: list[int]) -> int:
        names = [manager.hash_block(seq, index)[0] for seq in [Sequence(tokens)] for index in range(3)]
        return sum(name in manager.hash_to_block for name in names)

    seq, left = Sequence([1] * 24), []
    for _ in range(6):
        take(manager, seq, 1)
        left.append([found(tokens) for tokens in texts])
    hint = "how many blocks two texts of 3 blocks each still find, after each block that was taken"
    expect([[2, 3], [1, 3], [0, 3], [0, 2], [0, 1], [0, 0]], left, hint)


# -- the tasks --------------------------------------------------------------------------------------------------------


ALLOCATES = allocates_fresh, allocates_hits_in_use, allocates_hits_in_the_queue, allocates_a_cached_prompt
MORE = allocates_after_preemption, allocates_one_of_two_copies, allocates_on_collision, allocates_without_caching
REGISTERS = registers_full_blocks, registers_chunks, registers_answers, registers_copies, registers_nothing
TAKES = takes_from_the_head, forgets_what_it_takes, takes_whatever_is_next, keeps_the_other_copy, forgets_from_the_end
HYBRID = allocates_from_a_snapshot, allocates_room_for_a_state, allocates_in_a_hybrid_engine
PARTS = {
    "allocate_with_prefix": ("get_computed_blocks", "_reusable", "_has_room", "can_allocate", "touch"),
    "take_fresh_blocks": ("uncache",),
}
CALLS_SECTION = "Two calls around prefill"


@contextmanager
def use(method: str, function: Any) -> Iterator[None]:
    parts = yours_to_write(BlockManager, *PARTS.get(method, ()))
    with parts, yours_to_write(SnapshotCache, "reusable"), replaced(BlockManager, method, function):
        yield


def task(name: str, section: str, *checks: Any) -> Task:
    method = {"take_fresh": "take_fresh_blocks"}.get(name, name)
    return Task(name, section, partial(use, method), (*checks, *TRIALS))


TASKS = [
    Task("hash_block", "A hash for a block", use_hash, (*HASHES, *TRIALS)),
    task(
        "allocate_with_prefix",
        CALLS_SECTION,
        *(*ALLOCATES, allocates_all_or_nothing, worked_example, *MORE, allocates_and_counts, *HYBRID),
    ),
    task("register_prefix", CALLS_SECTION, *REGISTERS, registers_on_collision, worked_example),
    task("take_fresh", "What is evicted first", *TAKES, worked_example),
    TIERS,
]
