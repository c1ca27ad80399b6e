"""Checks of chapter 3: sizes, slots and writes, first on numbers that one sees through, then in the engine."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chapters.expect import read_again
from chapters.grading import Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.worker.batch import Batch
from nanovllm.worker.cuda.graphs import DecodeGraphs
from nanovllm.worker.model_runner import ModelRunner

Bytes = Callable[[ModelConfig, int], int]
Slots = Callable[[list[int], int, int, int, int], list[int]]
Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

# -- kv_bytes_per_token -------------------------------------------------------------------------------------------


def use_bytes(function: Bytes) -> AbstractContextManager:
    return replaced(ModelConfig, "kv_bytes_per_token", function)


def _check_bytes(function: Bytes, bench: Bench, hint: str, itemsize: int = 2, **sizes: int) -> None:
    config = replace(bench.llm.engine.model_config, **sizes)  # type: ignore[arg-type]
    expected = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    got = function(config, itemsize)
    if got != expected:
        raise Wrong(hint, expected=f"{expected} for {sizes}, itemsize {itemsize}", got=got)
    if not isinstance(got, int):
        raise Wrong("a number of bytes is an int: multiply, don't divide with /", expected=expected, got=repr(got))


def check_one_layer(function: Bytes, bench: Bench) -> None:
    """one layer, one head of 64 numbers, 2 bytes each: 256 bytes"""
    sizes = dict(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=64, hidden_size=64)
    got = function(replace(bench.llm.engine.model_config, **sizes), 2)  # type: ignore[arg-type]
    if got == 128:
        raise Wrong("that is K or V alone: a token leaves both", expected=256, got=got)
    _check_bytes(function, bench, "64 numbers of K and 64 of V, 2 bytes each", **sizes)


def check_gqa(function: Bytes, bench: Bench) -> None:
    """several layers, and query heads that share KV heads (Llama-3.1-8B)"""
    sizes = dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, hidden_size=4096)
    got = function(replace(bench.llm.engine.model_config, **sizes), 2)  # type: ignore[arg-type]
    if got == 524288:
        raise Wrong("query heads are not kept: count the KV heads", expected=131072, got=got)
    if got == 131072 // 32:
        raise Wrong("every layer has a K and a V of its own", expected=131072, got=got)
    _check_bytes(function, bench, "2 (K and V) * layers * KV heads * head_dim * itemsize", **sizes)


def check_itemsize(function: Bytes, bench: Bench) -> None:
    """itemsize counts: float32 takes twice what bfloat16 takes"""
    sizes = dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64)
    _check_bytes(function, bench, "itemsize is the bytes of one number: 4 for float32, 1 for fp8", itemsize=4, **sizes)
    _check_bytes(function, bench, "itemsize is the bytes of one number: 4 for float32, 1 for fp8", itemsize=1, **sizes)


def check_head_dim(function: Bytes, bench: Bench) -> None:
    """a model whose head_dim is not hidden_size / query heads (Qwen3-0.6B)"""
    sizes = dict(num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, hidden_size=1024)
    _check_bytes(function, bench, "Qwen3-0.6B has hidden_size / heads = 64 and head_dim = 128: take head_dim", **sizes)


def check_pool(function: Bytes, bench: Bench) -> None:
    """a real engine told to use so many bytes makes a KV pool of just that, and generates the same tokens"""
    runner = bench.llm.engine.model_runner
    per_block = runner.block_size * runner.kv_cache.num_bytes // (runner.num_blocks * runner.block_size)
    allowed = 40 * per_block + per_block // 2  # 40 blocks and a half
    llm = LLM(bench.model, max_model_len=128, max_num_seqs=8, block_size=16, kv_cache_memory_bytes=allowed)
    taken = llm.engine.model_runner.kv_cache.num_bytes
    if taken > allowed:
        raise Wrong("the pool took more than it was allowed: you count too few bytes", expected=allowed, got=taken)
    if taken + per_block <= allowed:
        raise Wrong("more blocks would have fitted: you count too many bytes", expected=40 * per_block, got=taken)
    ours, bench.llm = bench.llm, llm
    try:
        bench.same_tokens()
    finally:
        bench.llm = ours


# -- slot_mapping -------------------------------------------------------------------------------------------------


@contextmanager
def use_slot_mapping(function: Slots) -> Iterator[None]:
    """Every Batch gets the student's slots. Slots of other sequences are refused: a kernel would write there."""
    ours = Batch.from_scheduler_output

    def from_scheduler_output(output: SchedulerOutput, block_size: int) -> Batch:
        batch, slots = ours(output, block_size), []
        for chunk in output.chunks:
            table = list(chunk.seq.block_table)
            got = function(table, chunk.start, chunk.end, chunk.write_start, block_size)
            call = (
                f"slot_mapping({chunk.seq.block_table}, {chunk.start}, {chunk.end}, {chunk.write_start}, {block_size})"
            )
            if len(got) != chunk.end - chunk.start:
                raise Wrong(
                    f"{call}: one slot for each computed position", expected=chunk.end - chunk.start, got=len(got)
                )
            if strange := [s for s in got if s != -1 and s // block_size not in chunk.seq.block_table]:
                raise Wrong(f"{call}: slot {strange[0]} is not in a block of this sequence", got=got)
            slots += got
        return replace(batch, slot_mapping=torch.tensor(slots, dtype=torch.int64))

    with replaced(Batch, "from_scheduler_output", staticmethod(from_scheduler_output)):
        yield


def _slots(table: list[int], start: int, end: int, write_start: int, block_size: int) -> list[int]:
    """What the engine's own Batch says, by a shorter way: a list of all slots, cut."""
    slots = [block_id * block_size + offset for block_id in table for offset in range(block_size)]
    return [-1] * (write_start - start) + slots[write_start:end]


def _check_slots(function: Slots, hint: str, table: list[int], start: int, end: int, write: int, size: int) -> None:
    given = list(table)
    got = function(given, start, end, write, size)
    expected = _slots(table, start, end, write, size)
    call = f"slot_mapping({table}, start={start}, end={end}, write_start={write}, block_size={size})"
    if given != table:
        raise Wrong(f"{call} changed block_table", expected=table, got=given)
    if got is None:
        raise Wrong(f"{call} returned nothing", expected=expected, got=got)
    if list(got) != expected:
        if len(got) != len(expected):
            hint = f"one slot for each position from start to end - 1. {hint}"
        raise Wrong(f"{call}: {hint}", expected=expected, got=got)


def check_first_block(function: Slots, bench: Bench) -> None:
    """a short prompt in block 0: slots count up from 0"""
    _check_slots(function, "positions 0 to 3 are offsets 0 to 3 of block 0", [0], 0, 4, 0, 8)


def check_border(function: Slots, bench: Bench) -> None:
    """over the border of a block, and up to the border"""
    hint = "position 8 is offset 0 of the second block, if a block has 8 slots; position 7 is the last of the first"
    _check_slots(function, hint, [0, 1], 0, 12, 0, 8)
    for end in (7, 8, 9):
        _check_slots(function, hint, [0, 1], 0, end, 0, 8)


def check_physical(function: Slots, bench: Bench) -> None:
    """blocks that lie anywhere in the pool"""
    hint = "the slot comes from the physical id block_table[index], and index is only the place in the table"
    _check_slots(function, hint, [6, 2, 9], 0, 11, 0, 4)


def check_middle(function: Slots, bench: Bench) -> None:
    """a step that begins in the middle of the sequence (decode, or the second chunk of a prompt)"""
    hint = "start is a position of the sequence: the block table still begins at position 0"
    _check_slots(function, hint, [6, 2, 9], 5, 11, 5, 4)
    _check_slots(function, hint, [6, 2, 9], 9, 10, 9, 4)


@read_again("Slot -1")
def check_write_start(function: Slots, bench: Bench) -> None:
    """positions before write_start get -1 and keep their place"""
    hint = "positions before write_start get slot -1, write_start itself is written"
    _check_slots(function, hint, [6, 2], 2, 6, 3, 4)
    _check_slots(function, hint, [6, 2], 7, 8, 8, 4)


def check_random(function: Slots, bench: Bench) -> None:
    """300 random tables and chunks"""
    rng = random.Random(3)
    for _ in range(300):
        size, num_blocks = rng.choice([1, 2, 4, 7, 16]), rng.randint(1, 6)
        end = rng.randint(1, size * num_blocks)
        start = rng.randint(0, end - 1)
        write = rng.choice([start, start, end, rng.randint(start, end)])
        table = rng.sample(range(40), num_blocks)
        _check_slots(function, "work this one out by hand", table, start, end, write, size)


@read_again("Slot -1")
def check_fully_cached(function: Slots, bench: Bench) -> None:
    """in the engine: a prompt that is fully cached computes one token and writes nothing"""
    _ask_twice(bench)


@read_again("The same in a real generation")
def check_slots_generation(function: Slots, bench: Bench) -> None:
    """generation in the engine with your slots: the same tokens"""
    bench.same_tokens()


# -- write_kv -----------------------------------------------------------------------------------------------------


@contextmanager
def use_write_kv(function: Write) -> Iterator[None]:
    """Every layer writes with the student's function. The engine's own kernel still rotates: it is given no slots."""

    def forward(runner: ModelRunner, batch: Batch) -> Tensor:
        ours = runner.kernels.rotary_and_write

        def rotary_and_write(q: Any, k: Any, v: Any, cos_sin: Any, kv_layer: Any, batch: Batch) -> None:
            ours(q, k, v, cos_sin, kv_layer, replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, -1)))
            function(kv_layer[0], kv_layer[1], k, v, batch.slot_mapping)

        kernels = replace(runner.kernels, rotary_and_write=rotary_and_write)
        return runner.model(batch, runner.rotary, runner.kv_cache, kernels)

    # A recorded CUDA graph would replay what was recorded, with our kernel.
    with replaced(ModelRunner, "forward", forward), replaced(DecodeGraphs, "run", lambda graphs, batch: None):
        yield


