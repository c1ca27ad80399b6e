"""The checks of the eight steps. `engine` is the student's file, as a module.

Nothing here is what a step asks for: expected values are written out, or come from transformers, from the course's
engine, or from what a cache must hold.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chapters.expect import Wrong, differs, ensure, expect, expect_answer, expect_form
from chapters.grading import PROMPTS, Bench, Task
from chapters.nano_engine.given import SIZES, make_tiny_llama, read_checkpoint
from chapters.nano_engine.steps import STEPS, heading
from chapters.patching import replaced
from nanovllm import LLM
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.attention import paged_attention
from nanovllm.worker.batch import Batch


class NanoBench(Bench):
    """An engine of the course in float32. model: None, where there is none, stands for a tiny one, made on the spot."""

    def __init__(self, model: str | None, loads: Callable[[], None] = lambda: None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(model, loads)

    @cached_property
    def tiny(self) -> str:
        return str(make_tiny_llama(Path(self._folder.name)))

    @property
    def model(self) -> str:
        self._model = self._model or self.tiny
        return super().model

    def close(self) -> None:
        """There always is a model; the first steps do not ask for it, and then the tiny one need not be made."""
        self._is_closed = "llm" not in vars(self)

    @cached_property
    def llm(self) -> LLM:
        return LLM(self.model, dtype="float32", max_model_len=128, num_gpu_blocks_override=64, block_size=16)


def sequence(engine: Any, tokens: Any, block_size: int = 4, **params: Any) -> Any:
    return engine.Sequence(list(tokens), engine.SamplingParams(**params), block_size)


# -- 1. a sequence and its blocks --------------------------------------------------------------------------------------


def counts_its_blocks(engine: Any, bench: Bench) -> None:
    """how many blocks a sequence needs, and what is in them"""
    for num_tokens, num_blocks in {1: 1, 3: 1, 4: 1, 5: 2, 8: 2, 9: 3}.items():
        hint = f"num_blocks of {num_tokens} tokens in blocks of 4: round up, and a full last block needs no further one"
        expect(num_blocks, sequence(engine, range(num_tokens)).num_blocks, hint)
    seq = sequence(engine, range(10, 20))
    for index, tokens in enumerate(([10, 11, 12, 13], [14, 15, 16, 17], [18, 19])):
        expect(tokens, seq.block(index), f"block({index}) of the tokens 10 to 19, in blocks of 4")


def finds_its_slots(engine: Any, bench: Bench) -> None:
    """where in the cache a position is"""
    seq = sequence(engine, range(10))
    seq.block_table = [7, 2, 9]
    hint = "the slots of positions 0 to 9 with the table [7, 2, 9] and blocks of 4: the table says which block holds a "
    hint += "position, and a block's slots lie side by side from block_id * block_size on"
    expect([28, 29, 30, 31, 8, 9, 10, 11, 36, 37], [seq.slot(position) for position in range(10)], hint)


def knows_its_answer(engine: Any, bench: Bench) -> None:
    """its answer is what follows the prompt"""
    seq = sequence(engine, [5, 6, 7])
    expect([], seq.generated, "nothing is generated yet")
    seq.tokens += [8, 9]
    expect([8, 9], seq.generated, "the prompt was 5 6 7, and 8 9 were generated")


def knows_its_end(engine: Any, bench: Bench) -> None:
    """when it has ended"""
    eos = frozenset({1})
    for tokens, generated, params, has_ended, hint in (
        ([5, 6], [], {"max_tokens": 2}, False, "max_tokens counts generated tokens, not those of the prompt"),
        ([5, 6], [7], {"max_tokens": 2}, False, "one of two tokens is generated"),
        ([5, 6], [7, 8], {"max_tokens": 2}, True, "max_tokens are generated"),
        ([5, 6], [7, 1], {"max_tokens": 9}, True, "the last token generated is an EOS token"),
        (
            [5, 6],
            [7, 1],
            {"max_tokens": 9, "ignore_eos": True},
            False,
            "ignore_eos: an EOS token is one like any other",
        ),
        ([5, 1], [], {"max_tokens": 9}, False, "the EOS token is the prompt's last token: it was not generated"),
        ([5, 6], [1, 7], {"max_tokens": 9}, False, "only the last token counts, and that is no EOS token"),
    ):
        seq = sequence(engine, tokens, **params)
        seq.tokens += generated
        expect_answer(has_ended, seq.has_ended(eos), f"for the prompt {tokens} and the answer {generated}: {hint}")


# -- 2. the block manager ----------------------------------------------------------------------------------------------


def refs(manager: Any) -> list[int]:
    return [block.ref_count for block in manager.blocks]


def queue(manager: Any) -> list[int]:
    return list(manager.free_blocks)


def admit(engine: Any, manager: Any, tokens: Any) -> Any:
    """A sequence that is computed as a whole: it has blocks, and those that are full are registered."""
    seq = sequence(engine, tokens, manager.block_size)
    ensure(manager.allocate(seq) is True, f"allocate() refuses {len(seq.tokens)} tokens, and there are enough blocks")
    seq.num_computed = len(seq.tokens)
    manager.register(seq)
    return seq


def hashes_blocks(engine: Any, bench: Bench) -> None:
    """a hash for each content, and its prefix is part of it"""
    hash_block = engine.hash_block
    parent = hash_block(b"", [1, 2, 3, 4])
    ensure(isinstance(parent, bytes), "hash_block returns bytes", got=parent)
    expect(parent, hash_block(b"", [1, 2, 3, 4]), "the same block twice has two hashes")
    ensure(len(parent) >= 16, "nobody compares contents: with so few bytes two blocks will have one hash", got=parent)
    pairs: list[tuple[str, Any, Any]] = [
        ("the order of the tokens matters", (b"", [1, 2, 3, 4]), (b"", [4, 3, 2, 1])),
        ("token ids go far beyond 255", (b"", [1, 2, 3, 4]), (b"", [257, 258, 259, 260])),
        ("where one token ends and the next begins must be clear", (b"", [1, 23, 4, 5]), (b"", [12, 3, 4, 5])),
        (
            "the parent's hash must be part of it: equal tokens have other K/V elsewhere",
            (parent, [5] * 4),
            (b"", [5] * 4),
        ),
    ]
    for hint, one, two in pairs:
        ensure(hash_block(*one) != hash_block(*two), f"two different blocks have one hash: {hint}")


def allocates_fresh(engine: Any, bench: Bench) -> None:
    """fresh blocks come from the head of the queue, or none at all"""
    manager = engine.BlockManager(4, 4)
    seq, more = sequence(engine, range(10)), sequence(engine, range(50, 58))
    expect_answer(True, manager.allocate(seq), "when 3 blocks are needed and 4 are free")
    expect([0, 1, 2], seq.block_table, "10 tokens in blocks of 4 take the three blocks at the head of the queue")
    expect(([1, 1, 1, 0], [3]), (refs(manager), queue(manager)), "ref_counts and free_blocks after 3 blocks were taken")
    expect(0, seq.num_computed, "nothing was cached, so nothing is computed")
    expect_answer(False, manager.allocate(more), "when 2 blocks are needed and 1 is free")
    expect(([], [3]), (more.block_table, queue(manager)), "allocate() has refused, and yet it has taken blocks")


def finds_prefixes(engine: Any, bench: Bench) -> None:
    """the full blocks of a computed prefix are found and shared"""
    manager = engine.BlockManager(8, 4)
    seq = sequence(engine, range(12))
    manager.allocate(seq)
    seq.num_computed = 6
    manager.register(seq)
    hint = "6 of 12 tokens are computed: they fill one block, and only that may be found"
    expect(1, len(manager.hash_to_block), hint)
    seq.num_computed = 12
    manager.register(seq)
    expect(3, len(manager.hash_to_block), "now all 12 tokens are computed: three full blocks can be found")
    again = sequence(engine, [*range(8), 99, 98])
    expect(
        [0, 1],
        [block.block_id for block in manager.find_prefix(again)],
        "find_prefix() of a prompt with 8 tokens in common",
    )
    manager.allocate(again)
    expect([0, 1, 3], again.block_table, "two blocks are shared, and one is fresh")
    expect([2, 2, 1, 1], refs(manager)[:4], "a shared block counts everybody who has it in a table")
    expect(8, again.num_computed, "num_computed is the number of tokens that were found: a step begins there")
    other = sequence(engine, [99, *range(1, 8), 5])
    expect(
        [],
        manager.find_prefix(other),
        "its second block has the tokens of a cached one, after a different prefix: no hit",
    )


def leaves_a_token(engine: Any, bench: Bench) -> None:
    """a prompt that is cached as a whole still computes its last token"""
    manager = engine.BlockManager(8, 4)
    admit(engine, manager, range(8))
    again = sequence(engine, range(8))
    manager.allocate(again)
    hint = (
        "all 8 tokens are cached, but the next token comes from the logits of the last: leave its block out of the hits"
    )
    expect(4, again.num_computed, hint)
    expect([0, 2], again.block_table, hint)


def frees_and_finds_again(engine: Any, bench: Bench) -> None:
    """blocks that are given back stay cached until they are taken"""
    manager = engine.BlockManager(6, 4)
    seq = admit(engine, manager, range(12))
    manager.free(seq)
    expect(([], 0), (seq.block_table, seq.num_computed), "block_table and num_computed of a sequence without blocks")
    expect([0] * 6, refs(manager), "ref_counts after free()")
    hint = "the queue was 3 4 5, and the sequence had 0 1 2: they go to its tail, the last block first"
    expect([3, 4, 5, 2, 1, 0], queue(manager), hint)
    again = sequence(engine, range(10))
    manager.allocate(again)
    expect([0, 1, 3], again.block_table, "blocks 0 and 1 are still cached, and 3 is the head of the queue")
    hint = "a hit that lay in the queue must leave it, or somebody else takes it while it is in use"
    expect([4, 5, 2], queue(manager), hint)


def counts_hits_once(engine: Any, bench: Bench) -> None:
    """hits in the queue are not free blocks as well"""
    manager = engine.BlockManager(4, 4)
    manager.free(admit(engine, manager, range(8)))  # the queue is 2 3 1 0; 1 and 0 are cached
    long = sequence(engine, [*range(8), *range(50, 62)])
    hint = "when 2 blocks are found in the queue of 4, and 3 more are needed: the hits are 2 of the 4"
    try:
        answer = manager.allocate(long)
    except (KeyError, IndexError):
        answer = "it took a block from an empty queue"
    expect_answer(False, answer, hint)
    expect([], long.block_table, f"allocate() has refused, and yet the table has blocks {hint}")
    expect(
        ([0] * 4, [2, 3, 1, 0]), (refs(manager), queue(manager)), "allocate() has refused, and yet something changed"
    )
    fits = sequence(engine, [*range(8), *range(50, 58)])
    expect_answer(True, manager.allocate(fits), "when 2 blocks are found in the queue of 4, and 2 more are needed")


def forgets_what_it_takes(engine: Any, bench: Bench) -> None:
    """a block that is taken can no longer be found, and its copy can"""
    manager = engine.BlockManager(3, 4)
    manager.free(admit(engine, manager, range(8)))
    admit(engine, manager, range(50, 59))
    hint = "all three blocks have been taken by another text, and the first text is still found: its reader would get "
    expect([], manager.find_prefix(sequence(engine, range(9))), f"{hint}the K/V of the other one")
    manager = engine.BlockManager(4, 4)
    pair = [sequence(engine, range(4)) for _ in range(2)]
    for seq in pair:
        manager.allocate(seq)
    for seq in pair:
        seq.num_computed = 4
        manager.register(seq)
    manager.free(pair[1])
    admit(engine, manager, range(50, 62))
    found = [block.block_id for block in manager.find_prefix(sequence(engine, range(5)))]
    expect([0], found, "blocks 0 and 1 had the same content; 1 was taken, and 0 must still be found under their hash")
    manager = engine.BlockManager(4, 4)
    pair = [sequence(engine, range(4)) for _ in range(2)]
    for seq in pair:
        manager.allocate(seq)
        seq.num_computed = 4
    for seq in pair:
        manager.register(seq)
    manager.free(pair[0])
    admit(engine, manager, range(50, 62))
    manager.register(pair[1])
    found = [block.block_id for block in manager.find_prefix(sequence(engine, range(5)))]
    expect([1], found, "blocks 0 and 1 had the same content; 0 was taken, and register() is to make 1 findable now")


def hashes_once(engine: Any, bench: Bench) -> None:
    """no block of a sequence is hashed twice"""
    num_calls, hash_block = 0, engine.hash_block

    def counting(parent_hash: bytes, token_ids: list[int]) -> bytes:
        nonlocal num_calls
        num_calls += 1
        return hash_block(parent_hash, token_ids)

    manager, seq = engine.BlockManager(8, 4), sequence(engine, range(12))
    with replaced(engine, "hash_block", counting):
        for _ in range(2):  # it is preempted, and admitted again
            manager.allocate(seq)
            for num_computed in (4, 10, 12):
                seq.num_computed = num_computed
                manager.register(seq)
            manager.free(seq)
    hint = "find_prefix() and register() asked for 3 blocks again and again, and hashed them anew. With a long text "
    hint += "each step would hash all of it. seq.block_hashes keeps what is known"
    ensure(num_calls <= 3, hint, expected="at most 3 calls of hash_block()", got=num_calls)


def appends_slots(engine: Any, bench: Bench) -> None:
    """a sequence grows block by block"""
    manager = engine.BlockManager(4, 4)
    seq = sequence(engine, range(3))
    manager.allocate(seq)
    for num_tokens, table in ((4, [0]), (5, [0, 1]), (6, [0, 1]), (13, [0, 1, 2, 3])):
        expect_answer(True, manager.append_slots(seq, num_tokens), f"for {num_tokens} tokens and a pool of 4 blocks")
        expect(table, seq.block_table, f"the table after append_slots(seq, {num_tokens}), in blocks of 4")
    expect_answer(False, manager.append_slots(seq, 17), "for 17 tokens, when no block is free")
    expect([0, 1, 2, 3], seq.block_table, "append_slots() has refused, and the table has changed")
    manager = engine.BlockManager(2, 4)
    seq = sequence(engine, range(3))
    manager.allocate(seq)
    expect_answer(False, manager.append_slots(seq, 12), "for 12 tokens: two more blocks are needed, and one is free")
    expect(([0], [1]), (seq.block_table, queue(manager)), "append_slots() has refused, and yet it took a block")


def keeps_its_books(engine: Any, bench: Bench) -> None:
    """after thousands of operations, each hit holds what it should"""
    draw = Random(0)
    manager = engine.BlockManager(12, 4)
    holds: dict[int, list[int]] = {}  # block -> the tokens from the beginning to its end, as computed last
    running: list[Any] = []
    for _ in range(3000):
        if running and draw.random() < 0.45:
            manager.free(running.pop(draw.randrange(len(running))))
        else:
            seq = sequence(engine, [draw.randrange(2) for _ in range(draw.randint(1, 20))])
            if manager.allocate(seq):
                running.append(seq)
                for index, block_id in enumerate(seq.block_table):
                    prefix = seq.tokens[: 4 * (index + 1)]
                    if index < seq.num_computed // 4:
                        expect(prefix, holds[block_id], f"block {block_id} was a hit, and holds another text")
                    holds[block_id] = prefix
                seq.num_computed = len(seq.tokens)
                manager.register(seq)
        if running:
            seq = draw.choice(running)
            more = [draw.randrange(2) for _ in range(draw.randint(1, 4))]
            if len(seq.tokens) < 20 and manager.append_slots(seq, len(seq.tokens) + len(more)):
                seq.tokens += more
                for index, block_id in enumerate(seq.block_table):
                    holds[block_id] = seq.tokens[: 4 * (index + 1)]
                seq.num_computed = len(seq.tokens)
                manager.register(seq)
        counted = Counter(block_id for seq in running for block_id in seq.block_table)
        expect([counted[at] for at in range(12)], refs(manager), "ref_counts: how many tables a block is in")
        free = [at for at in range(12) if not counted[at]]
        expect(free, sorted(queue(manager)), "free_blocks are those that are in no table")


# -- 3. the scheduler --------------------------------------------------------------------------------------------------


def scheduler(engine: Any, num_blocks: int, *, seats: int = 8, budget: int = 64, eos: Any = ()) -> Any:
    return engine.Scheduler(engine.BlockManager(num_blocks, 4), seats, budget, eos)


def step(engine: Any, schedules: Any, token: int = 7) -> list[tuple[int, int, int]]:
    """Make one step, in which each sampled token is this one. The chunks: (first token of the prompt, start, end)."""
    chunks = schedules.schedule()
    ensure(isinstance(chunks, list), "schedule() returns a list of Chunks", got=chunks)
    found = [(chunk.seq.tokens[0], chunk.start, chunk.end) for chunk in chunks]
    schedules.update(chunks, [token] * sum(chunk.reaches_end for chunk in chunks))
    return found


def steps(engine: Any, schedules: Any, *expected: list[tuple[int, int, int]], hint: str) -> None:
    for number, chunks in enumerate(expected, start=1):
        what = f"step {number}, the chunks as (first token, start, end): {hint}"
        expect(chunks, step(engine, schedules), what)


def prompt(name: int, num_tokens: int) -> list[int]:
    """It begins with its name, and is like no other."""
    return [name, *(1000 * name + at for at in range(num_tokens - 1))]


def schedules_one(engine: Any, bench: Bench) -> None:
    """a prompt, then token after token, then the end"""
    schedules = scheduler(engine, 8)
    seq = sequence(engine, prompt(1, 5), max_tokens=3)
    schedules.add(seq)
    hint = "a prompt is computed in one step; after that, each step computes the one token that came last"
    steps(engine, schedules, [(1, 0, 5)], [(1, 5, 6)], hint=hint)
    expect([7, 7], seq.generated, "the sampled tokens must be appended to the sequence")
    last = schedules.schedule()
    expect([seq], schedules.update(last, [7]), "update() returns the sequences that have ended: max_tokens is 3")
    expect(([], []), (list(schedules.waiting), schedules.running), "waiting and running after the only sequence ended")
    expect([0] * 8, refs(schedules.manager), "a sequence that has ended gives its blocks back")


def schedules_in_company(engine: Any, bench: Bench) -> None:
    """who comes later joins those that run, and who ends makes room"""
    schedules = scheduler(engine, 16, seats=2)
    schedules.add(sequence(engine, prompt(1, 6), max_tokens=3))
    steps(engine, schedules, [(1, 0, 6)], hint="sequence 1 is alone")
    for name in (2, 3):
        schedules.add(sequence(engine, prompt(name, 4), max_tokens=9))
    hint = "running sequences come first, then the first that waits; max_num_seqs is 2"
    steps(engine, schedules, [(1, 6, 7), (2, 0, 4)], hint=hint)
    steps(engine, schedules, [(1, 7, 8), (2, 4, 5)], hint="sequence 3 waits until one of two ends")
    steps(engine, schedules, [(2, 5, 6), (3, 0, 4)], hint="sequence 1 has ended, and 3 takes its place at once")


def cuts_prompts(engine: Any, bench: Bench) -> None:
    """a step has at most max_num_batched_tokens, so long prompts come in chunks"""
    schedules = scheduler(engine, 16, budget=8)
    long = sequence(engine, prompt(2, 18), max_tokens=9)
    schedules.add(sequence(engine, prompt(1, 3), max_tokens=9))
    schedules.add(long)
    hint = "the budget is 8 tokens: the running sequence gets its one, and the prompt what is left"
    steps(engine, schedules, [(1, 0, 3), (2, 0, 5)], [(1, 3, 4), (2, 5, 12)], hint=hint)
    expect([], long.generated, "12 of 18 prompt tokens are computed: no token is sampled before the prompt's end")
    steps(engine, schedules, [(1, 4, 5), (2, 12, 18)], [(1, 5, 6), (2, 18, 19)], hint=hint)


def waits_for_blocks(engine: Any, bench: Bench) -> None:
    """who lacks blocks waits, and nobody passes"""
    schedules = scheduler(engine, 5)
    schedules.add(sequence(engine, prompt(1, 10), max_tokens=2))
    for name, length in ((2, 12), (3, 4)):
        schedules.add(sequence(engine, prompt(name, length), max_tokens=2))
    hint = "3 of 5 blocks are taken; sequence 2 needs 3 and waits, and so does 3, which came later"
    steps(engine, schedules, [(1, 0, 10)], hint=hint)
    steps(engine, schedules, [(1, 10, 11)], [(2, 0, 12), (3, 0, 4)], hint="sequence 1 ended: then both fit")


def shares_at_once(engine: Any, bench: Bench) -> None:
    """two prompts of one step share their beginning"""
    schedules = scheduler(engine, 16)
    one, two = (sequence(engine, [*prompt(1, 8), name], max_tokens=3) for name in (5, 6))
    schedules.add(one)
    schedules.add(two)
    hint = "the second begins where the first has filled blocks: register these when the chunk is scheduled, not later"
    steps(engine, schedules, [(1, 0, 9), (1, 8, 9)], hint=hint)
    expect([one.block_table[:2]], [two.block_table[:2]], "both have the first two blocks in their tables")


def preempts(engine: Any, bench: Bench) -> None:
    """without a free block, the last one gives way, and goes on later"""
    schedules = scheduler(engine, 4)
    one, two = sequence(engine, prompt(1, 8), max_tokens=5), sequence(engine, prompt(2, 7), max_tokens=5)
    schedules.add(one)
    schedules.add(two)
    steps(engine, schedules, [(1, 0, 8), (2, 0, 7)], hint="both prompts fit into the 4 blocks")
    schedules.add(sequence(engine, prompt(3, 1), max_tokens=1))
    hint = "sequence 1 needs a third block, and none is free: 2, the last of running, is preempted and waits before 3"
    steps(engine, schedules, [(1, 8, 9)], hint=hint)
    expect(1, schedules.num_preemptions, "num_preemptions")
    expect([2, 3], [seq.tokens[0] for seq in schedules.waiting], "a preempted sequence waits before all others")
    expect(([], [7]), (two.block_table, two.generated), "it loses its blocks and keeps its answer so far")
    expect(0, two.num_computed, "a preempted sequence has nothing computed until it is admitted again")
    for _ in range(12):
        step(engine, schedules)
    expect([7] * 5, two.generated, "after some more steps, sequence 2 has its whole answer")


def preempts_itself(engine: Any, bench: Bench) -> None:
    """the last one may have to give way to those before it"""
    schedules = scheduler(engine, 4)
    for name, length in ((1, 6), (2, 8)):
        schedules.add(sequence(engine, prompt(name, length), max_tokens=4))
    steps(engine, schedules, [(1, 0, 6), (2, 0, 8)], hint="both prompts fit into the 4 blocks")
    hint = "sequence 1 has room; 2 needs a third block, none is free, and it is itself the last of running"
    steps(engine, schedules, [(1, 6, 7)], hint=hint)
    expect([2], [seq.tokens[0] for seq in schedules.waiting], "sequence 2 waits")


def computes_all_once(engine: Any, bench: Bench) -> None:
    """hundreds of requests: each reads its own K/V, and gets all its tokens"""
    draw = Random(1)
    schedules = scheduler(engine, 14, seats=5, budget=12, eos={1})
    cache: dict[int, list[int]] = {}  # slot -> the tokens whose K/V is there, as far as the slot's own
    seqs = [
        sequence(engine, [draw.randint(2, 3) for _ in range(draw.randint(1, 20))], max_tokens=draw.randint(1, 16))
        for _ in range(200)
    ]
    for seq in seqs:
        schedules.add(seq)
    for _ in range(20_000):
        if not schedules.has_unfinished():
            break
        chunks = schedules.schedule()
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        ensure(bool(chunks), "schedule() returns no chunks, though there are unfinished sequences: nobody can go on")
        ensure(num_tokens <= 12, "a step has more tokens than max_num_batched_tokens", expected=12, got=num_tokens)
        ensure(len(schedules.running) <= 5, "more than max_num_seqs run", got=len(schedules.running))
        for chunk in chunks:
            ensure(chunk.start < chunk.end, "an empty chunk", got=(chunk.start, chunk.end))
            for position in range(chunk.start, chunk.end):
                cache[chunk.seq.slot(position)] = chunk.seq.tokens[: position + 1]
        for chunk in chunks:
            for position in range(chunk.end):
                hint = (
                    f"attention at position {position} of a chunk from {chunk.start} to {chunk.end} reads the K/V of "
                )
                expect(chunk.seq.tokens[: position + 1], cache.get(chunk.seq.slot(position)), f"{hint}other tokens")
        sampled = [chunk.seq for chunk in chunks if chunk.reaches_end]
        schedules.update(chunks, [draw.randint(1, 3) if draw.random() < 0.3 else 2 for _ in sampled])
    ensure(not schedules.has_unfinished(), "200 short requests are not done after 20,000 steps")
    for seq in seqs:
        ensure(seq.has_ended({1}), "a sequence runs no more, and has not got all its tokens", got=seq.generated)
    ensure(schedules.num_preemptions > 0, "the pool is small, and nobody was ever preempted: count num_preemptions")
    expect([0] * 14, refs(schedules.manager), "ref_counts when all have ended")


# -- 4. the batch ------------------------------------------------------------------------------------------------------

FIELDS = {
    "input_ids": "the tokens from start to end of each chunk, one chunk after the other",
    "positions": "a token's position in its sequence, which goes on where the chunk before ended",
    "slot_mapping": "where each token's K and V go: seq.slot() of its position",
    "cu_seqlens_q": "it begins with 0 and then says where each chunk's rows end",
    "seqlens_k": "the last row of a chunk sees all keys up to its own, also those that earlier steps have computed",
    "block_tables": "a row for each sequence; shorter ones are filled up with 0",
    "logits_rows": "the last row of each chunk that reaches its end; a chunk that ends inside a prompt has none",
}


def packs(engine: Any, bench: Bench) -> None:
    """a chunk inside a prompt, a decode, and a whole prompt, as tensors"""
    inside, decode, whole = (sequence(engine, tokens) for tokens in (range(10, 22), range(30, 36), range(50, 53)))
    inside.block_table, decode.block_table, whole.block_table = [5, 2, 7], [1, 3], [4]
    batch = engine.make_batch([engine.Chunk(inside, 4, 9), engine.Chunk(decode, 5, 6), engine.Chunk(whole, 0, 3)])
    expected: dict[str, list] = {
        "input_ids": [14, 15, 16, 17, 18, 35, 50, 51, 52],
        "positions": [4, 5, 6, 7, 8, 5, 0, 1, 2],
        "slot_mapping": [8, 9, 10, 11, 28, 13, 16, 17, 18],
        "cu_seqlens_q": [0, 5, 6, 9],
        "seqlens_k": [9, 6, 3],
        "block_tables": [[5, 2, 7], [1, 3, 0], [4, 0, 0]],
        "logits_rows": [5, 8],
    }
    for name, values in expected.items():
        got = getattr(batch, name)
        ensure(isinstance(got, Tensor), f"{name} is a tensor", got=got)
        expect(values, got.tolist(), f"{name}: {FIELDS[name]}")
        expect(torch.int64, got.dtype, f"the dtype of {name}")


def packs_without_logits(engine: Any, bench: Bench) -> None:
    """a step in which nobody samples"""
    seq = sequence(engine, range(12))
    seq.block_table = [2, 0, 1]
    rows = engine.make_batch([engine.Chunk(seq, 0, 8)]).logits_rows
    expect_form(
        torch.empty(0, dtype=torch.int64), rows, "logits_rows without a row: indexes are int64, even if there are none"
    )


# -- 5. the model ------------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    **SIZES,
    "architecture": "LlamaForCausalLM",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default"},
    "dtype": "float32",
}
CONFIG |= dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False)


def modeling_llama() -> Any:
    """transformers' module. It takes seconds to import, and the steps before the model do not compare with it."""
    from transformers.models.llama import modeling_llama

    return modeling_llama


