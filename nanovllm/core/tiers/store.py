"""What a tier is asked for: names. What it promises: blocks. What it delivers: their bytes, or fewer (chapter 7)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

BLOCK, STATE = 0, 1  # kinds of records


class Record(NamedTuple):
    """What a block, or the state after one, is known by in tiers. What is found under a name is compared with it.

    name, parent, extra   of TierNames
    depth                 records that come before this one, along its parents
    """

    name: bytes
    parent: bytes | None
    token_ids: Sequence[int]
    extra: bytes
    depth: int
    kind: int = BLOCK


class Store(Protocol):
    """A tier. No call waits for a disk."""

    medium: str

    def may_have(self, name: bytes) -> bool:
        """Is it worth asking for? True may be wrong, and so may False for what another process has just written."""

    def put(self, records: list[Record], read: Callable[[], list[Any]]) -> None:
        """Keep them, if there is room and time for it. Parents come first. read: makes copies of their data, if so."""

    def fetch(self, records: list[Record]) -> "Future[list[Any]]":
        """Data of the first of these, in their order, up to one that is not there or is not what was asked for."""

    def touch(self, names: list[bytes]) -> None:
        """These were used now, and count as used together. Parents come first."""

    def reset(self) -> None:
        """Forget everything, before the next fetch."""

    def counts(self) -> dict[str, int]:
        """num_records and num_bytes that it holds; num_read, num_dropped, num_removed, num_damaged so far."""


class BlockData(Protocol):
    """The pool's tensors, for who moves what is in them."""

    def read(self, block_ids: list[int]) -> list[Any]:
        """A copy of each block's K/V, in all layers."""

    def write(self, block_ids: list[int], data: list[Any]) -> None: ...

    def read_state(self, slot: int) -> Any:
        """A copy of what lies in a slot of a hybrid model's states."""

    def write_state(self, slot: int, data: Any) -> None: ...
