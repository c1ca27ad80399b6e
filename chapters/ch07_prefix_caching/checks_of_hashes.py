"""How the first exercise of chapter 7 is graded: hashes of blocks."""

import itertools
import os
import runpy
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import getfile, unwrap
from typing import Any

from chapters.expect import Wrong, ensure
from chapters.grading import Bench
from chapters.patching import replaced
from nanovllm.core.block_hash import HASH_FUNCTIONS, BlockHasher, ExtraKeys, MMSpan, extra_keys
from nanovllm.core.block_manager import BlockManager, Content
from nanovllm.core.sequence import Sequence

XXH64 = HASH_FUNCTIONS["xxh64"]
PARENT = b"aaaabbbb"  # as long as a hash by xxh64


def call(
    function: Any,
    token_ids: Any = (7, 8, 9, 9),
    parent: bytes | None = PARENT,
    start: int = 40,
    salt: str | None = None,
    lora: int | None = None,
    spans: Any = (),
    hash_bytes: Any = XXH64,
) -> bytes:
    """With a block in the middle of a text, unless told otherwise. A parent of None: with the first block."""
    hashed: list[bytes] = []

    def watched(data: bytes) -> bytes:
        ensure(isinstance(data, bytes | bytearray), f"hash_bytes takes bytes, and was given {type(data).__name__}")
        hashed.append(hash_bytes(data))
        return hashed[-1]

    start = 0 if parent is None else start
    mm_spans = tuple(MMSpan(start + first, length, content) for first, length, content in spans)
    block_hash = function(parent, list(token_ids), start, salt, lora, mm_spans, watched)
    hint = "the hash is what hash_bytes returns for the block's content"
    ensure(bool(hashed) and block_hash == hashed[-1], hint, expected="bytes", got=repr(block_hash))
    return block_hash


def show(case: dict[str, Any]) -> str:
    parent = case.get("parent", PARENT)
    told = ["no parent" if parent is None else f"parent {parent!r}", f"ids {list(case.get('token_ids', (7, 8, 9, 9)))}"]
    told += [f"{name} {case[name]!r}" for name in ("salt", "lora") if case.get(name) is not None]
    told += [f"start {case['start']}"] if "start" in case else []
    told += [f"{content!r} of {length} tokens at {start}" for start, length, content in case.get("spans", ())]
    return ", ".join(told)


def expect_hashes(function: Any, same: bool, one: dict[str, Any], other: dict[str, Any], hint: str) -> None:
    """Do these two blocks have one hash, or two?"""
    hashes = call(function, **one), call(function, **other)
    what = f"{'one hash' if same else 'two hashes'} for ({show(one)}) and ({show(other)})"
    ensure((hashes[0] == hashes[1]) == same, hint, expected=what, got=f"{hashes[0]!r} and {hashes[1]!r}")


def word(letters: str) -> list[int]:
    """Token ids whose four bytes are letters, the same letter four times each."""
    return [int.from_bytes(letter.encode() * 4, "little") for letter in letters]


def hashes_tokens_and_parents(function: Any, bench: Bench) -> None:
    """different tokens, a different order or a different parent give a different hash"""
    for ids in ((7, 8, 9, 10), (8, 7, 9, 9)):
        expect_hashes(function, False, {}, dict(token_ids=ids), "the token ids and their order belong in the hash")
    hint = "token ids go up to 2**32 - 1 and need four bytes each, or something that separates them"
    for ids in ((7 + 256, 8, 9, 9), (7 + 2**16, 8, 9, 9), (7 + 2**31, 8, 9, 9), (2**32 - 1, 8, 9, 9)):
        expect_hashes(function, False, {}, dict(token_ids=ids), hint)
    hint = "the parent belongs in the hash: K and V of a block depend on every token before it"
    expect_hashes(function, False, {}, dict(parent=b"aaaabbbc"), hint)
    expect_hashes(function, False, {}, dict(parent=None), hint)
    one, other = (dict(parent=b"p" * 31 + last, hash_bytes=HASH_FUNCTIONS["sha256"]) for last in (b"1", b"2"))
    hint = "a parent's sha256 hash has 32 bytes, and all of them belong in the child's hash"
    expect_hashes(function, False, one, other, hint)