def their_config() -> Any:
    sizes = {**SIZES, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attn_implementation": "eager"}
    return modeling_llama().LlamaConfig(**sizes)


def config(**changed: Any) -> ModelConfig:
    return ModelConfig(**CONFIG | {"tie_word_embeddings": True} | changed)


def near(expected: Tensor, got: Any, hint: str) -> None:
    ensure(isinstance(got, Tensor), f"no tensor came back: {hint}", got=got)
    expect_form(expected, got, f"shape and dtype: {hint}")
    off = differs(expected, got, 1e-4, 1e-4)
    if bool(off.any()):
        at = [int(each) for each in off.nonzero()[0]]
        raise Wrong(
            f"{hint}; the first number that differs is at {at}",
            expected=float(expected[tuple(at)]),
            got=float(got[tuple(at)]),
        )


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def norms(engine: Any, bench: Bench) -> None:
    """RMSNorm"""
    ours, theirs = engine.RMSNorm(8, 0.5), modeling_llama().LlamaRMSNorm(8, 0.5)
    for norm in (ours, theirs):
        norm.weight.data = torch.arange(1.0, 9.0)
    with torch.no_grad():
        x = random(3, 8)
        hint = "RMSNorm of rows of 8 numbers: the mean is over a row's squares, eps is added before the root, and the "
        near(theirs(x), ours(x), f"{hint}mean of the row is not subtracted")


def rotates(engine: Any, bench: Bench) -> None:
    """the rotary embedding"""
    positions = torch.tensor([0, 1, 5, 300])
    cos, sin = engine.rotary_cos_sin(positions, 16, 10000.0)
    double = modeling_llama().LlamaRotaryEmbedding(their_config())(torch.zeros(1), positions[None])
    hint = "rotary_cos_sin for positions 0, 1, 5, 300 and heads of 16: angle i is position * theta ** (-2i / 16)"
    for expected, got, name in zip(double, (cos, sin), ("cosines", "sines"), strict=True):
        near(expected[0, :, :8], got, f"{name}: {hint}")
    x = random(4, 2, 16)
    expected, _ = modeling_llama().apply_rotary_pos_emb(x[None], x[None], *double, unsqueeze_dim=2)
    hint = (
        "rotate() of a [4, 2, 16] tensor: numbers i and i + 8 are a pair, (a, b) becomes (a cos - b sin, b cos + a sin)"
    )
    near(expected[0], engine.rotate(x, cos, sin), hint)


def course_batch(*of: tuple[int, int, int, list[int]]) -> Batch:
    """Of each sequence: number of its tokens, start and end of its chunk, block table. Blocks of 4."""
    chunks = []
    for num_tokens, start, end, table in of:
        seq = Sequence([(7 * at + num_tokens) % 300 for at in range(num_tokens)])
        seq.block_table = table
        chunks.append(ScheduledChunk(seq, start, end, start))
    return Batch.from_scheduler_output(SchedulerOutput(chunks, [], sum(end - start for _, start, end, _ in of)), 4)


def as_theirs(engine: Any, batch: Batch) -> Any:
    """The same, as the student's class has it."""
    return engine.Batch(**{name: getattr(batch, name).long() for name in FIELDS})


BATCHES = {
    "a prompt of 6 tokens in blocks 0 and 1: row i sees keys 0 to i": [(6, 0, 6, [0, 1])],
    "one row at position 6, with blocks 3, 1: it sees 7 keys, found through the table": [(7, 6, 7, [3, 1])],
    "a chunk from 3 to 6: its rows see the keys before it, too": [(9, 3, 6, [2, 4, 0])],
    "two sequences in one batch: none sees the other's keys": [(6, 5, 6, [3, 1]), (5, 0, 5, [4, 0])],
}


def attends(engine: Any, bench: Bench) -> None:
    """paged attention"""
    k_cache, v_cache = random(6, 4, 2, 16), random(6, 4, 2, 16) + 1
    for what, sequences in BATCHES.items():
        batch = course_batch(*sequences)
        q = random(len(batch.input_ids), 4, 16)
        expected = paged_attention(q, k_cache, v_cache, batch)
        got = engine.paged_attention(q, k_cache, v_cache, as_theirs(engine, batch))
        near(expected, got, f"{what}. Query heads 0 and 1 share KV head 0, 2 and 3 share KV head 1")


def names_its_weights(engine: Any, bench: Bench) -> None:
    """the model's parameters have the checkpoint's names"""
    layer = {
        "input_layernorm": [64],
        "self_attn.qkv_proj": [128, 64],
        "self_attn.o_proj": [64, 64],
        "post_attention_layernorm": [64],
        "mlp.gate_up_proj": [192, 64],
        "mlp.down_proj": [64, 96],
    }
    shapes = {f"layers.{at}.{name}.weight": shape for at in range(3) for name, shape in layer.items()}
    shapes |= {"embed_tokens.weight": [320, 64], "norm.weight": [64]}
    for is_tied in (True, False):
        got = engine.Llama(config(tie_word_embeddings=is_tied)).named_parameters()
        found = {name: list(parameter.shape) for name, parameter in got}
        expected = shapes if is_tied else shapes | {"lm_head.weight": [320, 64]}
        said = f"tie_word_embeddings is {is_tied}"
        tied = "; a tied lm_head.weight is the same parameter, and has no name of its own" if is_tied else ""
        expect([], sorted(expected.keys() - found.keys()), f"parameters that Llama lacks ({said})")
        expect([], sorted(found.keys() - expected.keys()), f"parameters that Llama has too many ({said}{tied})")
        expect(expected, found, f"the shapes of Llama's parameters ({said})")


def model_pair(engine: Any) -> tuple[Any, Any]:
    """The student's model and transformers', with the same random weights."""
    model, theirs = engine.Llama(config()), modeling_llama().LlamaForCausalLM(their_config())
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + noise / 10 if name.endswith("norm.weight") else noise / 8
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        for merged, names in parts.items():
            if merged in name:
                sizes = [64, 32, 32] if merged == "qkv_proj" else [96, 96]
                split = parameter.data.split(sizes)
                weights |= {
                    f"model.{name.replace(merged, each)}": part for each, part in zip(names, split, strict=True)
                }
                break
        else:
            weights[f"model.{name}"] = parameter.data
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    theirs.load_state_dict(weights)
    return model, theirs


@torch.no_grad()
def computes_mlp(engine: Any, bench: Bench) -> None:
    """the MLP"""
    model, theirs = model_pair(engine)
    x = random(5, 64)
    hint = "MLP of [5, 64]: down_proj(silu(gate) * up), and gate has the first half of gate_up_proj's rows"
    near(theirs.model.layers[0].mlp(x), model.layers[0].mlp(x), hint)


@torch.no_grad()
def computes_logits(engine: Any, bench: Bench) -> None:
    """the whole model, with a cache in blocks"""
    model, theirs = model_pair(engine)
    cache = torch.zeros(3, 2, 8, 4, 2, 16)
    for what, sequences in {
        "a prompt of 6 tokens in blocks 5 and 2": [(6, 0, 6, [5, 2])],
        "two prompts in one step; of the second, 5 of 9 tokens": [(7, 0, 7, [1, 6]), (9, 0, 5, [3, 0, 7])],
        "the rest of the second prompt. Is this step's K/V written before attention reads?": [(9, 5, 9, [3, 0, 7])],
        "a decode: the first five tokens are in the cache from the step before": [(9, 8, 9, [3, 0, 7])],
    }.items():
        batch = course_batch(*sequences)
        expected = [
            theirs(torch.tensor([[(7 * at + num_tokens) % 300 for at in range(num_tokens)]])).logits[0, -1]
            for num_tokens, _, end, _ in sequences
            if end == num_tokens
        ]
        got = model(as_theirs(engine, batch), cache)
        near(torch.stack(expected), got, f"the logits of the last row of each sequence that samples: {what}")
    ensure(
        bool((cache[:, :, 3, 0].abs().sum((-1, -2)) > 0).all()),
        "kv_cache itself must be written, K and V of each layer",
    )


# -- 6. its weights ----------------------------------------------------------------------------------------------------


def loaded(engine: Any, folder: str, is_tied: bool = True) -> dict[str, Tensor]:
    """The model's parameters after load_weights(), which were NaN before."""
    model = engine.Llama(config(tie_word_embeddings=is_tied))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    engine.load_weights(model, Path(folder))
    return {name: parameter.data for name, parameter in model.named_parameters()}


def loads(engine: Any, bench: Bench) -> None:
    """each weight lands in its place, and merged ones in their order"""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_llama(Path(folder))
        weights, stored = loaded(engine, folder), load_file(f"{folder}/model.safetensors")
    for name, rows, source in (
        ("embed_tokens", slice(None), "embed_tokens"),
        ("layers.1.self_attn.qkv_proj", slice(0, 64), "layers.1.self_attn.q_proj"),
        ("layers.1.self_attn.qkv_proj", slice(64, 96), "layers.1.self_attn.k_proj"),
        ("layers.1.self_attn.qkv_proj", slice(96, 128), "layers.1.self_attn.v_proj"),
        ("layers.2.mlp.gate_up_proj", slice(0, 96), "layers.2.mlp.gate_proj"),
        ("layers.2.mlp.gate_up_proj", slice(96, 192), "layers.2.mlp.up_proj"),
        ("layers.0.mlp.down_proj", slice(None), "layers.0.mlp.down_proj"),
        ("norm", slice(None), "norm"),
    ):
        place = f"{name}.weight" if rows == slice(None) else f"rows {rows.start} to {rows.stop} of {name}.weight"
        near(stored[f"model.{source}.weight"], weights[f"{name}.weight"][rows], f"{place} is model.{source}.weight")
    left = [name for name, weight in weights.items() if bool(weight.isnan().any())]
    expect([], left, "weights that were not loaded, or in part")


def loads_several_files(engine: Any, bench: Bench) -> None:
    """a checkpoint in several files, whose head is not tied"""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_llama(Path(folder), is_tied=False, num_files=3)
        weights = loaded(engine, folder, is_tied=False)
        stored: dict[str, Tensor] = {}
        for file in Path(folder).glob("*.safetensors"):
            stored |= load_file(file)
    hint = 'lm_head.weight: a head that is not tied is in the checkpoint, and has no "model." before its name'
    near(stored["lm_head.weight"], weights["lm_head.weight"], hint)
    near(stored["model.norm.weight"], weights["norm.weight"], "norm.weight, with three files: read all of them")


def loads_bfloat16(engine: Any, bench: Bench) -> None:
    """weights in bfloat16 become float32"""
    with tempfile.TemporaryDirectory() as folder:
        file = make_tiny_llama(Path(folder)) / "model.safetensors"
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
        dtypes = {str(weight.dtype) for weight in loaded(engine, folder).values()}
    expect({"torch.float32"}, dtypes, "the model's dtypes: copy the numbers into its parameters, which are float32")


def misses_a_weight(engine: Any, bench: Bench) -> None:
    """a weight that is missing is an error, not noise"""
    with tempfile.TemporaryDirectory() as folder:
        file = make_tiny_llama(Path(folder)) / "model.safetensors"
        weights = load_file(file)
        for missing in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
            save_file({name: weight for name, weight in weights.items() if name != missing}, file)
            try:
                loaded(engine, folder)
            except (KeyError, ValueError):
                continue
            raise Wrong(f"{missing} is not in the file, and load_weights() says nothing: raise KeyError")


# -- 7. the sampler ----------------------------------------------------------------------------------------------------


def drawn(engine: Any, logits: Tensor, seed: int, num_generated: int = 0, **params: Any) -> int:
    seq = sequence(engine, [5], seed=seed, **params)
    seq.tokens += [9] * num_generated
    [token_id] = engine.sample(logits[None], [seq])
    return int(token_id)


def takes_the_most_likely(engine: Any, bench: Bench) -> None:
    """temperature 0, for each row its own"""
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0], [0.0, 1.0, 9.0]])
    seqs = [sequence(engine, [5]) for _ in range(3)]
    got = engine.sample(logits, seqs)
    expect([1, 0, 2], got, "with temperature 0 each row gets the token with its largest logit, in a list of int")
    expect({int}, {type(token_id) for token_id in got}, "the tokens are ints of Python")


