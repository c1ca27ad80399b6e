"""What the exercises of chapter 7 are tried with: small pools, the worked example, the real scheduler, a model."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from chapters.expect import Wrong, expect, expect_answer, expect_sane, read_again
from chapters.grading import Bench, NoModel, answers_as_before
from chapters.patching import our_engine, replaced, use_manager
from chapters.stage import Stage, compute
from nanovllm import SamplingParams
from nanovllm.core.block_hash import MMSpan
from nanovllm.core.block_manager import Block, BlockManager, Content
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.sequence import Sequence

# -- small pools ------------------------------------------------------------------------------------------------------


def pool(num_blocks: int, caching: bool = True, free_order: str = "uncached_first") -> BlockManager:
    """Blocks of 4. Misuse is noticed where it happens."""
    manager = BlockManager(num_blocks, 4, enable_prefix_caching=caching, free_order=free_order)
    hash_block, remove = manager.hash_block, manager.free_blocks.remove

    def watched_name_block(seq: Sequence, index: int) -> tuple[bytes, Content]:
        if not manager.enable_prefix_caching:
            raise Wrong("hash_block was called, although caching is off: then nothing may be hashed")
        if (index + 1) * manager.block_size > len(seq.tokens):
            what = f"hash_block was asked for block {index} of {len(seq.tokens)} tokens in blocks of 4"
            raise Wrong(f"{what}. Only full blocks have hashes: round down; a partly filled one will get more tokens")
        return hash_block(seq, index)

    def watched_remove(block: Block) -> None:
        if block.next_free is None:
            raise Wrong(
                f"free_blocks.remove(block {block.block_id}), which is not in the free queue: a hit is in it only if "
                "nobody is using it (ref_count is 0 before you raise it), and only once"
            )
        remove(block)

    manager.hash_block = watched_name_block
    manager.free_blocks.remove = watched_remove
    return manager


def extend(manager: BlockManager, seq: Sequence, *token_ids: int) -> None:
    """Append tokens, make room for them and register what is full. Without tokens: the prompt."""
    seq.tokens += token_ids
    assert manager.append_slots(seq, len(seq.tokens) - seq.num_computed_tokens)
    compute(manager, seq)


def admit(manager: BlockManager, token_ids: Any, **keys: Any) -> Sequence:
    """A sequence whose prompt is computed."""
    seq = Sequence(list(token_ids), **keys)
    expect_answer(True, manager.allocate_with_prefix(seq), "when the pool has room")
    extend(manager, seq)
    return seq


def prepared(manager: BlockManager, tokens: Any, num_computed: int) -> Sequence:
    """Admitted, computed up to num_computed, not yet registered."""
    seq = Sequence(list(tokens))
    assert manager.allocate_with_prefix(seq)
    seq.num_computed_tokens = num_computed
    return seq


def cached(manager: BlockManager) -> list[int]:
    return [block.block_id for block in manager.blocks if block.block_hash is not None]


def listed(manager: BlockManager) -> list[list[int]]:
    """Which blocks have the same hash, according to the map."""
    return [list(copies) for copies in manager.hash_to_block.values()]


def refs(manager: BlockManager) -> list[int]:
    return [block.ref_count for block in manager.blocks]


def counts(manager: BlockManager) -> dict[str, int]:
    return {name: getattr(manager.stats, name) for name in ("queries", "hits", "misses", "evictions", "collisions")}


def state(manager: BlockManager, seq: Sequence) -> dict[str, Any]:
    fields = ("block_table", "num_cached_tokens", "num_computed_tokens", "num_registered_blocks", "hash_collision")
    return {
        "reference counts": refs(manager),
        "free queue": list(manager.free_blocks),
        "hash_to_block": listed(manager),
        "statistics": counts(manager),
        **{f"seq.{name}": getattr(seq, name) for name in fields},
        "seq.block_table": list(seq.block_table),
    }


@read_again("The worked example, step by step")
def worked_example(function: Any, bench: Bench) -> None:
    """the worked example of vLLM's documents: ten blocks of 4, three requests"""
    manager = pool(10, free_order="release")
    first = list(range(100, 115))

    def see(when: str, seq: Sequence, table: list[int], num_cached: int, queue: list[int], in_cache: list[int]) -> None:
        expect(table, seq.block_table, f"worked example, {when}: the block table is wrong")
        expect(num_cached, seq.num_cached_tokens, f"worked example, {when}: num_cached_tokens is wrong")
        expect(queue, list(manager.free_blocks), f"worked example, {when}: the free queue is wrong")
        expect(in_cache, cached(manager), f"worked example, {when}: different blocks should be cached")
        expect_sane(manager, f"worked example, {when}: ")

    r0 = admit(manager, first)
    see("request 0 with 15 tokens", r0, [0, 1, 2, 3], 0, [4, 5, 6, 7, 8, 9], [0, 1, 2])
    extend(manager, r0, 115)
    see("request 0 has filled block 3", r0, [0, 1, 2, 3], 0, [4, 5, 6, 7, 8, 9], [0, 1, 2, 3])
    extend(manager, r0, 116)
    see("request 0 has gone on in block 4", r0, [0, 1, 2, 3, 4], 0, [5, 6, 7, 8, 9], [0, 1, 2, 3])
    r1 = admit(manager, [*first[:10], 201, 202, 203, 204])
    when = "request 1 with 14 tokens, 10 of them like request 0"
    see(when, r1, [0, 1, 5, 6], 8, [7, 8, 9], [0, 1, 2, 3, 5])
    expect([2, 2, 1], refs(manager)[:3], f"worked example, {when}: reference counts of blocks 0 to 2")
    manager.free(r0)
    see("request 0 has ended", r1, [0, 1, 5, 6], 8, [7, 8, 9, 4, 3, 2], [0, 1, 2, 3, 5])
    manager.free(r1)
    see("request 1 has ended", r1, [], 8, [7, 8, 9, 4, 3, 2, 6, 5, 1, 0], [0, 1, 2, 3, 5])
    r2 = Sequence([*first[:12], *range(300, 317)])
    when = "request 2 with 29 tokens, 12 of them like request 0"
    expect_answer(True, manager.allocate_with_prefix(r2), f"in the worked example, {when}")
    see(when, r2, [0, 1, 2, 7, 8, 9, 4, 3], 12, [6, 5], [0, 1, 2, 5])
    expect(1, manager.stats.evictions, f"worked example, {when}: block 3 was cached and is evicted, no other")


