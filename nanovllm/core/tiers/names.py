"""Names of blocks that hold in every process (chapter 7).

The pool's names are made for one process: adapters have numbers there, and nobody else reads the pool. What outlives a
process needs names that say everything K/V depends on: the model and how it is computed (a fingerprint), the adapter's
content in place of its number, and everything before the block. A salt is in what is hashed, and nowhere else: without
it nobody can ask for the block, and it cannot be read off a disk. (One that can be guessed can be tried.)
"""

import struct
from collections.abc import Callable
from hashlib import blake2b

from nanovllm.core.block_hash import ExtraKeys
from nanovllm.core.block_manager import Content

NAME_BYTES = 16
NO_EXTRA = bytes(NAME_BYTES)


class TierNames:
    """fingerprint: of all that the K/V of equal tokens depends on. adapter_digest: of the adapter with this lora_id."""

    def __init__(self, fingerprint: bytes, adapter_digest: Callable[[int], str] = str) -> None:
        self.key, self.adapter_digest = blake2b(fingerprint, digest_size=32).digest(), adapter_digest

    def name(self, parent: bytes | None, token_ids: list[int], extra: bytes) -> bytes:
        """Of a block. parent: name of the one before it, of this kind. extra: what digest() makes of its extra keys."""
        tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
        return self._hash((parent or b"") + extra + tokens)

    def digest(self, extra_keys: ExtraKeys) -> bytes:
        """Of a block's extra keys; zeros if it has none."""
        if not extra_keys:
            return NO_EXTRA
        keys = ((kind, self.adapter_digest(rest[0])) if kind == "lora" else (kind, *rest) for kind, *rest in extra_keys)
        return self._hash(b"extra" + b"".join(len(text).to_bytes(8, "little") + text for text in map(_encode, keys)))

    def name_of(self, parent: bytes | None, content: Content) -> bytes:
        return self.name(parent, content[1], self.digest(content[2]))

    def name_of_state(self, block_name: bytes) -> bytes:
        """Of the state after a block of a hybrid model."""
        return self._hash(b"state" + block_name)

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=NAME_BYTES, key=self.key).digest()


def _encode(key: tuple) -> bytes:
    return repr(key).encode("utf-8", "surrogatepass")