def draws_noise(engine: Any, bench: Bench) -> None:
    """a number for each token of each seed"""
    numbers = {}
    for seed in range(40):
        for num_generated in range(40):
            seq = sequence(engine, [5, 6], seed=seed)
            seq.tokens += [9] * num_generated
            numbers[seed, num_generated] = engine.noise(seq)
    ensure(
        all(0 <= number < 1 for number in numbers.values()), "noise() is a number in [0, 1)", got=max(numbers.values())
    )
    again = sequence(engine, [8, 8, 8], seed=3)
    again.tokens += [1, 2]
    hint = "noise() depends on the seed and on how many tokens are generated, not on which, and not on the prompt"
    expect(numbers[3, 2], engine.noise(again), hint)
    ensure(numbers[3, 0] != numbers[3, 1], "the second token gets the number of the first: the place must matter")
    ensure(numbers[3, 0] != numbers[4, 0], "seeds 3 and 4 have one number: the seed must matter")
    many = len(set(numbers.values()))
    hint = "of 1,600 numbers, for 40 seeds and 40 places, many are equal. Has seed 4, place 5 that of seed 5, place 4?"
    ensure(many > 1590, hint, got=f"{many} different numbers")
    low = sum(number < 0.5 for number in numbers.values())
    ensure(700 < low < 900, "of 1,600 numbers, about half are below 0.5", got=low)


