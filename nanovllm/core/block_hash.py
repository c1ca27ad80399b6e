"""The hash of a full block of K/V: the key of the prefix cache (chapter 7).

K and V at a position depend on every token before it, so a block is identified by its own tokens *and* its whole
prefix. A chain of hashes includes the prefix at the cost of hashing one block:

    block_hash = H(parent's block_hash, token ids, extra keys)

The parent's hash implies the block's position, so the position needs no field of its own.

The bytes that are hashed decode in only one way (tags, lengths, fixed widths), so different blocks give different
input to H, and two block hashes are equal only if H itself collides. xxh64 is fast, but somebody who searches for a
collision will find one. Therefore every hit is verified (block_manager.py), and a collision never gives a wrong answer.
But of two blocks that collide, the later one cannot be cached, so somebody who builds collisions could spoil another's
cache. For tenants who do not trust each other, there is sha256.

Extra keys make a difference where equal token ids do not mean equal K/V:
- cache_salt enters the first block, and through the chain every later one;
- lora_id enters every block: adapters change K and V from the first token on;
- a multimodal span (an image's placeholders all have the same id) enters each block it overlaps, as the content's
  hash and its start relative to the block. The content hash must be exact: a perceptual hash, which is equal for
  *similar* images, would serve one image's K/V for another and change the answers.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash


class MMSpan(NamedTuple):
    """Placeholder tokens [start, start + length) of a prompt that stand for one image."""

    start: int
    length: int
    content_hash: str


ExtraKeys = tuple[tuple, ...]  # each is ("salt", text), ("lora", id) or ("mm", content hash, relative start)

HASH_FUNCTIONS: dict[str, Callable[[bytes], bytes]] = {
    "xxh64": xxhash.xxh64_digest,
    "sha256": lambda data: hashlib.sha256(data).digest(),
}


def extra_keys(
    block_index: int,
    block_size: int,
    cache_salt: str | None = None,
    lora_id: int | None = None,
    mm_spans: Sequence[MMSpan] = (),
) -> ExtraKeys:
    """What enters the hash of this block besides its parent's hash and its token ids. () for plain text."""
    keys: list[tuple] = []
    if cache_salt is not None and block_index == 0:
        keys.append(("salt", cache_salt))
    if lora_id is not None:
        keys.append(("lora", lora_id))
    block_start = block_index * block_size
    for start, length, content_hash in mm_spans:
        if start < block_start + block_size and start + length > block_start:
            keys.append(("mm", content_hash, start - block_start))
    return tuple(keys)


class BlockHasher:
    """Hashes blocks of `block_size` tokens to 8 bytes (xxh64) or 32 (sha256).

    adapter_digest: a function that returns the digest of an adapter's content, given its lora_id. With it, hashes hold
    in every process. Without it they hold in this process only, for a lora_id is whatever number an adapter got here.
    """

    def __init__(
        self, block_size: int, algo: str = "xxh64", adapter_digest: Callable[[int], str] | None = None
    ) -> None:
        if algo not in HASH_FUNCTIONS:
            raise ValueError(f"hash_algo must be one of {', '.join(HASH_FUNCTIONS)}, found {algo!r}")
        self._hash = HASH_FUNCTIONS[algo]
        self._pack = struct.Struct(f"<{block_size}I").pack
        self._adapter_digest = adapter_digest

    def hash_block(self, parent_hash: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys = ()) -> bytes:
        """The hash of a full block. parent_hash is None for the first; token ids fit in 32 bits."""
        parent = b"\x00" if parent_hash is None else b"\x01" + parent_hash
        return self._hash(parent + self._pack(*token_ids) + self.encode(extra_keys))

    def encode(self, extra_keys: ExtraKeys) -> bytes:
        """The bytes with which extra keys enter a hash; none for plain text."""
        return b"".join(map(self._encode_key, extra_keys))

    def _encode_key(self, key: tuple) -> bytes:
        if key[0] == "salt":
            return b"S" + _encode_text(key[1])
        if key[0] == "mm":
            return b"M" + _encode_text(key[1]) + struct.pack("<q", key[2])
        # The only other kind is "lora".
        if self._adapter_digest is not None:
            return b"A" + _encode_text(self._adapter_digest(key[1]))
        return b"L" + struct.pack("<q", key[1])


def _encode_text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(encoded)) + encoded
