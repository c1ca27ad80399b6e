"""How the exercises of chapter 4 are graded."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from chapters.expect import Wrong, ensure, expect, expect_answer, expect_sane, read_again
from chapters.grading import Bench, Task, answers_in_a_small_pool
from chapters.patching import our_engine, replaced, yours_to_write
from chapters.stage import Stage, compute
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence

METHODS = {"allocate": "allocate_with_prefix", "append_slots": "append_slots", "free": "free"}
OTHERS = [901, 902, 903, 904, 905, 906, 907, 908]  # tokens that no other prompt here begins with


# -- small pools ------------------------------------------------------------------------------------------------------


def pool(num_blocks: int, first: int = 0, caching: bool = False, order: str = "uncached_first") -> BlockManager:
    """Blocks of 4, the free queue rotated so that block `first` is at its head."""
    manager = BlockManager(num_blocks, 4, enable_prefix_caching=caching, free_order=order)
    for block in manager.blocks[:first]:
        manager.free_blocks.remove(block)
        manager.free_blocks.append(block)
    return manager


def running(manager: BlockManager, tokens: list[int] | int) -> Sequence:
    """A sequence whose tokens are all computed, admitted by the engine's own allocate_with_prefix."""
    seq = Sequence(list(range(tokens)) if isinstance(tokens, int) else tokens)
    assert manager.allocate_with_prefix(seq)
    compute(manager, seq)
    return seq


def state(manager: BlockManager, seq: Sequence) -> dict[str, Any]:
    return {
        "free queue": list(manager.free_blocks),
        "reference counts": [block.ref_count for block in manager.blocks],
        "block_table": list(seq.block_table),
        "num_computed_tokens": seq.num_computed_tokens,
        "num_cached_tokens": seq.num_cached_tokens,
        "num_registered_blocks": seq.num_registered_blocks,
        "hash_collision": seq.hash_collision,
        "hashes of the blocks": [block.block_hash for block in manager.blocks],
    }


def refuse(function: Any, manager: BlockManager, when: str, seq: Sequence, *num_tokens: int) -> None:
    """The answer must be False, with nothing changed."""
    if not seq.block_table:
        seq.num_cached_tokens = seq.num_registered_blocks = 1  # of an earlier admission
    before = state(manager, seq)
    try:
        answer = function(manager, seq, *num_tokens)
    except AssertionError as error:  # of an empty queue
        hint = f"the answer should be False {when}. Instead it took blocks until the free queue was empty"
        raise Wrong(hint) from error
    expect_answer(False, answer, when)
    for name, value in state(manager, seq).items():
        hint = "find out whether there are enough blocks before you take the first one"
        expect(before[name], value, f"it said False, but the {name} changed: {hint}")


def expect_taken(manager: BlockManager, seq: Sequence) -> None:
    """What must be true of each block of its table."""
    for block_id in seq.block_table:
        count = manager.blocks[block_id].ref_count
        expect(1, count, f"block {block_id} is in one sequence's table, so its ref_count must be 1")
    expect_sane(manager)


# -- larger trials, the same for all three ----------------------------------------------------------------------------


def runs_in_the_scheduler(function: Any, bench: Bench) -> None:
    """the real scheduler: twelve requests in nine blocks, preemption"""
    for caching in (False, True):
        limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32}
        stage = Stage(9, enable_prefix_caching=caching, **limits)
        for i in range(12):
            tokens = [*range(8), *range(100 * i, 100 * i + i)] if i % 3 else [7] * (5 + i)
            stage.add(tokens, max_tokens=5 + i)
        stage.run()
        hint = "nobody was preempted, although 12 requests share 9 blocks: is a failure ever reported?"
        ensure(stage.scheduler.num_preemptions > 0, hint)


def generates_the_same(function: Any, bench: Bench) -> None:
    """the model answers as before"""
    try:
        bench.same_tokens()
    finally:
        manager = bench.llm.engine.block_manager
        expect_sane(manager, "after the model's answers ")
        hint = "all answers are complete, so every block must be in the free queue"
        expect(len(manager.blocks), len(manager.free_blocks), hint)


# -- allocate ---------------------------------------------------------------------------------------------------------