def hashes_alike(function: Any, bench: Bench) -> None:
    """the same content gives the same hash, also in another process"""
    case, again = (
        dict(salt="".join(["s", "alt"]), lora=int("300"), spans=[(2, 5, "".join(["c", "at"]))], parent=None)
        for _ in range(2)
    )
    expect_hashes(function, True, case, again, "the same content, built again, must get the same hash")
    one, two = (_hashed_in_a_process(function, seed) for seed in ("1", "2"))
    hint = (
        "another process gives the same block a different hash. Python's hash() of bytes and text begins with a random "
        "number in every process; use hash_bytes on the bytes themselves"
    )
    ensure(not one or not two or one == two, hint, expected=f"{one} in both", got=f"{one} and {two}")


HASH_ONE = """
import runpy, sys
from nanovllm.core.block_hash import HASH_FUNCTIONS, MMSpan
function = runpy.run_path(sys.argv[1])[sys.argv[2]]
print(function(None, [7, 8, 9, 9], 0, "salt", 1, (MMSpan(2, 5, "cat"),), HASH_FUNCTIONS["xxh64"]).hex())
"""


def _hashed_in_a_process(function: Any, seed: str) -> str:
    """The hash in hexadecimal. Nothing if the function cannot be taken out of its file, or that takes too long."""
    if sys.platform == "emscripten":  # a browser has no processes
        return _hashed_with_another_hash(function, seed)
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HASH_ONE, getfile(unwrap(function)), function.__name__]
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=20).stdout.strip()
    return ""


def _hashed_with_another_hash(function: Any, seed: str) -> str:
    """The same, with a hash() that begins with a number of its own, as it has in every process."""

    def hash_there(value: Any) -> int:
        if isinstance(value, tuple):
            return hash(tuple(map(hash_there, value)))
        return hash((seed, value)) if isinstance(value, str | bytes) else hash(value)

    with suppress(Exception):
        there = runpy.run_path(getfile(unwrap(function)), {"hash": hash_there})[function.__name__]
        return there(None, [7, 8, 9, 9], 0, "salt", 1, (MMSpan(2, 5, "cat"),), XXH64).hex()
    return ""


def hashes_salts_and_adapters(function: Any, bench: Bench) -> None:
    """salts in the first block only, adapters in every block"""
    first: dict[str, Any] = dict(parent=None)
    hint = "the salt belongs in the first block's hash: users with different salts must not find each other's blocks"
    expect_hashes(function, False, first, first | dict(salt="a"), hint)
    expect_hashes(function, False, first | dict(salt="a"), first | dict(salt="b"), hint)
    hint = 'the salt "" is not the same as no salt: ask `is not None`'
    expect_hashes(function, False, first, first | dict(salt=""), hint)
    hint = "the salt enters the first block only: later ones have it through their parents"
    expect_hashes(function, True, {}, dict(salt="a"), hint)
    for where, what in ((first, "the first block"), ({}, "a later block")):
        hint = f"lora_id belongs in the hash of every block, and is missing in {what}"
        expect_hashes(function, False, where, where | dict(lora=1), hint)
        expect_hashes(function, False, where | dict(lora=1), where | dict(lora=2), hint)
        hint = "lora_id 0 is an adapter like any other and not the same as none: ask `is not None`"
        expect_hashes(function, False, where, where | dict(lora=0), hint)


