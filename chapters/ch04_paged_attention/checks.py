"""How the exercises of chapter 4 are graded."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from chapters.ch04_paged_attention import solution
from chapters.grading import PROMPTS, Bench, Task, Wrong
from chapters.patching import replaced, use_manager
from nanovllm import SamplingParams
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence

METHODS = {"allocate": "allocate_with_prefix", "append_slots": "append_slots", "free": "free"}
OTHERS = [901, 902, 903, 904, 905, 906, 907, 908]  # tokens that no other prompt here begins with


# -- small pools ------------------------------------------------------------------------------------------------------


def pool(num_blocks: int, first: int = 0, caching: bool = False) -> BlockManager:
    """Blocks of 4, the free queue turned round so that block `first` is at its head."""
    manager = BlockManager(num_blocks, 4, enable_prefix_caching=caching)
    for block in manager.blocks[:first]:
        manager.free_blocks.remove(block)
        manager.free_blocks.append(block)
    return manager


def running(manager: BlockManager, tokens: list[int] | int) -> Sequence:
    """A sequence whose tokens are all computed, admitted by the engine's own allocate_with_prefix."""
    seq = Sequence(list(range(tokens)) if isinstance(tokens, int) else tokens)
    assert manager.allocate_with_prefix(seq)
    seq.num_computed_tokens = len(seq.tokens)
    manager.register_prefix(seq)
    return seq


def state(manager: BlockManager, seq: Sequence) -> dict[str, Any]:
    return {
        "free queue": list(manager.free_blocks),
        "reference counts": [block.ref_count for block in manager.blocks],
        "block_table": list(seq.block_table),
        "num_computed_tokens": seq.num_computed_tokens,
    }


def expect(expected: Any, got: Any, hint: str) -> None:
    if expected != got:
        raise Wrong(hint, expected=expected, got=got)


def expect_answer(expected: bool, got: Any, when: str) -> None:
    hint = f"the answer is wrong {when}"
    if got is None:
        hint = f"it returned nothing {when}: does every way through the function end with return True or return False?"
    expect(expected, got, hint)


def expect_unchanged(before: dict[str, Any], manager: BlockManager, seq: Sequence) -> None:
    for name, value in state(manager, seq).items():
        expect(
            before[name],
            value,
            f"it said False, but the {name} changed: find out whether the blocks suffice before you take the first one",
        )


def expect_taken(manager: BlockManager, seq: Sequence, num_before: int = 0) -> None:
    """What must be true of each block that was just taken."""
    for block_id in seq.block_table[num_before:]:
        count = manager.blocks[block_id].ref_count
        expect(1, count, f"block {block_id} is in one sequence's table, so its ref_count must be 1")
    expect_sane(manager)


def expect_sane(manager: BlockManager, when: str = "") -> None:
    try:
        manager.check_integrity()
    except AssertionError as error:
        raise Wrong(f"{when}check_integrity() complains: {error}") from error


# -- larger trials, the same for all three ----------------------------------------------------------------------------


