"""A tier is asked for block hashes, promises blocks, and delivers their bytes, or fewer (chapter 7)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

BLOCK, STATE = 0, 1  # kinds of records
EXTRA_BYTES = 16
NO_EXTRA = bytes(EXTRA_BYTES)


class Record(NamedTuple):
    """A block, or the state of a hybrid model after a block, as tiers know it.

    What a store finds under its key is compared with it, as a hit in the pool is compared with its content.

    block_hash    of the block
    parent_hash   of the block before it; None for the first
    token_ids     of the block; a state has none, since its key says all
    extra         digest of the block's extra keys; NO_EXTRA for plain text
    """

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: Sequence[int]
    extra: bytes
    kind: int = BLOCK

    @property
    def key(self) -> bytes:
        return self.block_hash if self.kind == BLOCK else state_key(self.block_hash)


def state_key(block_hash: bytes) -> bytes:
    """Under which the state after a block is kept."""
    return block_hash + b"state"


class Store(Protocol):
    """A tier. No call waits for a disk."""

    medium: str

    def may_have(self, key: bytes) -> bool:
        """Is it worth asking for? True may be wrong, and so may False for what another process has just written."""

    def put(self, records: list[Record], read: Callable[[int], list[Any]]) -> None:
        """Keep them, or the first of them, if there is room and time for it. Parents come first.

        read(n) makes copies of the data of the first n.
        """

    def fetch(self, records: list[Record]) -> "Future[list[Any]]":
        """Data of the first of these, in their order, up to one that is not there or is not what was asked for."""

    def touch(self, keys: list[bytes]) -> None:
        """These were used now, and count as used together. Parents come first."""

    def reset(self) -> None:
        """Forget everything, before the next fetch."""

    def counts(self) -> dict[str, int]:
        """num_records and num_bytes that it holds; num_read, num_dropped, num_removed, num_damaged so far."""


class BlockData(Protocol):
    """The pool's tensors, for whoever moves what is in them."""

    def read(self, block_ids: list[int]) -> list[Any]:
        """A copy of each block's K/V, in all layers."""

    def write(self, block_ids: list[int], data: list[Any]) -> None: ...

    def read_state(self, slot: int) -> Any:
        """A copy of what lies in a slot of a hybrid model's states."""

    def write_state(self, slot: int, data: Any) -> None: ...
