"""Six ways to build a prefix cache wrong. Each is a context in which the engine's own code has one fault.

Code for prefix caching often has these faults. Each is as small as it can be: a function of the BlockManager, of its
queue or of its hash that leaves one thing out. None needs a model: simulator.py plays them without one, and traps.py
shows what a model then answers.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import xxhash

from chapters.patching import replaced
from nanovllm.core import block_manager
from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.block_manager import Block, BlockEvent, BlockManager, FreeBlockQueue
from nanovllm.core.sequence import Sequence

Fault = Callable[[], AbstractContextManager]


def without_parent() -> AbstractContextManager:
    """1. A block is hashed from its token ids alone."""
    return _named(lambda parent, token_ids: array("I", token_ids).tobytes())


def bytes_of_ids() -> AbstractContextManager:
    """2. bytes() of token ids, which raises above 255."""
    return _named(lambda parent, token_ids: (parent or b"") + bytes(token_ids))


def low_bytes_of_ids() -> AbstractContextManager:
    """2. The fix that comes to mind when bytes() raises."""
    return _named(lambda parent, token_ids: (parent or b"") + bytes(token_id % 256 for token_id in token_ids))


@contextmanager
def _named(encode: Callable[[bytes | None, list[int]], bytes]) -> Iterator[None]:
    """A block is hashed from these bytes. Hits are not verified, as in code that trusts its hashes."""

    def hash_block(self: BlockHasher, parent: bytes | None, token_ids: list[int], extra: object = ()) -> bytes:
        return xxhash.xxh64_digest(encode(parent, token_ids))

    with replaced(BlockHasher, "hash_block", hash_block), _unverified():
        yield


def _unverified() -> AbstractContextManager:
    return replaced(Block, "holds", lambda self, content: True)


def references_stay() -> AbstractContextManager:
    """3. References to the hits are taken before it is known whether there is room, and not given back if not."""
    ours = BlockManager.allocate_with_prefix

    def allocate_with_prefix(self: BlockManager, seq: Sequence) -> bool:
        if ours(self, seq):
            return True
        for index in range(len(seq.tokens) // self.block_size):
            copies = self.hash_to_block.get(self.hash_block(seq, index)[0])
            if copies is None:
                break
            block = next(iter(copies.values()))
            if block.ref_count == 0:
                self.free_blocks.remove(block)
            block.ref_count += 1
        return False

    return replaced(BlockManager, "allocate_with_prefix", allocate_with_prefix)


class HitsStayFree(FreeBlockQueue):
    """A free queue from which hits are not taken out."""

    def remove(self, block: Block) -> None:
        pass

    def popleft(self) -> Block:
        block = self._ring.next_free
        super().remove(block)
        return block

    def append(self, block: Block) -> None:
        if block.next_free is None:
            super().append(block)


def hits_stay_free() -> AbstractContextManager:
    """4. Hits get a reference and stay in the free queue. Only for managers that are made in this context."""
    return replaced(block_manager, "FreeBlockQueue", HitsStayFree)


@contextmanager
def names_stay() -> Iterator[None]:
    """5. A block that is taken for new content keeps its old entry in the hash map."""

    def take_fresh_blocks(self: BlockManager, seq: Sequence, num_blocks: int) -> None:
        for _ in range(num_blocks):
            block = self.free_blocks.popleft()
            block.block_hash = block.parent_hash = None
            block.token_ids, block.extra_keys = [], ()
            block.ref_count = 1
            seq.block_table.append(block.block_id)
            if self.on_event is not None:
                self.on_event(BlockEvent("allocate", block.block_id, seq.seq_id))

    with replaced(BlockManager, "take_fresh_blocks", take_fresh_blocks), _unverified():
        yield


@contextmanager
def nothing_left() -> Iterator[None]:
    """6. A prompt that is cached to its last token counts as computed to its last token."""
    ours = BlockManager.allocate_with_prefix

    def allocate_with_prefix(self: BlockManager, seq: Sequence) -> bool:
        done = ours(self, seq)
        if seq.num_registered_blocks * self.block_size == len(seq.tokens):
            seq.num_cached_tokens = seq.num_computed_tokens = len(seq.tokens)
        return done

    with (
        replaced(BlockManager, "allocate_with_prefix", allocate_with_prefix),
        replaced(BlockManager, "is_cached", lambda self, seq, position: False),  # there is no position to ask about
    ):
        yield