def allocates_from_the_head(allocate: Any, bench: Bench) -> None:
    """nothing is cached: fresh blocks from the head of the queue, one more only when the last one is full"""
    manager, seq = pool(8, first=5), Sequence(list(range(6)))
    expect_answer(True, allocate(manager, seq), "when the pool has room")
    expect([5, 6], seq.block_table, "6 tokens need 2 blocks of 4, taken from the head of the free queue (5 6 7 0 ...)")
    expect([7, 0, 1, 2, 3, 4], list(manager.free_blocks), "a block that was taken must leave the free queue")
    expect_taken(manager, seq)
    for num_tokens in (1, 3, 4, 5, 8, 9, 12, 13):
        manager, seq = pool(8), Sequence(list(range(num_tokens)))
        expect_answer(True, allocate(manager, seq), f"for {num_tokens} tokens in an empty pool")
        hint = f"wrong number of blocks of 4 for {num_tokens} tokens: n full blocks need no further one"
        expect(-(-num_tokens // 4), len(seq.block_table), hint)
        expect_taken(manager, seq)


def with_two_cached_blocks(num_blocks: int, in_use: bool) -> BlockManager:
    """Blocks 0 and 1 have the K and V of OTHERS. If nobody uses them, they are at the head of the queue, 1 before 0."""
    manager = pool(num_blocks, caching=True)
    with our_engine():
        seq = running(manager, OTHERS)
        if not in_use:
            manager.free(seq)
            for block in manager.blocks[2:]:
                manager.free_blocks.remove(block)
                manager.free_blocks.append(block)
    return manager


def allocates_hits(allocate: Any, bench: Bench) -> None:
    """blocks that the cache has come first in the table, whoever uses them"""
    manager, seq = with_two_cached_blocks(6, in_use=True), Sequence([*OTHERS, 1, 2, 3])
    expect_answer(True, allocate(manager, seq), "when two blocks are hits and one fresh block is needed")
    expect([0, 1, 2], seq.block_table, "the hits are blocks 0 and 1, and the head of the queue was 2")
    counts = [block.ref_count for block in manager.blocks[:3]]
    expect([2, 2, 1], counts, "ref_count of blocks 0, 1 and 2: a hit gets one more reference, a fresh block its first")
    expect((8, 8, 2), fields(seq), f"{FIELDS}: two hits hold 8 tokens")
    expect_sane(manager)
    manager, seq = with_two_cached_blocks(6, in_use=False), Sequence([*OTHERS, 1, 2, 3])
    expect_answer(True, allocate(manager, seq), "when two blocks are hits and one fresh block is needed")
    hint = "the queue was 1 0 2 3 4 5, and 0 and 1 are hits: take them out before fresh ones are taken from its head"
    expect([0, 1, 2], seq.block_table, hint)
    expect([3, 4, 5], list(manager.free_blocks), f"the free queue afterwards: {hint}")
    expect_taken(manager, seq)
    hashes = [block.block_hash is not None for block in manager.blocks[:2]]
    expect([True, True], hashes, "hits keep their hashes: only a fresh block loses its own")


FIELDS = "num_cached_tokens, num_computed_tokens and num_registered_blocks"


def fields(seq: Sequence) -> tuple[int, int, int]:
    return seq.num_cached_tokens, seq.num_computed_tokens, seq.num_registered_blocks


def allocates_again(allocate: Any, bench: Bench) -> None:
    """a sequence that has run before starts from what is cached, which leaves a token to compute"""
    manager, seq = pool(8), Sequence(list(range(6)))
    seq.num_computed_tokens, seq.num_cached_tokens, seq.num_registered_blocks, seq.hash_collision = 6, 4, 1, True
    expect_answer(True, allocate(manager, seq), "for a sequence that was preempted")
    hint = f"{FIELDS} must be set again: nothing is cached, so the blocks are new and nothing in them is computed"
    expect((0, 0, 0), fields(seq), hint)
    expect(False, seq.hash_collision, "hash_collision must be False for a sequence that starts again")
    manager, seq = with_two_cached_blocks(6, in_use=False), Sequence(list(OTHERS))
    expect_answer(True, allocate(manager, seq), "when all of the prompt is cached")
    hint = f"{FIELDS}: both blocks are hits, and the last of the 8 tokens is computed again, to have logits"
    expect((7, 7, 2), fields(seq), hint)
    expect([0, 1], seq.block_table, "all of the prompt is cached in blocks 0 and 1: no fresh block is needed")


def allocates_all_or_nothing(allocate: Any, bench: Bench) -> None:
    """what just fits is taken, what does not fit changes nothing"""
    manager, three, two = pool(5), Sequence(list(range(9))), Sequence(list(range(8)))
    expect_answer(True, allocate(manager, Sequence(list(range(12)))), "when the pool has room")
    refuse(allocate, manager, "when 3 blocks are needed and 2 are free", three)
    expect_answer(True, allocate(manager, two), "when exactly as many blocks are free as are needed")
    long, just = Sequence([*OTHERS, *range(9)]), Sequence([*OTHERS, *range(8)])
    when = "when 2 hits are in use, 3 fresh blocks are needed and 2 are free"
    refuse(allocate, with_two_cached_blocks(4, in_use=True), when, long)
    when = "when 2 hits are in use, 2 fresh blocks are needed and 2 are free: a hit that others use costs nothing"
    expect_answer(True, allocate(with_two_cached_blocks(4, in_use=True), just), when)
    manager = with_two_cached_blocks(4, in_use=False)
    when = "when 3 fresh blocks are needed and 4 are free, of which 2 are the hits: don't count these twice"
    refuse(allocate, manager, when, Sequence([*OTHERS, *range(9)]))
    just = Sequence([*OTHERS, *range(8)])
    when = "when 2 fresh blocks are needed and 4 are free, of which 2 are the hits"
    expect_answer(True, allocate(manager, just), when)
    manager = with_two_cached_blocks(4, in_use=False)
    with our_engine():
        manager.allocate_with_prefix(Sequence([*OTHERS[:4], 1]))
    when = "when 2 blocks are free, 1 of 2 hits is one of them, the other is in use, and 1 fresh block is needed"
    expect_answer(True, allocate(manager, Sequence([*OTHERS, 1])), when)


def allocates_hashed_blocks(allocate: Any, bench: Bench) -> None:
    """a block that still has a hash loses it when it is taken"""
    manager = pool(2, caching=True)
    first = Sequence(list(range(8)))
    expect_answer(True, allocate(manager, first), "when the pool has room")
    first.num_computed_tokens = 8
    manager.register_prefix(first)
    manager.free(first)
    expect_answer(True, allocate(manager, Sequence(OTHERS)), "when all free blocks have hashes")
    hint = "blocks were taken and still have the hashes of their old content: manager.uncache(block)"
    expect([None, None], [block.block_hash for block in manager.blocks], hint)
    expect_sane(manager)


# -- append_slots -----------------------------------------------------------------------------------------------------


def appends_nothing(append_slots: Any, bench: Bench) -> None:
    """room in the last block: nothing is taken"""
    manager = pool(4, first=1)
    seq = running(manager, 6)
    seq.append(1)  # as in the engine: it has been sampled and waits for its slot
    before = state(manager, seq)
    expect_answer(True, append_slots(manager, seq), "when the last block has room")
    for name, value in state(manager, seq).items():
        expect(before[name], value, f"7 tokens fit into the 2 blocks of 4 that it has; {name} must stay as it was")


def appends_at_the_border(append_slots: Any, bench: Bench) -> None:
    """token by token over several borders"""
    manager = pool(8, first=3)
    seq = running(manager, 1)
    for num_tokens in range(2, 18):
        seq.append(1)
        before = list(seq.block_table)
        expect_answer(True, append_slots(manager, seq), f"for token {num_tokens}, with free blocks")
        hint = f"wrong number of blocks of 4 for {num_tokens} tokens ({num_tokens - 1} computed, 1 more)"
        expect(-(-num_tokens // 4), len(seq.block_table), hint)
        expect(before, seq.block_table[: len(before)], "the blocks in the table must stay, in their order")
        expect_taken(manager, seq)
        seq.num_computed_tokens += 1
    expect([3, 4, 5, 6, 7], seq.block_table, "blocks are taken from the head of the free queue")


def appends_many(append_slots: Any, bench: Bench) -> None:
    """several tokens at once"""
    manager = pool(8)
    seq = running(manager, 6)
    expect_answer(True, append_slots(manager, seq, 10), "for 10 tokens at once, with 6 free blocks")
    expect(4, len(seq.block_table), "6 computed tokens and 10 more are 16: 4 blocks of 4")
    expect_taken(manager, seq)


def appends_in_a_reserved_prompt(append_slots: Any, bench: Bench) -> None:
    """a table longer than needed stays as it is"""
    manager = pool(4)
    seq = running(manager, 13)
    seq.num_computed_tokens = 4  # the prompt is computed in chunks; the blocks for all of it are reserved
    expect_answer(True, append_slots(manager, seq, 4), "when the table already has the blocks and none is free")
    expect([0, 1, 2, 3], seq.block_table, "4 computed tokens and 4 more fit into the 4 blocks that are reserved")
    expect_sane(manager)


def appends_in_a_full_pool(append_slots: Any, bench: Bench) -> None:
    """no block free: True while the last one has room, else False"""
    manager = pool(4)
    running(manager, 8)
    seq = running(manager, 7)
    expect_answer(True, append_slots(manager, seq), "when no block is free but the last one of the table has room")
    seq.num_computed_tokens = 8
    refuse(append_slots, manager, "when the table is full and no block is free", seq)
    manager = pool(4)
    refuse(append_slots, manager, "when 3 blocks are needed and 2 are free", running(manager, 8), 9)


@read_again("Taking blocks: all or nothing")
def appends_hashed_blocks(append_slots: Any, bench: Bench) -> None:
    """a block that still has a hash loses it when it is taken"""
    manager = pool(2, caching=True)
    first, seq = running(manager, OTHERS[:4]), running(manager, 4)
    manager.free(first)
    expect_answer(True, append_slots(manager, seq), "when the only free block has a hash")
    block_hash = manager.blocks[0].block_hash
    expect(None, block_hash, "a block was taken and still has the hash of its old content: manager.uncache(block)")
    expect_sane(manager)


# -- free -------------------------------------------------------------------------------------------------------------


def frees_a_sequence(free: Any, bench: Bench) -> None:
    """all blocks of a sequence come back, and its table is empty"""
    manager = pool(4, caching=True)
    seq = running(manager, 10)
    free(manager, seq)
    counts = [block.ref_count for block in manager.blocks]
    expect([0, 0, 0, 0], counts, "nobody holds a block any more: all reference counts must be 0")
    expect(4, len(manager.free_blocks), "a block without references belongs in the free queue")
    expect([], seq.block_table, "the sequence holds nothing any more: its block_table must be empty")
    expect_sane(manager)


def frees_the_last_first(free: Any, bench: Bench) -> None:
    """cached blocks at the tail of the queue, the last of the table first; an uncached one at its head"""
    manager = pool(6, first=2, caching=True)
    free(manager, running(manager, 12))  # blocks 2 3 4, all full
    expect([5, 0, 1, 4, 3, 2], list(manager.free_blocks), "the queue must be what it was (5 0 1), then 4, 3, 2")
    manager = pool(6, first=2, caching=True)
    free(manager, running(manager, 10))  # block 4 has 2 tokens and no hash
    hint = "block 4 has no hash, so it must be at the head; then the queue as it was (5 0 1), then 3 and 2"
    expect([4, 5, 0, 1, 3, 2], list(manager.free_blocks), hint)
    manager = pool(6, first=2, caching=True, order="release")
    free(manager, running(manager, 10))
    hint = 'manager.free_order is "release": all blocks go to the tail in the order 4, 3, 2, with a hash or without'
    expect([5, 0, 1, 4, 3, 2], list(manager.free_blocks), hint)


def frees_shared_blocks(free: Any, bench: Bench) -> None:
    """a block that others hold stays with them"""
    manager = pool(8, caching=True)
    first, second = running(manager, 10), running(manager, 9)  # both hold blocks 0 and 1
    free(manager, first)
    counts = [block.ref_count for block in manager.blocks[:4]]
    expect([1, 1, 0, 1], counts, "blocks 0 and 1 are in another table, too: one reference goes, one stays")
    expect([2, 4, 5, 6, 7], list(manager.free_blocks), "only a block that nobody holds goes into the free queue")
    expect([0, 1, 3], second.block_table, "the other sequence's table must stay as it is")
    free(manager, second)
    expect([3, 2, 4, 5, 6, 7, 1, 0], list(manager.free_blocks), "with the last reference a block goes into the queue")
    expect_sane(manager)


def frees_and_keeps_hashes(free: Any, bench: Bench) -> None:
    """freed blocks can still be found"""
    manager = pool(8, caching=True)
    free(manager, running(manager, 10))
    hashed = [block.block_hash is not None for block in manager.blocks[:3]]
    expect([True, True, False], hashed, "free must leave hashes alone: the next request may begin with the same tokens")
    again = running(manager, 10)
    expect(8, again.num_cached_tokens, "the same prompt again must find its two full blocks")
    expect_sane(manager)


def frees_nothing(free: Any, bench: Bench) -> None:
    """a sequence without blocks, and one that was freed before"""
    manager = pool(4)
    free(manager, Sequence([1, 2, 3]))
    seq = running(manager, 10)
    free(manager, seq)
    free(manager, seq)
    expect([0, 0, 0, 0], [block.ref_count for block in manager.blocks], "freeing twice must change nothing")
    expect_sane(manager)


# -- the tasks --------------------------------------------------------------------------------------------------------


TRIALS = runs_in_the_scheduler, generates_the_same, answers_in_a_small_pool
ALLOCATES = allocates_from_the_head, allocates_hits, allocates_again, allocates_all_or_nothing
APPENDS = appends_nothing, appends_at_the_border, appends_many, appends_in_a_reserved_prompt, appends_in_a_full_pool
FREES = frees_a_sequence, frees_the_last_first, frees_shared_blocks, frees_and_keeps_hashes, frees_nothing


@contextmanager
def use(name: str, function: Any) -> Iterator[None]:
    parts = yours_to_write(BlockManager, "_has_room", "can_allocate", "touch", "take_fresh_blocks")
    with parts, replaced(BlockManager, METHODS[name], function):
        yield


def task(name: str, section: str, *checks: Any) -> Task:
    return Task(name, section, partial(use, name), (*checks, *TRIALS))


TASKS = [
    task("allocate", "Taking blocks: all or nothing", *ALLOCATES, allocates_hashed_blocks),
    task("append_slots", "One token more", *APPENDS, appends_hashed_blocks),
    task("free", "Giving blocks back", *FREES),
]