def draws_by_shares(engine: Any, bench: Bench) -> None:
    """temperature 1 draws by the shares, and others change them"""
    shares = torch.tensor([0.5, 0.1, 0.4])
    for temperature, expected in ((1.0, [0.5, 0.1, 0.4]), (0.5, [0.595, 0.024, 0.381]), (2.0, [0.415, 0.186, 0.399])):
        counts = Counter(drawn(engine, shares.log(), seed, temperature=temperature) for seed in range(3000))
        got = [round(counts[token_id] / 3000, 3) for token_id in range(3)]
        hint = f"how often tokens with shares 50, 10 and 40 % are drawn at temperature {temperature:g}: logits are "
        hint += "divided by it, before softmax"
        if any(abs(a - b) > 0.04 for a, b in zip(expected, got, strict=True)):
            raise Wrong(hint, expected=expected, got=got)
    never = torch.tensor([-torch.inf, 0.0, -torch.inf])
    got_tokens = {drawn(engine, never, seed, temperature=1.0) for seed in range(200)}
    expect({1}, got_tokens, "a token whose logit is -infinity has no share, and is never drawn")
    logits = random(64, 300)
    with replaced(engine, "noise", lambda seq: 1 - 2**-53):
        last = engine.sample(logits, [sequence(engine, [5], temperature=1.0) for _ in logits])
    hint = "noise() may be as near to 1 as a float can be, and rounded shares may add up to less: there must be a token"
    ensure(max(last) < 300, f"{hint}, and there are 300", got=f"token {max(last)}")