def _check_write(function: Write, hint: str, slots: list[int]) -> None:
    """Write random numbers into a cache of 4 blocks of 8 slots and compare it slot by slot."""
    torch.manual_seed(3)
    caches = [torch.randn(4, 8, 2, 4) for _ in range(2)]
    new = [torch.randn(len(slots), 2, 4) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    for cache, rows in zip(expected, new, strict=True):
        for row, slot in zip(rows, slots, strict=True):
            if slot >= 0:
                cache.view(-1, 2, 4)[slot] = row
    given, given_slots = [rows.clone() for rows in new], torch.tensor(slots)
    function(caches[0], caches[1], given[0], given[1], given_slots)
    if given_slots.tolist() != slots or any(not torch.equal(a, b) for a, b in zip(given, new, strict=True)):
        raise Wrong("k, v and slots must stay as they are")
    for name, want, cache in zip(("k_cache", "v_cache"), expected, caches, strict=True):
        wrong = (want != cache).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        if wrong:
            say = f"{name} is wrong at slots {wrong} after writing to slots {slots}"
            where = f"block {wrong[0] // 8}, offset {wrong[0] % 8}"
            at = wrong[0] // 8, wrong[0] % 8, 0, slice(2)
            raise Wrong(f"{hint} ({say})", expected=f"{want[at].tolist()} ... in {where}", got=cache[at].tolist())


def check_one_slot(function: Write, bench: Bench) -> None:
    """one token into slot 17: block 2, offset 1"""
    _check_write(function, "slot 17 is k_cache[2, 1], in the very tensor that was given", [17])


def check_scattered(function: Write, bench: Bench) -> None:
    """several tokens into slots of several blocks, over a border"""
    _check_write(function, "each row of k and v goes to its own slot, and nothing else changes", [15, 16, 30, 0, 7, 8])


@read_again("Slot -1")
def check_minus_one(function: Write, bench: Bench) -> None:
    """slot -1: that token is not written, the others are"""
    hint = "slot -1 means: write nothing. In Python and PyTorch the index -1 is the last one"
    _check_write(function, hint, [-1])
    _check_write(function, f"{hint}; the tokens after it are written all the same", [9, -1, 20])
    _check_write(function, hint, [-1, -1])


def check_dtype(function: Write, bench: Bench) -> None:
    """a cache of bfloat16, and k and v that are parts of a larger tensor, as the engine has them"""
    qkv = torch.randn(3, 5 * 8, dtype=torch.bfloat16)
    k, v = (part.unflatten(-1, (2, 4)) for part in qkv[:, 24:].split(8, dim=-1)[:2])
    caches = [torch.zeros(2, 4, 2, 4, dtype=torch.bfloat16) for _ in range(2)]
    function(caches[0], caches[1], k, v, torch.tensor([3, -1, 4]))
    for cache, new in zip(caches, (k, v), strict=True):
        if not torch.equal(cache[0, 3], new[0]) or not torch.equal(cache[1, 0], new[2]) or cache[1, 1:].any():
            raise Wrong("with bfloat16 the wrong numbers are in the cache", expected=new[0, 0], got=cache[0, 3, 0])


@read_again("Slot -1")
def check_pool_untouched(function: Write, bench: Bench) -> None:
    """in the engine: a prompt that is fully cached computes one token and writes nothing"""
    _ask_twice(bench)


def check_write_generation(function: Write, bench: Bench) -> None:
    """generation in the engine with your writes: the same tokens"""
    bench.same_tokens()


def _ask_twice(bench: Bench) -> None:
    """A prompt of exactly two blocks, asked twice for one token: the second time its last token has slot -1."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompt, data = list(range(40, 72)), bench.llm.engine.model_runner.kv_cache.data
    bench.llm.reset_prefix_cache()
    bench.llm.generate(prompt, params, False)
    before = data.clone()
    (output,) = bench.llm.generate(prompt, params, False)
    assert output.num_cached_tokens == 31, output
    changed = (data != before).permute(2, 3, 0, 1, 4, 5).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
    if changed:
        raise Wrong(
            "the prompt is in the cache, and asking it again wrote to the pool", expected="no slot", got=changed
        )


TASKS = [
    Task(
        "kv_bytes_per_token",
        "How many bytes is a token?",
        use_bytes,
        (check_one_layer, check_gqa, check_itemsize, check_head_dim, check_pool),
    ),
    Task(
        "slot_mapping",
        "Where a token goes",
        use_slot_mapping,
        (
            check_first_block,
            check_border,
            check_physical,
            check_middle,
            check_write_start,
            check_random,
            check_fully_cached,
            check_slots_generation,
        ),
    ),
    Task(
        "write_kv",
        "Writing it",
        use_write_kv,
        (check_one_slot, check_scattered, check_minus_one, check_dtype, check_pool_untouched, check_write_generation),
    ),
]