def hashes_images(function: Any, bench: Bench) -> None:
    """images: in each block they overlap, what they are and where they begin relative to it"""
    image, image_ids = (-6, 40, "cat"), dict(token_ids=[10] * 4)
    hint = "all images have the same placeholder ids: content_hash belongs in each block that the span overlaps"
    for span in ((2, 40, "cat"), (0, 4, "cat"), image, (3, 1, "cat"), (-5, 6, "cat")):
        expect_hashes(function, False, image_ids, image_ids | dict(spans=[span]), hint)
        other = (*span[:2], "dog")
        expect_hashes(function, False, image_ids | dict(spans=[other]), image_ids | dict(spans=[span]), hint)
    hint = "this span does not overlap the block: it ends where the block begins or earlier, or begins where it ends"
    for span in ((4, 9, "cat"), (-9, 9, "cat"), (40, 9, "cat")):
        expect_hashes(function, True, image_ids, image_ids | dict(spans=[span]), hint)
    hint = "where the span begins belongs in the hash, too: a different part of the image lies in the block"
    expect_hashes(function, False, image_ids | dict(spans=[image]), image_ids | dict(spans=[(-5, 40, "cat")]), hint)
    hint = "a block can have several images, and all of them count"
    pair = [(-1, 3, "cat"), (3, 5, "dog")]
    expect_hashes(function, False, dict(spans=pair), dict(spans=pair[:1]), hint)
    expect_hashes(function, False, dict(spans=pair), dict(spans=pair[1:]), hint)
    hint = "the same picture can stand in a block twice: each span counts, not each content_hash"
    twice = [(-1, 3, "cat"), (2, 5, "cat")]
    expect_hashes(function, False, dict(spans=twice), dict(spans=twice[:1]), hint)
    expect_hashes(function, False, dict(spans=twice), dict(spans=twice[1:]), hint)
    hint = "images before the block or after it leave it alone, and those in it still count: look at every span"
    before, after = (-9, 9, "bird"), (4, 9, "bird")
    expect_hashes(function, True, dict(spans=[before, *pair, after]), dict(spans=pair), hint)
    hint = "two images side by side: where the second begins says which placeholders belong to it"
    split = [[(0, length, "cat"), (length, 4 - length, "dog")] for length in (1, 3)]
    expect_hashes(function, False, image_ids | dict(spans=split[0]), image_ids | dict(spans=split[1]), hint)
    hint = "a span's start counts relative to the block, span.start - start, and start itself does not enter the hash"
    expect_hashes(function, True, dict(start=40, spans=[image]), dict(start=80, spans=[image]), hint)
    expect_hashes(function, True, dict(start=40), dict(start=80), hint)
    hint = "the length of a span only says whether it overlaps the block: it does not enter the hash"
    expect_hashes(function, True, dict(spans=[(2, 40, "cat")]), dict(spans=[(2, 30, "cat")]), hint)


# Pairs whose parts run together in one way of writing them down or another.
RUN_TOGETHER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(parent=None), dict(parent=bytes(8))),
    (dict(parent=None, token_ids=word("abcd"), salt="eeeeffff"), dict(parent=b"aaaabbbb", token_ids=word("cdef"))),
    (dict(parent=None, salt="abcd"), dict(parent=None, lora=int.from_bytes(b"\4\0\0\0abcd", "little"))),
    (dict(parent=None, salt="ab", spans=[(0, 9, "c")]), dict(parent=None, salt="a", spans=[(0, 9, "bc")])),
    (dict(spans=[(2, 40, "x-1")]), dict(spans=[(-12, 40, "x")])),
    (dict(lora=1, spans=[(0, 9, "2cat")]), dict(lora=12, spans=[(0, 9, "cat")])),
    (dict(spans=[(0, 1, "ab"), (2, 1, "c")]), dict(spans=[(0, 1, "ab02c"), (2, 1, "")])),
]
# Parts of which no two contents may have the same hash, whichever are put together.
PARENTS = None, b"\0" * 8, b"\1" * 8, b"aaaabbbb"
IDS = (1, 2, 3, 4), (2, 1, 3, 4), (0, 258, 3, 4), (1, 2, 3, 4 + 2**16), (1, 23, 4, 5), (12, 3, 4, 5), (1, 515, 4, 5)
MORE_IDS = (258, 3, 4, 5), (1, 770, 4, 5), (513, 3, 4, 5)
SALTS, LORAS = (None, "", "a", "ab", "a1", "1", "cat", "cat0"), (None, 0, 1, 2, -1, 2**40)
SPANS = *(((start, 9, "a"),) for start in (0, 1, -7)), ((0, 1, "a"), (1, 1, "b")), ((0, 1, "b"), (1, 1, "a"))
CATS = *(((start, 9, "cat"),) for start in (0, 2)), ()