def draws_the_same_in_company(engine: Any, bench: Bench) -> None:
    """a request draws the same, whoever is beside it"""
    logits = random(4, 50)
    alone = [drawn(engine, logits[row], 7 + row, 3, temperature=0.8) for row in range(4)]
    seqs = [sequence(engine, [5], seed=7 + row, temperature=0.8) for row in range(4)]
    for seq in seqs:
        seq.tokens += [9] * 3
    hint = "four requests draw other tokens together than each alone: take noise(seq), and no global generator"
    expect(alone, list(engine.sample(logits, seqs)), hint)
    mixed = [sequence(engine, [5]), seqs[1]]
    expected = [int(logits[0].argmax()), alone[1]]
    expect(
        expected, list(engine.sample(logits[:2], mixed)), "one request with temperature 0, one with 0.8, in one step"
    )


# -- 8. the engine -----------------------------------------------------------------------------------------------------

ANSWER = {"max_tokens": 12, "ignore_eos": True}


@contextmanager
def watched(engine: Any) -> Iterator[list[int]]:
    """How many tokens each step computes, as make_batch() sees them."""
    sizes: list[int] = []
    make_batch = engine.make_batch

    def noting(chunks: list[Any]) -> Any:
        sizes.append(sum(chunk.end - chunk.start for chunk in chunks))
        return make_batch(chunks)

    with replaced(engine, "make_batch", noting):
        yield sizes


