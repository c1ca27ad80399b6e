"""Hashes of blocks: tokens, parent, salt, adapter and image, and nothing else."""

import itertools

import pytest

from nanovllm.core.block_hash import BlockHasher, MMSpan, extra_keys
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence
from tests.core.by_hand import admit, compute


def hashes_of(seq_tokens, block_size, algo="xxh64", **keys) -> list[bytes]:
    manager = BlockManager(len(seq_tokens) // block_size + 1, block_size, hash_algo=algo)
    return admit(manager, seq_tokens, **keys).block_hashes


@pytest.mark.parametrize(("algo", "size"), [("xxh64", 8), ("sha256", 32)])
def test_a_hash_says_parent_tokens_and_extra_keys(algo, size):
    hasher = BlockHasher(2, algo)
    parts = itertools.product(
        (None, b"\0" * size, b"\1" * size),
        ([1, 2], [2, 1], [0, 258], [1, 2 + 2**16]),
        (
            (),
            (("salt", "a"),),
            (("salt", "ab"),),
            (("lora", 1),),
            (("mm", "a", 0),),
            (("mm", "a", 1),),
            (("lora", 1), ("mm", "a", 0)),
        ),
    )
    hashes = [hasher.hash_block(*p) for p in parts]
    assert len(set(hashes)) == len(hashes) and {len(block_hash) for block_hash in hashes} == {size}
    assert hasher.hash_block(None, [1, 2]) == BlockHasher(2, algo).hash_block(None, [1, 2]), (
        "not Python's hash(): the same anywhere"
    )


def test_the_encoding_is_injective():
    """Keys whose texts run together the same way are told apart before any hash function sees them."""
    seen = []
    hasher = BlockHasher(1)
    hasher._hash = lambda data: seen.append(data) or b""
    for extra in [
        (("mm", "ab", 0), ("mm", "c", 0)),
        (("mm", "a", 0), ("mm", "bc", 0)),
        (("mm", "abM", 0),),
        (("salt", "S"),),
        (("salt", ""), ("salt", "")),
        (("salt", "\ud800"),),
    ]:
        hasher.hash_block(None, [1], extra)
    assert len(set(seen)) == len(seen)


def test_unknown_hash_function():
    with pytest.raises(ValueError, match="xxh64, sha256, found 'md5'"):
        BlockManager(1, 1, hash_algo="md5")


def test_multimodal_example():
    """An image of 41 placeholders in a prompt of 50 tokens: three full blocks, the fourth has no hash yet."""
    text, placeholder = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551], 10
    prompt = [*text, *[placeholder] * 41, 4]
    assert len(prompt) == 50
    cat = hashes_of(prompt, 16, mm_spans=(MMSpan(8, 41, "hash of a cat"),))
    dog = hashes_of(prompt, 16, mm_spans=((8, 41, "hash of a dog"),))
    assert len(cat) == 3 and len(set(cat)) == 3 and not set(cat) & set(dog)
    manager = BlockManager(8, 16)
    seq = admit(manager, prompt, mm_spans=(MMSpan(8, 41, "hash of a cat"),))
    compute(manager, seq, *range(14))
    assert len(seq.block_hashes) == 4 and seq.block_hashes[:3] == cat

    keys = [extra_keys(i, 16, mm_spans=(MMSpan(8, 41, "cat"),)) for i in range(4)]
    assert keys == [(("mm", "cat", 8),), (("mm", "cat", -8),), (("mm", "cat", -24),), (("mm", "cat", -40),)]
    # A span that ends where a block begins, or begins where it ends, is not part of it.
    assert [bool(extra_keys(i, 16, mm_spans=(MMSpan(16, 16, "cat"),))) for i in range(3)] == [False, True, False]


@pytest.mark.parametrize("num_text_blocks", [2, 3])
def test_another_image_changes_the_hashes_from_its_first_placeholder_on(num_text_blocks):
    start = num_text_blocks * 16 + 5
    prompt = [*range(start), *[10] * 41, *range(50)]
    cat = hashes_of(prompt, 16, mm_spans=(MMSpan(start, 41, "cat"),))
    dog = hashes_of(prompt, 16, mm_spans=(MMSpan(start, 41, "dog"),))
    assert [a == b for a, b in zip(cat, dog, strict=True)] == [True] * num_text_blocks + [False] * (
        len(cat) - num_text_blocks
    )
    moved = hashes_of(prompt, 16, mm_spans=(MMSpan(start + 1, 41, "cat"),))
    assert moved[:num_text_blocks] == cat[:num_text_blocks] and moved[num_text_blocks] != cat[num_text_blocks]


def test_salt_and_lora_id_enter_where_they_must():
    assert [extra_keys(i, 4, cache_salt="s") for i in (0, 1)] == [(("salt", "s"),), ()]
    assert [extra_keys(i, 4, lora_id=7) for i in (0, 1)] == [(("lora", 7),)] * 2
    tokens = list(range(12))
    variants = [
        hashes_of(tokens, 4, **keys)
        for keys in ({}, dict(cache_salt="a"), dict(cache_salt="b"), dict(lora_id=1), dict(lora_id=2), dict(lora_id=0))
    ]
    assert len({block_hash for hashes in variants for block_hash in hashes}) == 3 * len(variants), (
        "no two share any block"
    )


def test_each_full_block_is_hashed_once(monkeypatch):
    manager, calls = BlockManager(16, 4), []
    hash_block = manager.hasher.hash_block
    monkeypatch.setattr(manager.hasher, "hash_block", lambda *args: calls.append(args) or hash_block(*args))
    seq = Sequence(list(range(18)))
    assert manager.can_allocate(seq) and manager.allocate_with_prefix(seq)
    seq.num_computed_tokens = 18
    manager.register_prefix(seq)
    seq.tokens += [1, 2, 3]
    seq.num_computed_tokens = 21
    assert manager.append_slots(seq, 0)
    manager.register_prefix(seq)
    manager.free(seq)
    assert manager.allocate_with_prefix(seq) and seq.num_cached_tokens == 20
    assert len(calls) == 5