# -- larger trials, the same for all ----------------------------------------------------------------------------------


def make_requests() -> list[Sequence]:
    """Prompts that begin alike. Some have a salt, an adapter or an image, some are equal, some end with a block."""
    system, cat, dog = list(range(1, 11)), MMSpan(9, 9, "cat"), MMSpan(9, 9, "dog")
    image = [*system[:9], *[700] * 9]
    rows: list[tuple[list[int], dict[str, Any]]] = [
        (system[:8], {}),
        ([*system, 21, 22, 23], {}),
        ([*system, 21, 22, 23], {}),
        ([*system, *range(31, 45)], {}),
        (system[:8], dict(cache_salt="a")),
        ([*system, 21, 22], dict(cache_salt="a")),
        ([*image, 51], dict(mm_spans=(cat,))),
        ([*image, 52, 53, 54, 55], dict(mm_spans=(dog,))),
        ([*image, 52, 53, 54, 55], dict(mm_spans=(cat,))),
        ([*system, 256, 257, 2**32 - 1], dict(lora_id=1)),
        ([*system, 256, 257, 2**32 - 1], dict(lora_id=2)),
        ([*system, 256, 257, 2**32 - 1], {}),
        (system[:8], {}),
        ([*system, *range(31, 45)], {}),
    ]
    sizes = itertools.cycle((9, 5, 12, 7))
    return [Sequence(tokens, SamplingParams(max_tokens=next(sizes)), **keys) for tokens, keys in rows]


def runs_in_the_scheduler(function: Any, bench: Bench) -> None:
    """the real scheduler: fourteen requests in eleven blocks, chunks, evictions, preemption"""
    for caching in (True, False):
        ours, theirs = make_stage(caching), make_stage(caching)
        lengths = " ".join(f"{name} {seq.num_prompt_tokens}" for name, seq in ours.seqs.items())
        while ours.has_unfinished():
            with our_engine():
                expected = ours.step()
            hint = (
                f"in the real scheduler, step {len(ours.steps)}, a different step than with our function (A 4..9 is "
                "positions 4 to 8 of A). Is less or more found than there is? Do references or blocks get lost? "
                f"Lengths of the prompts: {lengths}"
            )
            theirs.expect_step(ours.describe(expected), hint)
        hint = "all sequences have ended, so all 11 blocks must be in the free queue"
        expect(11, len(theirs.manager.free_blocks), hint)
        hint = "in the real scheduler: different counts than with our function"
        expect(counts(ours.manager), counts(theirs.manager), hint)