def forgeries(function: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs that meet if a part is hashed bare: what was hashed for one block is put into a part of the other."""
    data = b""

    def noted(hashed: bytes) -> bytes:
        nonlocal data
        data = bytes(hashed)
        return XXH64(hashed)

    def hashed_for(**case: Any) -> bytes:
        call(function, parent=None, hash_bytes=noted, **case)
        return data

    # Without a tag for the parent: a first block, and one whose parent and ids are what was hashed for it.
    extras: list[dict[str, Any]] = [dict(lora=5), *(dict(salt="x" * length) for length in range(12))]
    for extra in extras:
        if len(hashed_for(**extra)) == 24:
            for order in "<>":
                ids = struct.unpack(f"{order}4I", data[8:])
                yield dict(parent=None, **extra), dict(parent=data[:8], token_ids=ids)
    # Without the salt's length: a salt that goes on with what is hashed for an adapter.
    alone, both = hashed_for(salt="a"), hashed_for(salt="a", lora=5)
    if both.startswith(alone):
        salt = "a" + both[len(alone) :].decode(errors="ignore")
        yield dict(parent=None, salt="a", lora=5), dict(parent=None, salt=salt)
    # Without a content_hash's length: one that goes on with what is hashed up to the end of the next span's.
    pair = dict(spans=[(0, 1, "cat"), (2, 1, "dog")])
    both = hashed_for(**pair)
    between = both[both.find(b"cat") : both.rfind(b"dog") + 3].decode(errors="ignore")
    for start in (0, 2):  # of the first span if the start stands before the content_hash, else of the second
        yield dict(parent=None, **pair), dict(parent=None, spans=[(start, 1, between)])


def hashes_apart(function: Any, bench: Bench) -> None:
    """nothing runs together: 'a' + 'bc' is not the same content as 'ab' + 'c'"""
    hint = (
        "two contents give the same bytes: give each part a tag, and a fixed width or its length in front; a byte of "
        "its own says whether there is a parent"
    )
    for one, other in (*RUN_TOGETHER, *forgeries(function)):
        expect_hashes(function, False, one, other, hint)
    seen: dict[bytes, dict[str, Any]] = {}
    parts = PARENTS, (*IDS, *MORE_IDS), SALTS, LORAS, (*SPANS, *CATS)
    for parent, ids, salt, lora, spans in itertools.product(*parts):
        if parent is None or salt is None:
            case: dict[str, Any] = dict(parent=parent, token_ids=ids, salt=salt, lora=lora, spans=spans)
            other = seen.setdefault(call(function, **case), case)
            if other is not case:
                raise Wrong(hint, expected=f"two hashes for ({show(other)}) and ({show(case)})", got="one hash")


@contextmanager
def use_hash(function: Callable[..., bytes]) -> Iterator[None]:
    def hash_block(manager: BlockManager, seq: Sequence, index: int) -> tuple[bytes, Content]:
        size, hashes = manager.block_size, seq.block_hashes
        keys, start = (seq.cache_salt, seq.lora_id, seq.mm_spans), index * size
        parent, token_ids = hashes[index - 1] if index else None, seq.tokens[start : start + size]
        if index == len(hashes):
            hashes.append(function(parent, list(token_ids), start, *keys, manager.hasher._hash))
        return hashes[index], (parent, token_ids, extra_keys(index, size, *keys))

    def hash_one(hasher: BlockHasher, parent: bytes | None, token_ids: list[int], extra: ExtraKeys = ()) -> bytes:
        """As check_integrity asks: from what a block of the pool has stored."""
        parts = {key[0]: key[1] for key in extra}
        spans = tuple(MMSpan(key[2], len(token_ids) - key[2], key[1]) for key in extra if key[0] == "mm")
        return function(parent, list(token_ids), 0, parts.get("salt"), parts.get("lora"), spans, hasher._hash)

    with replaced(BlockManager, "hash_block", hash_block), replaced(BlockHasher, "hash_block", hash_one):
        yield


HASHES = hashes_tokens_and_parents, hashes_alike, hashes_salts_and_adapters, hashes_images, hashes_apart
