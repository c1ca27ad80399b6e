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

from chapters.expect import Table, cases, ensure, expect, read_again
from chapters.grading import Bench, NoModel, Task, Wrong
from chapters.published import published_config
from nanovllm.checkpoint import ModelConfig

PoolBlocks = Callable[[ModelConfig, int, int, int | None, int, int, int], int]
WindowSlots = Callable[[list[int], int, int, int, int], list[list[int]]]
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


# -- pool_blocks ---------------------------------------------------------------------------------------------------


MISTAKES = {  # of the bytes of a token of Llama-3.1-8B
    65_536: "that is K or V alone: a token leaves both",
    131_072 // 32: "every layer has a K and a V of its own",
    524_288: "query heads are not kept: count the KV heads",
}
ROOM = 10**9  # sequences: no reason for fewer blocks
RAISES: Any = ValueError("ValueError")  # stands for a call that raises one; nothing that a function returns equals it


def compare_blocks(
    function: PoolBlocks,
    hint: str,
    sizes: tuple[int, int, int, int, int],
    block_size: int,
    itemsize: int,
    memory: dict[str, int],
    num_seqs: int = ROOM,
    max_model_len: int = 100,
) -> None:
    """sizes: hidden_size, layers, query heads, KV heads, head_dim. memory: given, free."""
    hidden, layers, heads, kv_heads, head_dim = sizes
    named = dict(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    config = replace(published_config("Llama-2-7B"), hidden_size=hidden, **named)
    block_bytes = 2 * layers * kv_heads * head_dim * itemsize * block_size
    given, free = memory.get("given"), memory.get("free", 10**9)
    expected: Any = (free if given is None else given) // block_bytes
    if expected == 0:
        expected = RAISES
    elif given is None:
        expected = min(expected, num_seqs * sum(1 for _ in range(0, max_model_len, block_size)))
    try:
        got: Any = function(config, block_size, itemsize, given, free, num_seqs, max_model_len)
    except ValueError:
        got = RAISES
    if got != expected:
        bytes_used = {
            (free if given is None else given) // (wrong * block_size): say for wrong, say in MISTAKES.items()
        }
        hint = bytes_used.get(got, hint) if sizes == LLAMA else hint
        asked = f"block_size {block_size}, itemsize {itemsize}, given_bytes {given}, free_bytes {free}, "
        asked += f"{num_seqs} sequences of {max_model_len} tokens"
        raise Wrong(f"{hint} ({named}, {asked})", expected=expected, got=got)
    ensure(got is RAISES or isinstance(got, int), "a number of blocks is an int", got=repr(got))


SMALL, LLAMA, QWEN3 = (64, 1, 1, 1, 64), (4096, 32, 32, 8, 128), (1024, 28, 16, 8, 128)
DEMO = (576, 30, 9, 3, 64)
ITEMSIZE = "itemsize is the bytes of one number: 4 for float32, 1 for fp8"
WHOLE = "a pool has whole blocks: what is left over is no block"
GIVEN = "the user has said how large the pool is: then it is neither limited by what is free nor by what is needed"
NEEDED = "no more than max_num_seqs sequences of max_model_len tokens can hold"
OWN = "the last block of a sequence is its own, however few tokens are in it: round up for each sequence, then multiply"
BLOCKS: Table = {
    "one layer, one head of 64 numbers, 2 bytes each: 256 bytes a token": [
        ("64 numbers of K and 64 of V, 2 bytes each", SMALL, 1, 2, {"given": 2560}),
        ("a block has block_size tokens", SMALL, 4, 2, {"given": 4096}),
    ],
    "several layers, and query heads that share KV heads (Llama-3.1-8B)": [
        ("2 (K and V) * layers * KV heads * head_dim * itemsize", LLAMA, 16, 2, {"given": 400 * 16 * 131_072})
    ],
    "itemsize counts: float32 takes twice what bfloat16 takes": [
        (ITEMSIZE, (64, 3, 4, 2, 16), 8, 4, {"given": 614_400}),
        (ITEMSIZE, (64, 3, 4, 2, 16), 8, 1, {"given": 614_400}),
    ],
    "a model whose head_dim is not hidden_size / query heads (Qwen3-0.6B)": [
        (
            "Qwen3-0.6B has hidden_size / heads = 64 and head_dim = 128: take head_dim",
            QWEN3,
            16,
            2,
            {"given": 100 * 16 * 114_688},
        )
    ],
    "whole blocks, one at least": [
        (WHOLE, SMALL, 4, 2, {"given": 3 * 1024 + 1023}),
        (WHOLE, SMALL, 4, 2, {"free": 3 * 1024 + 1023}),
        ("not even one block fits: raise ValueError", SMALL, 4, 2, {"given": 1023}),
        ("not even one block fits: raise ValueError", SMALL, 4, 2, {"free": 1023}),
        ("exactly one block fits", SMALL, 4, 2, {"given": 1024}),
    ],
    "measured memory: no more than can ever be needed": [
        ("5 blocks fit, and 4 sequences could use 28", SMALL, 16, 2, {"free": 5 * 4096}, 4, 100),
        (NEEDED, SMALL, 16, 2, {}, 4, 96),
        (OWN, SMALL, 16, 2, {}, 4, 100),
        (OWN, DEMO, 16, 2, {}, 4, 100),
        (OWN, SMALL, 256, 2, {}, 8, 20),
    ],
    "given memory: that much": [
        (GIVEN, SMALL, 16, 2, {"given": 1000 * 4096}, 4, 100),
        (GIVEN, SMALL, 16, 2, {"given": 1000 * 4096, "free": 10 * 4096}, 4, 100),
        ("0 bytes were given, and that is not None: raise ValueError", SMALL, 4, 2, {"given": 0}, 4, 100),
    ],
}


@read_again("How many bytes is a token?")
def pools_of_engines(function: PoolBlocks, bench: Bench) -> None:
    """real engines make pools of these sizes, given and measured, and generate the same tokens"""
    engine().make_pools(bench)


# -- window_slots -------------------------------------------------------------------------------------------------


def show_call(*call: Any) -> str:
    return "window_slots({}, start={}, end={}, window={}, block_size={})".format(*call)


def cut_slots(table: list[int], start: int, end: int, window: int, size: int) -> list[list[int]]:
    """What window_slots must return, found in a way that is no good for long texts: a list of all slots, cut."""
    slots = [block_id * size + offset for block_id in table for offset in range(size)]
    return [slots[: row + 1][-window:] for row in range(start, end)]


def compare_slots(
    function: WindowSlots, hint: str, table: list[int], start: int, end: int, window: int, size: int
) -> None:
    expected = cut_slots(table, start, end, window, size)
    given, call = list(table), show_call(table, start, end, window, size)
    got = function(given, start, end, window, size)
    expect(table, given, f"{call} changed block_table")
    is_of_lists = isinstance(got, list) and all(isinstance(row, list) for row in got)
    ensure(is_of_lists, f"{call} must return a list of lists", expected=expected, got=repr(got))
    expect(end - start, len(got), f"{call}: a list for each row, from position start to position end - 1")
    for row, (ours, theirs) in enumerate(zip(expected, got, strict=True)):
        expect(ours, theirs, f"{call}, row {row} (position {start + row}): {hint}")


BORDER = "position 8 is offset 0 of the second block, if a block has 8 slots; position 7 is the last of the first"
MIDDLE = "start is a position of the sequence: the block table still begins at position 0"
CAUSAL = "a row sees the positions up to its own, which was written before attention reads, and none after it"
OWN_ROW = (
    "the row's own position is one of the `window` positions; the others come before it and are in the cache, even if "
    "an earlier step computed them"
)
EACH = "each row has a window of its own, which ends with the row"
BEGINS = "a window that is longer than the text begins at position 0"
SLOTS: Table = {  # hint, block_table, start, end, window, block_size
    "without a window: all positions up to the row's own": [
        (
            "window=0 means that there is no window: positions 0 to 3, which are offsets 0 to 3 of block 0",
            [0],
            3,
            4,
            0,
            8,
        ),
        (CAUSAL, [0], 0, 4, 0, 8),
    ],
    "across the border of a block, and up to the border": [(BORDER, [0, 1], end - 1, end, 0, 8) for end in (12, 8, 9)],
    "blocks that lie anywhere in the pool": [
        ("the slot comes from the physical id block_table[index], not from the index", [6, 2, 9], 10, 11, 0, 4)
    ],
    "a decode with a window: the last few positions": [
        (OWN_ROW, [0, 1], 10, 11, 3, 8),
        ("the window's positions lie in two blocks", [6, 2, 9], 9, 10, 4, 4),
        ("a window of 1 is the row itself", [6, 2, 9], 9, 10, 1, 4),
        ("the window lies in blocks that do not begin the table", [6, 2, 9], 11, 12, 2, 4),
    ],
    "a window longer than the text": [(BEGINS, [6, 2], 2, 3, 5, 4), (BEGINS, [6, 2], 4, 5, 5, 4)],
    "several rows: each has a window of its own": [(EACH, [6, 2], 3, 6, 3, 4), (EACH, [6, 2, 9], 0, 12, 5, 4)],
    "a step that begins in the middle of the sequence": [
        (MIDDLE, [6, 2, 9], 5, 11, 0, 4),
        (MIDDLE, [6, 2, 9], 5, 11, 4, 4),
        ("the table may have more blocks than are read", [6, 2, 9, 1, 3], 5, 7, 4, 4),
    ],
}


def random_tables(function: WindowSlots, bench: Bench) -> None:
    """300 random tables, chunks and windows"""
    rng = random.Random(3)
    for _ in range(300):
        size, num_blocks = rng.choice([1, 2, 4, 7, 16]), rng.randint(1, 6)
        end = rng.randint(1, size * num_blocks)
        start = rng.randint(0, end - 1)
        window = rng.choice([0, 1, 3, size, rng.randint(1, end + 3)])
        table = rng.sample(range(40), num_blocks)
        compare_slots(function, "work this one out by hand", table, start, end, window, size)


@read_again("The same in a real generation")
def slots_in_the_engine(function: WindowSlots, bench: Bench) -> None:
    """the real model, with a window in every second layer, reads your slots and answers the same"""
    engine().read_windows(function, bench)


# -- write_kv -----------------------------------------------------------------------------------------------------


def compare_write(function: Any, hint: str, slots: list[int], dtype: str = "float32") -> None:
    engine().compare_write(function, hint, slots, dtype)


ONE = "slot 17 is k_cache[2, 1], in the very tensor that was given"
ALL = "each row of k and v goes to its own slot, and nothing else changes"
NONE = "slot -1 means: write nothing. In Python and PyTorch the index -1 is the last one"
BEHIND = f"{NONE}; the tokens after it must still be written"
BF16 = "with bfloat16 the wrong numbers are in the cache", [3, -1, 4], "bfloat16"
WRITES = cases(
    compare_write,
    {
        "one token into slot 17: block 2, offset 1": [(ONE, [17])],
        "several tokens, across the border of a block": [(ALL, [15, 16, 30, 0, 7, 8])],
        ("slot -1: that token is not written, the others are", MINUS_ONE_SECTION): [
            (NONE, [-1]),
            (BEHIND, [9, -1, 20]),
            (NONE, [-1, -1]),
        ],
        "a cache of bfloat16": [BF16],
    },
)


def answers_with_write(function: Any, bench: Bench) -> None:
    """the real model answers as before"""
    engine().compare_answers(bench)


use_blocks, use_write = partial(use_in_engine, "use_pool_blocks"), partial(use_in_engine, "use_write_kv")
LAST = random_tables, slots_in_the_engine
TASKS = [
    Task("pool_blocks", "How many bytes is a token?", use_blocks, (*cases(compare_blocks, BLOCKS), pools_of_engines)),
    Task("window_slots", "Where a token goes", lambda function: nullcontext(), (*cases(compare_slots, SLOTS), *LAST)),
    Task("write_kv", "Writing it", use_write, (*WRITES, asked_twice, answers_with_write)),
]
