"""Checks of chapter 3: sizes, slots and writes, first on numbers that one sees through, then in the engine."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chapters.ch01_inference.lab import published_config
from chapters.expect import ensure, expect, read_again
from chapters.grading import Bench, Task, Wrong, answers_as_before, case, cases
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.worker.batch import Batch
from nanovllm.worker.cuda.graphs import DecodeGraphs
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.model_runner import ModelRunner

Bytes = Callable[[ModelConfig, int], int]
Slots = Callable[[list[int], int, int, int, int], list[int]]
Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
MINUS_ONE_SECTION = "Slot -1"


@read_again(MINUS_ONE_SECTION)
def asked_twice(function: Any, bench: Bench) -> None:
    """in the engine: a prompt that is fully cached computes one token and writes nothing"""
    # Exactly two blocks, asked twice for one token: the second time its last token has slot -1.
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompt, data = list(range(40, 72)), bench.llm.engine.model_runner.kv_cache.data
    bench.llm.reset_prefix_cache()
    bench.llm.generate(prompt, params, False)
    before = data.clone()
    (output,) = bench.llm.generate(prompt, params, False)
    assert output.num_cached_tokens == 31, output
    changed = (data != before).permute(2, 3, 0, 1, 4, 5).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
    expect([], changed, "the prompt is in the cache, and asking it again wrote to these slots of the pool")


# -- kv_bytes_per_token -------------------------------------------------------------------------------------------


MISTAKES = {
    128: "that is K or V alone: a token leaves both",
    131_072 // 32: "every layer has a K and a V of its own",
    524_288: "query heads are not kept: count the KV heads",
}


def compare_bytes(
    function: Bytes, hint: str, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, itemsize: int = 2
) -> None:
    sizes = dict(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    expected = 2 * layers * kv_heads * head_dim * itemsize
    got = function(replace(published_config("Llama-2-7B"), hidden_size=hidden, **sizes), itemsize)  # type: ignore[arg-type]
    if got != expected:
        raise Wrong(MISTAKES.get(got, hint), expected=f"{expected} for {sizes}, itemsize {itemsize}", got=got)
    ensure(isinstance(got, int), "a number of bytes is an int: multiply, don't divide with /", got=repr(got))


ITEMSIZE = "itemsize is the bytes of one number: 4 for float32, 1 for fp8"
BYTES: dict[str, list[tuple[Any, ...]]] = {  # hint, hidden_size, layers, heads, KV heads, head_dim, itemsize
    "one layer, one head of 64 numbers, 2 bytes each: 256 bytes": [
        ("64 numbers of K and 64 of V, 2 bytes each", 64, 1, 1, 1, 64)
    ],
    "several layers, and query heads that share KV heads (Llama-3.1-8B)": [
        ("2 (K and V) * layers * KV heads * head_dim * itemsize", 4096, 32, 32, 8, 128)
    ],
    "itemsize counts: float32 takes twice what bfloat16 takes": [
        (ITEMSIZE, 64, 3, 4, 2, 16, 4),
        (ITEMSIZE, 64, 3, 4, 2, 16, 1),
    ],
    "a model whose head_dim is not hidden_size / query heads (Qwen3-0.6B)": [
        ("Qwen3-0.6B has hidden_size / heads = 64 and head_dim = 128: take head_dim", 1024, 28, 16, 8, 128)
    ],
}


def allowed_pool(function: Bytes, bench: Bench) -> None:
    """a real engine told to use so many bytes makes a KV pool of just that, and generates the same tokens"""
    runner = bench.llm.engine.model_runner
    per_block = runner.kv_cache.num_bytes // runner.num_blocks
    allowed = 40 * per_block + per_block // 2  # 40 blocks and a half
    llm = LLM(bench.model, max_model_len=128, max_num_seqs=8, block_size=16, kv_cache_memory_bytes=allowed)
    taken = llm.engine.model_runner.kv_cache.num_bytes
    hint = "the pool took more than it was allowed: you count too few bytes"
    ensure(taken <= allowed, hint, expected=allowed, got=taken)
    hint = "more blocks would have fitted: you count too many bytes"
    ensure(taken + per_block > allowed, hint, expected=40 * per_block, got=taken)
    with replaced(bench, "llm", llm):
        bench.same_tokens()


# -- slot_mapping -------------------------------------------------------------------------------------------------


def show_call(*call: Any) -> str:
    return "slot_mapping({}, start={}, end={}, write_start={}, block_size={})".format(*call)


@contextmanager
def use_slot_mapping(function: Slots) -> Iterator[None]:
    """Every Batch gets the student's slots. Slots of other sequences are refused: a kernel would write there."""
    ours = Batch.from_scheduler_output

    def from_scheduler_output(output: SchedulerOutput, block_size: int) -> Batch:
        batch, slots = ours(output, block_size), []
        for chunk in output.chunks:
            table = chunk.seq.block_table
            call = list(table), chunk.start, chunk.end, chunk.write_start, block_size
            got = function(*call)
            expect(chunk.end - chunk.start, len(got), f"{show_call(*call)}: one slot for each computed position")
            strange = [s for s in got if s != -1 and s // block_size not in table]
            ensure(not strange, f"{show_call(*call)}: slots {strange} are not in a block of this sequence", got=got)
            slots += got
        return replace(batch, slot_mapping=torch.tensor(slots, dtype=torch.int64))

    with replaced(Batch, "from_scheduler_output", staticmethod(from_scheduler_output)):
        yield


def compare_slots(function: Slots, hint: str, table: list[int], start: int, end: int, write: int, size: int) -> None:
    """With what the engine's own Batch says, by a shorter way: a list of all slots, cut."""
    slots = [block_id * size + offset for block_id in table for offset in range(size)]
    expected = [-1] * (write - start) + slots[write:end]
    given, call = list(table), show_call(table, start, end, write, size)
    got = function(given, start, end, write, size)
    expect(table, given, f"{call} changed block_table")
    ensure(got is not None, f"{call} returned nothing", expected=expected)
    if len(got) != len(expected):
        hint = f"one slot for each position from start to end - 1. {hint}"
    expect(expected, list(got), f"{call}: {hint}")


BORDER = "position 8 is offset 0 of the second block, if a block has 8 slots; position 7 is the last of the first"
MIDDLE = "start is a position of the sequence: the block table still begins at position 0"
MINUS_ONE = "positions before write_start get slot -1, write_start itself is written"
SLOTS: dict[str, list[tuple[Any, ...]]] = {  # hint, block_table, start, end, write_start, block_size
    "a short prompt in block 0: slots count up from 0": [
        ("positions 0 to 3 are offsets 0 to 3 of block 0", [0], 0, 4, 0, 8)
    ],
    "over the border of a block, and up to the border": [(BORDER, [0, 1], 0, end, 0, 8) for end in (12, 7, 8, 9)],
    "blocks that lie anywhere in the pool": [
        ("the slot comes from the physical id block_table[index], not from the index", [6, 2, 9], 0, 11, 0, 4)
    ],
    "a step that begins in the middle of the sequence (decode, or the second chunk of a prompt)": [
        (MIDDLE, [6, 2, 9], 5, 11, 5, 4),
        (MIDDLE, [6, 2, 9], 9, 10, 9, 4),
    ],
}
written_from = case(
    "positions before write_start get -1 and keep their place",
    compare_slots,
    *((MINUS_ONE, [6, 2], *span, 4) for span in ((2, 6, 3), (7, 8, 8))),
    section=MINUS_ONE_SECTION,
)


def random_tables(function: Slots, bench: Bench) -> None:
    """300 random tables and chunks"""
    rng = random.Random(3)
    for _ in range(300):
        size, num_blocks = rng.choice([1, 2, 4, 7, 16]), rng.randint(1, 6)
        end = rng.randint(1, size * num_blocks)
        start = rng.randint(0, end - 1)
        write = rng.choice([start, start, end, rng.randint(start, end)])
        table = rng.sample(range(40), num_blocks)
        compare_slots(function, "work this one out by hand", table, start, end, write, size)


@read_again("The same in a real generation")
def slots_in_the_engine(function: Slots, bench: Bench) -> None:
    """the real model answers as before, with your slots"""
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

        # PyTorch's attention reads the cache as the student lays it out; the C kernels have a layout of their own.
        attention = TORCH_KERNELS.paged_attention
        kernels = replace(runner.kernels, rotary_and_write=rotary_and_write, paged_attention=attention)
        return runner.model(batch, runner.rotary, runner.kv_cache, kernels)

    # A recorded CUDA graph would replay what was recorded, with our kernel.
    with replaced(ModelRunner, "forward", forward), replaced(DecodeGraphs, "run", lambda graphs, batch: None):
        yield


def compare_write(function: Write, hint: str, slots: list[int], dtype: torch.dtype = torch.float32) -> None:
    """Write random numbers into a cache of 4 blocks of 8 slots and compare it slot by slot.

    k and v are parts of a larger tensor, as the engine has them.
    """
    torch.manual_seed(3)
    caches = [torch.randn(4, 8, 2, 4, dtype=dtype) for _ in range(2)]
    new = [part.unflatten(-1, (2, 4)) for part in torch.randn(len(slots), 40, dtype=dtype)[:, 24:].split(8, dim=-1)]
    expected = [cache.clone() for cache in caches]
    for cache, rows in zip(expected, new, strict=True):
        for row, slot in zip(rows, slots, strict=True):
            if slot >= 0:
                cache.view(-1, 2, 4)[slot] = row
    before, given_slots = [rows.clone() for rows in new], torch.tensor(slots)
    function(caches[0], caches[1], new[0], new[1], given_slots)
    same = given_slots.tolist() == slots and all(torch.equal(a, b) for a, b in zip(before, new, strict=True))
    ensure(same, "k, v and slots must stay as they are")
    for name, want, cache in zip(("k_cache", "v_cache"), expected, caches, strict=True):
        wrong = (want != cache).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        if wrong:
            say = f"{name} is wrong at slots {wrong} after writing to slots {slots}"
            where = f"block {wrong[0] // 8}, offset {wrong[0] % 8}"
            at = wrong[0] // 8, wrong[0] % 8, 0, slice(2)
            raise Wrong(f"{hint} ({say})", expected=f"{want[at].tolist()} ... in {where}", got=cache[at].tolist())


ONE = "slot 17 is k_cache[2, 1], in the very tensor that was given"
ALL = "each row of k and v goes to its own slot, and nothing else changes"
NONE = "slot -1 means: write nothing. In Python and PyTorch the index -1 is the last one"
BEHIND = f"{NONE}; the tokens after it are written all the same"
BF16 = "with bfloat16 the wrong numbers are in the cache", [3, -1, 4], torch.bfloat16
WRITES = (
    case("one token into slot 17: block 2, offset 1", compare_write, (ONE, [17])),
    case("several tokens, over the border of a block", compare_write, (ALL, [15, 16, 30, 0, 7, 8])),
    case(
        "slot -1: that token is not written, the others are",
        compare_write,
        *((NONE, [-1]), (BEHIND, [9, -1, 20]), (NONE, [-1, -1])),
        section=MINUS_ONE_SECTION,
    ),
    case("a cache of bfloat16", compare_write, BF16),
)

LAST = random_tables, asked_twice, slots_in_the_engine
use_bytes = partial(replaced, ModelConfig, "kv_bytes_per_token")
TASKS = [
    Task("kv_bytes_per_token", "How many bytes is a token?", use_bytes, (*cases(compare_bytes, BYTES), allowed_pool)),
    Task("slot_mapping", "Where a token goes", use_slot_mapping, (*cases(compare_slots, SLOTS), written_from, *LAST)),
    Task("write_kv", "Writing it", use_write_kv, (*WRITES, asked_twice, answers_as_before)),
]
