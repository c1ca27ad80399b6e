"""The hash chain that names a full block of K/V (chapter 7).

K and V at a position depend on every token before it, so a block is identified by its own tokens *and* its whole
prefix. The chain includes the prefix at the cost of hashing one block: name = H(parent's name, token ids, extra keys).
The parent implies the position, so that needs no field.

The bytes that are hashed decode in only one way (tags, lengths, fixed widths), so different blocks give different
input to H, and two names are equal only if H itself collides. xxh64 is fast, but somebody who searches for a collision
will find one; therefore hits are verified (block_manager.py), and sha256 is there for tenants who do not trust each
other.

Extra keys tell apart what equal token ids may hide:
- cache_salt enters the first block, and through the chain every later one;
- lora_id enters every block: adapters change K and V from the first token on;
- a multimodal span (an image's placeholders all have the same id) enters each block it overlaps, as the content's
  hash and where it starts relative to the block. The content hash must be an exact one: a perceptual hash, which
  sends *similar* images to one name, would serve one image's K/V for another and change the answers.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash


class MMSpan(NamedTuple):
    """Placeholder tokens [start, start + length) of a prompt that stand for one image, sound or video."""

    start: int
    length: int
    content_hash: str


ExtraKeys = tuple[tuple, ...]

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
    """What, beside parent and token ids, makes this block what it is. () for plain text."""
    keys: list[tuple] = []
    if cache_salt is not None and block_index == 0:
        keys.append(("salt", cache_salt))
    if lora_id is not None:
        keys.append(("lora", lora_id))
    first = block_index * block_size
    for start, length, content_hash in mm_spans:
        if start < first + block_size and start + length > first:
            keys.append(("mm", content_hash, start - first))
    return tuple(keys)


class BlockHasher:
    """Names blocks of `block_size` tokens. Names are 8 (xxh64) or 32 (sha256) bytes."""

    def __init__(self, block_size: int, algo: str = "xxh64") -> None:
        if algo not in HASH_FUNCTIONS:
            raise ValueError(f"hash_algo must be one of {', '.join(HASH_FUNCTIONS)}, found {algo!r}")
        self._hash = HASH_FUNCTIONS[algo]
        self._pack = struct.Struct(f"<{block_size}I").pack

    def name(self, parent: bytes | None, token_ids: Sequence[int], extra: ExtraKeys = ()) -> bytes:
        """Name of a full block. parent is None for the first; token ids fit in 32 bits."""
        head = b"\x01" + parent if parent is not None else b"\x00"
        tail = b"".join(map(_encode_key, extra)) if extra else b""
        return self._hash(head + self._pack(*token_ids) + tail)


def _encode_key(key: tuple) -> bytes:
    if key[0] == "lora":
        return b"L" + struct.pack("<q", key[1])
    text = key[1].encode("utf-8", "surrogatepass")
    if key[0] == "salt":
        return b"S" + struct.pack("<I", len(text)) + text
    return b"M" + struct.pack("<Iq", len(text), key[2]) + text