def make_stage(caching: bool) -> Stage:
    """The requests, and a pool that is too small for them."""
    stage = Stage(11, enable_prefix_caching=caching, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40)
    for seq in make_requests():
        stage.enter(seq)
    return stage


TEXT = (
    "The old lighthouse keeper counted the ships every evening and wrote their names into a book with a green cover. "
    "When the fog came in from the north he lit the great lamp and stayed awake until the morning, because nobody else "
    "on the island knew how to wind the clock that turned it. In winter the supply boat came only once a month."
)
OTHER_TEXT = (
    "Mix two cups of flour with a spoon of sugar and a pinch of salt, add cold butter in small pieces and knead it. "
    "Let the dough rest for an hour, roll it out, put slices of apple on it and bake it in a hot oven until the edges "
    "are brown. Serve the cake warm with whipped cream, or cold on the next day with a cup of strong black coffee."
)


@contextmanager
def small_pool(bench: Bench, num_blocks: int, checking: bool = True) -> Iterator[BlockManager]:
    """The engine with so many blocks of 16, and check_integrity in every step."""
    engine = bench.llm.engine
    manager, schedule = BlockManager(num_blocks, 16), engine.scheduler.schedule

    def checked(drafts: Mapping[int, list[int]]) -> SchedulerOutput:
        output = schedule(drafts)
        if checking:
            expect_sane(engine.scheduler, "while the model generates, ")
        return output

    with use_manager(bench.llm, manager), replaced(engine.scheduler, "schedule", checked):
        yield manager


def ask(bench: Bench, prompts: list[Any], max_tokens: int) -> list[tuple[int, str]]:
    """(num_cached_tokens, text) of each answer."""
    outputs = bench.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), False)
    return [(output.num_cached_tokens, output.outputs[0].text) for output in outputs]


def waves(bench: Bench) -> list[tuple[str, list[Any]]]:
    """Prompts of known lengths, whatever the tokenizer."""
    encode = bench.llm.get_tokenizer().encode
    text, other = encode(TEXT), encode(OTHER_TEXT)
    branches = [[*text[:40], *other[i : i + 6]] for i in (0, 10, 20)]
    return [
        ("a prompt of 40 tokens", [text[:40]]),
        ("three that begin with these 40 tokens", branches),
        ("its first 32 tokens alone, two full blocks", [text[:32]]),
        ("the same with a salt", [{"prompt_token_ids": text[:32], "cache_salt": "mine"}]),
        ("two other texts of 60 tokens", [other[:60], [*other[1:60], 5]]),
        ("the first prompts once more", [text[:40], *branches]),
    ]


def answer_waves(bench: Bench) -> list[tuple[str, Any]]:
    """What the model was given, and its answers."""
    scheduler = bench.llm.engine.scheduler
    num_before = scheduler.num_preemptions
    with small_pool(bench, 7) as manager:
        answers: list[tuple[str, Any]] = [(what, ask(bench, prompts, 6)) for what, prompts in waves(bench)]
        expect(7, len(manager.free_blocks), "all requests have been answered, so every block must be in the free queue")
    num_evictions, num_preemptions = manager.stats.evictions, scheduler.num_preemptions - num_before
    assert num_evictions > 0 and num_preemptions > 0, "the pool is too large for this trial"
    return [*answers, ("all that", f"evictions: {num_evictions}, preemptions: {num_preemptions}")]


@cache
def our_answers(bench: Bench) -> list[tuple[str, Any]]:
    with our_engine():
        return answer_waves(bench)


def generates_with_hits(function: Any, bench: Bench) -> None:
    """the model answers prompts that share beginnings, in a pool that makes it evict and preempt"""
    for (what, expected), (_, got) in zip(our_answers(bench), answer_waves(bench), strict=True):
        hint = "the text, or the number of tokens found in the cache, differs from that with our function"
        expect(expected, got, f"the model was given {what}: {hint}")


def wrong_text(bench: Bench) -> tuple[str | None, str | None]:
    """The same prompt before and after others had all its blocks, as text. Nothing if that changes nothing."""
    try:
        tokenizer = bench.llm.get_tokenizer()
    except NoModel:
        return None, None
    text, other = tokenizer.encode(TEXT)[:40], tokenizer.encode(OTHER_TEXT)[:40]
    answers = []
    with suppress(Exception), small_pool(bench, 3, checking=False):
        answers = [repr(ask(bench, [prompt], 8)[0][1]) for prompt in (text, other, text)]
    return (answers[0], answers[2]) if answers and answers[0] != answers[2] else (None, None)


TRIALS = runs_in_the_scheduler, answers_as_before, generates_with_hits
