"""Events of the prefix cache, with vLLM's names and fields: which blocks can be found from now on, and which no longer.

A router that follows them knows which prompts an engine has K/V for. It may go by block hashes, which it can compute
itself (BlockHasher in core/block_hash.py), or by token ids.
"""

import json
from dataclasses import dataclass
from typing import Any

MEDIUM_GPU = "GPU"  # the pool, on a CPU, too: as in vLLM


@dataclass
class BlockStored:
    """The K/V of these blocks can be found.

    block_hashes       each block's parent comes before it
    parent_block_hash  of the block before the first of these; None at the beginning of a sequence
    token_ids          of all these blocks
    lora_id, lora_name the adapter's, or None; lora_id is a part of the hash
    medium             where the K/V is: "GPU", or what a store below the pool calls itself
    extra_keys         None, if nothing but adapter and tokens is in these hashes. Otherwise for each block None or what
                       is in its hash: "salt", "mm". The salt itself is nobody's business.

    A store below the pool knows of a block only a digest of all that is in its hash beside tokens. It is the one
    extra key there, of a block with an adapter, too; lora_id and lora_name are None.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


@dataclass
class BlockRemoved:
    """Blocks of these hashes cannot be found any more."""

    block_hashes: list[bytes]
    medium: str | None


@dataclass
class AllBlocksCleared:
    """Nothing is known to be there any more. What stores below the pool have kept is told when it is stored again."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


@dataclass
class KVEventBatch:
    """What one step has changed, in order. ts: seconds since 1970."""

    ts: float
    events: list[KVCacheEvent]

    def to_json(self) -> str:
        """One line: {"ts": ..., "events": [{"type": "BlockStored", ...}, ...]}. Hashes are hexadecimal text."""
        return json.dumps({"ts": self.ts, "events": [_to_dict(event) for event in self.events]})

    @classmethod
    def from_json(cls, line: str | bytes) -> "KVEventBatch":
        batch = json.loads(line)
        return cls(batch["ts"], [_from_dict(fields) for fields in batch["events"]])


def _to_dict(event: KVCacheEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__, **vars(event)}
    if "block_hashes" in fields:
        fields["block_hashes"] = [block_hash.hex() for block_hash in fields["block_hashes"]]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = fields["parent_block_hash"].hex()
    if fields.get("extra_keys", ()) is None:
        del fields["extra_keys"]
    return fields


def _from_dict(fields: dict[str, Any]) -> KVCacheEvent:
    kind, fields = KINDS[fields["type"]], {name: value for name, value in fields.items() if name != "type"}
    if "block_hashes" in fields:
        fields["block_hashes"] = [bytes.fromhex(block_hash) for block_hash in fields["block_hashes"]]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = bytes.fromhex(fields["parent_block_hash"])
    if fields.get("extra_keys") is not None:
        fields["extra_keys"] = [None if keys is None else tuple(keys) for keys in fields["extra_keys"]]
    return kind(**fields)