def serve(caching: bool) -> int:
    """Twelve requests through the real scheduler and a pool that is too small for them. Returns the preemptions.

    In place of a model there is a dictionary: slot -> the tokens up to the one whose K/V is stored there.
    """
    manager = BlockManager(9, 4, enable_prefix_caching=caching)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
    for i in range(12):
        tokens = [*range(8), *range(100 * i, 100 * i + i)] if i % 3 else [7] * (5 + i)
        scheduler.add(Sequence(tokens, SamplingParams(max_tokens=5 + i)))
    slots: dict[int, list[int]] = {}
    num_steps = 0
    while scheduler.has_unfinished():
        num_steps += 1
        expect(True, num_steps < 1_000, "after 1,000 steps the requests have not ended: nobody gets on")
        output = scheduler.schedule()
        if not output.chunks:
            raise Wrong(
                "the scheduler can run nobody any more, although blocks should be free: are blocks lost, because a "
                "count never comes back to 0 or a block does not go back to the queue?",
                expected="a free block for the oldest sequence",
                got=f"free queue {list(manager.free_blocks)}",
            )
        for chunk in output.chunks:
            if len(chunk.seq.block_table) * 4 < chunk.end:
                raise Wrong(f"{chunk.seq} computes up to token {chunk.end} and has too few blocks in its table")
        try:
            scheduler.check_integrity()
        except AssertionError as error:
            raise Wrong(f"in the real scheduler check_integrity() complains: {error}") from error
        places = [(c, i, c.seq.block_table[i // 4] * 4 + i % 4) for c in output.chunks for i in range(c.end)]
        for chunk, i, slot in places:
            if i >= chunk.write_start:
                slots[slot] = chunk.seq.tokens[: i + 1]
        for chunk, i, slot in places:
            if slots.get(slot) != chunk.seq.tokens[: i + 1]:
                raise Wrong(
                    f"{chunk.seq} finds the K/V of other tokens in slot {slot}: was a block taken that somebody holds, "
                    "or did a block keep its name when it was taken?"
                )
        samples = [chunk.seq for chunk in output.chunks if chunk.samples]
        scheduler.update(output, [500 + sum(seq.tokens) % 400 for seq in samples])
    expect(9, len(manager.free_blocks), "all sequences have ended, so all 9 blocks must be in the free queue")
    return scheduler.num_preemptions


def runs_in_the_scheduler(function: Any, bench: Bench) -> None:
    """the real scheduler: twelve requests in nine blocks, preemption"""
    for caching in (False, True):
        if serve(caching) == 0:
            raise Wrong("nobody was preempted, although 12 requests share 9 blocks: is a failure ever reported?")


def generates_the_same(function: Any, bench: Bench) -> None:
    """the model answers as before"""
    try:
        bench.same_tokens()
    finally:
        expect_engine_sane(bench)


def expect_engine_sane(bench: Bench) -> None:
    manager = bench.llm.engine.block_manager
    expect_sane(manager, "after the model's answers ")
    num_free = len(manager.free_blocks)
    expect(len(manager.blocks), num_free, "all answers are given, so every block must be in the free queue")


@contextmanager
def tiny_pool(bench: Bench, num_tokens: int) -> Iterator[BlockManager]:
    """The engine with just the blocks that its prompts need: when the answers grow, somebody is preempted."""
    engine = bench.llm.engine
    block_size = engine.block_manager.block_size
    assert num_tokens > block_size, "so that every sequence grows by a block"
    num_blocks = sum(-(-len(engine.tokenizer(prompt).input_ids) // block_size) for prompt in PROMPTS)
    manager = BlockManager(num_blocks, block_size)
    with use_manager(bench.llm, manager):
        yield manager


def generate_in_a_tiny_pool(bench: Bench, name: str, function: Any) -> tuple[list[list[int]], int]:
    """Greedy tokens and the number of preemptions, with `function` in place.

    No prefix is looked up, so that what comes out can be compared whichever function is the student's: the same steps
    compute the same tokens, and rounding cannot tell them apart.
    """
    scheduler, params = bench.llm.engine.scheduler, SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    num_before = scheduler.num_preemptions
    with (
        tiny_pool(bench, 17) as manager,
        replaced(BlockManager, METHODS["allocate"], solution.allocate),
        replaced(BlockManager, METHODS[name], function),
    ):
        outputs = bench.llm.generate(PROMPTS, params, False)
        expect_sane(manager, "after preemption ")
    return [output.outputs[0].token_ids for output in outputs], scheduler.num_preemptions - num_before


@cache
def expected_in_a_tiny_pool(bench: Bench) -> tuple[list[list[int]], int]:
    with replaced(BlockManager, METHODS["append_slots"], solution.append_slots):
        return generate_in_a_tiny_pool(bench, "free", solution.free)


def generates_in_a_tiny_pool(name: str) -> Any:
    def check(function: Any, bench: Bench) -> None:
        """the model answers as before in a pool that makes it preempt"""
        tokens, num_preemptions = expected_in_a_tiny_pool(bench)
        got_tokens, got_preemptions = generate_in_a_tiny_pool(bench, name, function)
        expect(
            num_preemptions, got_preemptions, "the same pool, but another number of preemptions than with our function"
        )
        expect(tokens, got_tokens, "after preemption the model answers with other tokens")

    return check


# -- allocate ---------------------------------------------------------------------------------------------------------


def allocates_from_the_head(allocate: Any, bench: Bench) -> None:
    """6 tokens get two blocks of 4, from the head of the free queue"""
    manager, seq = pool(8, first=5), Sequence(list(range(6)))
    expect_answer(True, allocate(manager, seq), "when the pool has room")
    expect([5, 6], seq.block_table, "6 tokens need 2 blocks of 4, taken from the head of the free queue (5 6 7 0 ...)")
    expect([7, 0, 1, 2, 3, 4], list(manager.free_blocks), "a block that was taken must leave the free queue")
    expect_taken(manager, seq)


def allocates_at_the_border(allocate: Any, bench: Bench) -> None:
    """one block more only when the last one is full"""
    for num_tokens in (1, 3, 4, 5, 8, 9, 12, 13):
        manager, seq = pool(8), Sequence(list(range(num_tokens)))
        expect_answer(True, allocate(manager, seq), f"for {num_tokens} tokens in an empty pool")
        expected = len(range(0, num_tokens, 4))
        hint = f"wrong number of blocks of 4 for {num_tokens} tokens: n full blocks need no further one"
        expect(expected, len(seq.block_table), hint)
        expect_taken(manager, seq)


def allocates_again(allocate: Any, bench: Bench) -> None:
    """a sequence that has run before starts from nothing"""
    manager, seq = pool(8), Sequence(list(range(6)))
    seq.num_computed_tokens, seq.num_cached_tokens, seq.num_registered_blocks, seq.hash_collision = 6, 4, 1, True
    expect_answer(True, allocate(manager, seq), "for a sequence that was preempted")
    for name in ("num_computed_tokens", "num_cached_tokens", "num_registered_blocks"):
        expect(0, getattr(seq, name), f"the blocks are new, nothing in them is computed: {name} must be 0")
    expect(False, seq.hash_collision, "hash_collision must be False for a sequence that starts again")


def allocates_all_or_nothing(allocate: Any, bench: Bench) -> None:
    """what just fits is taken, what does not fit changes nothing"""
    manager, seq = pool(5), Sequence(list(range(8)))
    other = Sequence(list(range(12)))
    expect_answer(True, allocate(manager, other), "when the pool has room")
    expect_answer(True, allocate(manager, seq), "when exactly as many blocks are free as are needed")
    manager, seq = pool(5), Sequence(list(range(9)))
    expect_answer(True, allocate(manager, Sequence(list(range(12)))), "when the pool has room")
    before = state(manager, seq)
    expect_answer(False, allocate(manager, seq), "when 3 blocks are needed and 2 are free")
    expect_unchanged(before, manager, seq)


def allocates_named_blocks(allocate: Any, bench: Bench) -> None:
    """a block that still has a name loses it when it is taken"""
    manager = pool(2, caching=True)
    first = Sequence(list(range(8)))
    expect_answer(True, allocate(manager, first), "when the pool has room")
    first.num_computed_tokens = 8
    manager.register_prefix(first)
    manager.free(first)
    expect_answer(True, allocate(manager, Sequence(OTHERS)), "when all free blocks have names")
    names = [block.block_hash for block in manager.blocks]
    expect(
        [None, None],
        names,
        "blocks were taken and still bear the names of their old content: manager.remove_name(block)",
    )
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
        expect(len(range(0, num_tokens, 4)), len(seq.block_table), hint)
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
    before = state(manager, seq)
    expect_answer(False, append_slots(manager, seq), "when the table is full and no block is free")
    expect_unchanged(before, manager, seq)
    manager = pool(4)
    seq = running(manager, 8)
    before = state(manager, seq)
    expect_answer(False, append_slots(manager, seq, 9), "when 3 blocks are needed and 2 are free")
    expect_unchanged(before, manager, seq)


def appends_named_blocks(append_slots: Any, bench: Bench) -> None:
    """a block that still has a name loses it when it is taken"""
    manager = pool(2, caching=True)
    first, seq = running(manager, OTHERS[:4]), running(manager, 4)
    manager.free(first)
    expect_answer(True, append_slots(manager, seq), "when the only free block has a name")
    name = manager.blocks[0].block_hash
    expect(None, name, "a block was taken and still bears the name of its old content: manager.remove_name(block)")
    expect_sane(manager)


# -- free -------------------------------------------------------------------------------------------------------------


def frees_a_sequence(free: Any, bench: Bench) -> None:
    """all blocks of a sequence come back, and its table is empty"""
    manager = pool(4)
    seq = running(manager, 10)
    free(manager, seq)
    counts = [block.ref_count for block in manager.blocks]
    expect([0, 0, 0, 0], counts, "nobody holds a block any more: all reference counts must be 0")
    expect(4, len(manager.free_blocks), "a block without references belongs into the free queue")
    expect([], seq.block_table, "the sequence holds nothing any more: its block_table must be empty")
    expect_sane(manager)


def frees_the_last_first(free: Any, bench: Bench) -> None:
    """at the tail of the queue, the last block of the table first"""
    manager = pool(6, first=2)
    seq = running(manager, 12)  # blocks 2 3 4
    free(manager, seq)
    expect([5, 0, 1, 4, 3, 2], list(manager.free_blocks), "the queue must be what it was (5 0 1), then 4, 3, 2")


def frees_shared_blocks(free: Any, bench: Bench) -> None:
    """a block that others hold stays with them"""
    manager = pool(8, caching=True)
    first, second = running(manager, 10), running(manager, 9)  # both hold blocks 0 and 1
    free(manager, first)
    counts = [block.ref_count for block in manager.blocks[:4]]
    expect([1, 1, 0, 1], counts, "blocks 0 and 1 are in another table, too: one reference goes, one stays")
    expect([4, 5, 6, 7, 2], list(manager.free_blocks), "only a block that nobody holds goes into the free queue")
    expect([0, 1, 3], second.block_table, "the other sequence's table must stay as it is")
    free(manager, second)
    expect([4, 5, 6, 7, 2, 3, 1, 0], list(manager.free_blocks), "with the last reference a block goes into the queue")
    expect_sane(manager)


def frees_and_keeps_names(free: Any, bench: Bench) -> None:
    """freed blocks can still be found"""
    manager = pool(8, caching=True)
    free(manager, running(manager, 10))
    names = [block.block_hash is not None for block in manager.blocks[:3]]
    expect([True, True, False], names, "free must leave names alone: the next request may begin with the same tokens")
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


def task(name: str, section: str, *checks: Any) -> Task:
    trials = runs_in_the_scheduler, generates_the_same, generates_in_a_tiny_pool(name)
    return Task(name, section, lambda function: replaced(BlockManager, METHODS[name], function), (*checks, *trials))


TASKS = [
    task(
        "allocate",
        "Taking blocks: all or nothing",
        allocates_from_the_head,
        allocates_at_the_border,
        allocates_again,
        allocates_all_or_nothing,
        allocates_named_blocks,
    ),
    task(
        "append_slots",
        "One token more",
        appends_nothing,
        appends_at_the_border,
        appends_many,
        appends_in_a_reserved_prompt,
        appends_in_a_full_pool,
        appends_named_blocks,
    ),
    task(
        "free",
        "Giving blocks back",
        frees_a_sequence,
        frees_the_last_first,
        frees_shared_blocks,
        frees_and_keeps_names,
        frees_nothing,
    ),
]