def answers_as_the_course(engine: Any, bench: Bench) -> None:
    """the tokens of the course's engine, from an empty cache and from a full one"""
    expected = bench.expected_tokens
    llm = engine.LLM(bench.model, block_size=4)
    with watched(engine) as cold:
        first = llm.generate(PROMPTS, engine.SamplingParams(**ANSWER))
    bench.same_tokens(expected, [answer["token_ids"] for answer in first])
    for tokens, answer in zip(expected, first, strict=True):
        text = bench.llm.get_tokenizer().decode(tokens)
        expect(text, answer["text"], 'answer["text"] is the text of the generated tokens, without the prompt')
    with watched(engine) as cached:
        again = llm.generate(PROMPTS, engine.SamplingParams(**ANSWER))
    if [answer["token_ids"] for answer in again] != expected:
        raise Wrong(
            "the same prompts again, which are in the cache now, get other tokens: does a hit hold its own K/V?"
        )
    what = f"{sum(cold)} tokens were computed the first time, {sum(cached)} the second"
    ensure(sum(cached) < sum(cold), f"nothing was found in the cache: {what}")


def answers_in_a_small_pool(engine: Any, bench: Bench) -> None:
    """the same tokens from a pool so small that it preempts, and in small steps"""
    expected = bench.expected_tokens
    lengths = [len(bench.llm.get_tokenizer()(text).input_ids) for text in PROMPTS]
    num_blocks = sum(-(-length // 4) for length in lengths) + 1
    llm = engine.LLM(bench.model, block_size=4, num_blocks=num_blocks, max_num_batched_tokens=8)
    answers = llm.generate(PROMPTS, engine.SamplingParams(**ANSWER))
    bench.same_tokens(expected, [answer["token_ids"] for answer in answers])
    ensure(llm.scheduler.num_preemptions > 0, f"{num_blocks} blocks are too few for all, and nobody was preempted")


def batches(engine: Any, bench: Any) -> None:
    """eight requests take hardly more steps than one"""
    prompts = [[token, *range(10, 20)] for token in range(100, 108)]
    llm = engine.LLM(bench.tiny)
    with watched(engine) as together:
        answers = llm.generate(prompts, engine.SamplingParams(**ANSWER))
    with watched(engine) as alone:
        for each, answer in zip(prompts, answers, strict=True):
            hint = "a prompt alone gets other tokens than with seven others"
            expect(llm.generate([each], engine.SamplingParams(**ANSWER)), [answer], hint)
    hint = (
        f"8 requests of 12 tokens take {len(together)} steps together, and {len(alone)} one by one: queue all of them, "
    )
    ensure(len(together) <= 14, f"{hint}then make steps", expected="at most 14 steps", got=len(together))


def ends_each(engine: Any, bench: Any) -> None:
    """each request ends in its own time"""
    llm = engine.LLM(bench.tiny, max_num_seqs=2)
    seqs = [
        llm.add_request([50 + number, 60], engine.SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        for number, max_tokens in enumerate((4, 1, 2))
    ]
    ended = []
    while llm.scheduler.has_unfinished():
        ended.append([seqs.index(seq) for seq in llm.step()])
    expect([[1], [], [2], [0]], ended, "answers of 4, 1 and 2 tokens, two at a time: what step() returns, by index")
    expect([4, 1, 2], [len(seq.generated) for seq in seqs], "the lengths of the answers")


def ends_at_eos(engine: Any, bench: Any) -> None:
    """an EOS token ends an answer, and answers keep the order of their prompts"""
    llm = engine.LLM(bench.tiny)
    eos = next(iter(read_checkpoint(Path(bench.tiny))[0].eos_token_ids))
    with torch.no_grad():
        weight = llm.model.embed_tokens.weight
        weight[eos] = 0
        weight[eos + 1 :] = 0
        hidden = weight[:eos].mean(0)
        weight[eos] = 1000 * hidden / hidden.norm()  # its logit is far above all others, or far below
    prompts = [[token, 7] for token in range(20, 40)]
    params = engine.SamplingParams(max_tokens=6)
    alone = [llm.generate([each], params)[0]["token_ids"] for each in prompts]
    ensure([eos] in alone, "the model says EOS, and the answer goes on", got=alone[:3])
    together = [answer["token_ids"] for answer in llm.generate(prompts, params)]
    expect(
        alone, together, "20 prompts, whose answers end at different times: answers come in the order of the prompts"
    )


def refuses(engine: Any, bench: Any) -> None:
    """what can never be computed is refused"""
    llm = engine.LLM(bench.tiny, num_blocks=4, block_size=4)
    try:
        seq = llm.add_request(list(range(10)), engine.SamplingParams(max_tokens=6, ignore_eos=True))
    except ValueError as error:
        hint = "a prompt of 10 tokens and an answer of up to 6 fit into 16 slots, and add_request() refuses them"
        raise Wrong(hint, got=f"ValueError: {error}") from None
    while llm.scheduler.has_unfinished():
        llm.step()
    expect(6, len(seq.generated), "the length of the answer to a request that just fits into the pool")
    for tokens, max_tokens in (([], 4), (list(range(10)), 7), (list(range(17)), 1)):
        what = f"a prompt of {len(tokens)} tokens, an answer of up to {max_tokens}, and a pool of 16 slots"
        try:
            llm.add_request(tokens, engine.SamplingParams(max_tokens=max_tokens))
        except ValueError:
            expect(0, len(llm.scheduler.waiting), f"{what}: it was refused, and yet it waits")
        else:
            raise Wrong(f"{what}: add_request() must raise ValueError, or this request would never end")
    try:
        llm.generate([list(range(5)), list(range(17))], engine.SamplingParams(max_tokens=1))
    except ValueError:
        expect(
            0, len(llm.scheduler.waiting), "generate() has refused the second of two prompts, and the first one waits"
        )
    else:
        raise Wrong("generate() must raise ValueError if one of its prompts can never be computed")


def draws_the_same(engine: Any, bench: Any) -> None:
    """with a temperature, the same tokens alone and in company"""
    prompts = [[token, *range(10, 20)] for token in range(100, 104)]
    params = engine.SamplingParams(temperature=1.0, seed=5, **ANSWER)
    alone = [engine.LLM(bench.tiny).generate([each], params)[0]["token_ids"] for each in prompts]
    tight = engine.LLM(bench.tiny, num_blocks=14, block_size=4)
    got = [answer["token_ids"] for answer in tight.generate(prompts, params)]
    expect(alone, got, "the same seeds draw other tokens in company, in a pool that preempts")


# -- the steps ---------------------------------------------------------------------------------------------------------


def nothing(engine: Any) -> Any:
    return nullcontext()


BLOCKS = allocates_fresh, finds_prefixes, leaves_a_token, frees_and_finds_again, counts_hits_once, forgets_what_it_takes
COMPANY = schedules_one, schedules_in_company, cuts_prompts, waits_for_blocks, shares_at_once, preempts, preempts_itself
CHECKS: dict[str, tuple[Any, ...]] = {
    "Sequence": (counts_its_blocks, finds_its_slots, knows_its_answer, knows_its_end),
    "BlockManager": (hashes_blocks, *BLOCKS, hashes_once, appends_slots, keeps_its_books),
    "Scheduler": (*COMPANY, computes_all_once),
    "make_batch": (packs, packs_without_logits),
    "Llama": (norms, rotates, attends, names_its_weights, computes_mlp, computes_logits),
    "load_weights": (loads, loads_several_files, loads_bfloat16, misses_a_weight),
    "sample": (takes_the_most_likely, draws_noise, draws_by_shares, draws_the_same_in_company),
    "LLM": (batches, answers_as_the_course, answers_in_a_small_pool, ends_each, ends_at_eos, refuses, draws_the_same),
}
TASKS = [Task(name, heading(number), nothing, CHECKS[name]) for number, name in enumerate(STEPS, start=1)]
