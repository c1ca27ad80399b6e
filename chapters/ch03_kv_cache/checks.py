"""Checks of chapter 3: sizes, slots and writes, first on numbers small enough to follow, then in the engine.

What needs torch is in checks_engine.py: a browser, which has none, grades the first two tasks, too.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from chapters.expect import ensure, expect, read_again
from chapters.grading import Bench, NoModel, Task, Wrong, answers_as_before, case, cases
from chapters.patching import replaced
from chapters.published import published_config
from nanovllm.checkpoint import ModelConfig

Bytes = Callable[[ModelConfig, int], int]
Slots = Callable[[list[int], int, int, int, int], list[int]]
MINUS_ONE_SECTION = "Slot -1"


def engine() -> Any:
    """checks_engine.py. Where there is no torch there is no model either."""
    if find_spec("torch") is None:
        raise NoModel
    return import_module("chapters.ch03_kv_cache.checks_engine")


def use_in_engine(name: str, function: Any) -> AbstractContextManager[None]:
    """The context of this name; without torch there is no engine that could use a function."""
    return nullcontext() if find_spec("torch") is None else getattr(engine(), name)(function)


@read_again(MINUS_ONE_SECTION)
def asked_twice(function: Any, bench: Bench) -> None:
    """in the engine: a prompt that is fully cached computes one token and writes nothing"""
    engine().ask_twice(bench)


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
    """a real engine that is given a number of bytes makes a KV pool of that size, and generates the same tokens"""
    engine().make_allowed_pool(bench)


# -- slot_mapping -------------------------------------------------------------------------------------------------


def show_call(*call: Any) -> str:
    return "slot_mapping({}, start={}, end={}, write_start={}, block_size={})".format(*call)


def compare_slots(function: Slots, hint: str, table: list[int], start: int, end: int, write: int, size: int) -> None:
    """Compares with the slots of the engine's own Batch, found in a shorter way: a list of all slots, cut."""
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
    "across the border of a block, and up to the border": [(BORDER, [0, 1], 0, end, 0, 8) for end in (12, 7, 8, 9)],
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


def compare_write(function: Any, hint: str, slots: list[int], dtype: str = "float32") -> None:
    engine().compare_write(function, hint, slots, dtype)


ONE = "slot 17 is k_cache[2, 1], in the very tensor that was given"
ALL = "each row of k and v goes to its own slot, and nothing else changes"
NONE = "slot -1 means: write nothing. In Python and PyTorch the index -1 is the last one"
BEHIND = f"{NONE}; the tokens after it must still be written"
BF16 = "with bfloat16 the wrong numbers are in the cache", [3, -1, 4], "bfloat16"
WRITES = (
    case("one token into slot 17: block 2, offset 1", compare_write, (ONE, [17])),
    case("several tokens, across the border of a block", compare_write, (ALL, [15, 16, 30, 0, 7, 8])),
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
use_slots, use_write = partial(use_in_engine, "use_slot_mapping"), partial(use_in_engine, "use_write_kv")
TASKS = [
    Task("kv_bytes_per_token", "How many bytes is a token?", use_bytes, (*cases(compare_bytes, BYTES), allowed_pool)),
    Task("slot_mapping", "Where a token goes", use_slots, (*cases(compare_slots, SLOTS), written_from, *LAST)),
    Task("write_kv", "Writing it", use_write, (*WRITES, asked_twice, answers_as_before)),
]
