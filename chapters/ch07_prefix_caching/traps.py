"""Six ways to build a prefix cache wrong, put into the real engine one at a time, and what it answers then.

Each is a fault that code for prefix caching often has, written as small as it can be: a function of the BlockManager,
its queue or its hash that does one thing less than ours. The engine around it is the real one, with a real model.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import xxhash

from chapters.patching import replaced, use_manager
from nanovllm import LLM, SamplingParams
from nanovllm.core import block_manager
from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.block_manager import Block, BlockManager, FreeBlockQueue
from nanovllm.core.sequence import Sequence

BLOCK_SIZE = 8
NUM_TOKENS = 10

# -- the prompts ------------------------------------------------------------------------------------------------------

FAMILY = (
    " My family comes from the same country as I do, and the capital of that country is a very large city with many "
    "people. The name of that city is"
)


class Prompts:
    """Texts as token ids: a beginning of one block, four blocks that everybody shares, and one token or none more."""

    def __init__(self, llm: LLM) -> None:
        self._encode = llm.get_tokenizer().encode
        self.japan = self.told("I come from Japan.")
        self.wuhan = self.told("I come from Wuhan.")
        self.reader = self.told("I like to read.")

    def told(self, beginning: str) -> list[int]:
        return self._block(beginning) + self._encode(FAMILY) + self._encode(" called")

    def greeting(self, beginning: str) -> list[int]:
        return self._block(beginning) + self._encode(" Thank you.")

    def _block(self, text: str) -> list[int]:
        ids = self._encode(text)
        return self._encode("\n") * (BLOCK_SIZE - len(ids)) + ids


# -- the engine with a fault ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the engine did with a wave of prompts."""

    texts: list[str]
    cached: list[int]  # num_cached_tokens of each
    num_finished: int
    error: str
    num_free: int  # blocks in the free queue afterwards
    ref_counts: list[int]


def play(
    llm: LLM, waves: list[list[list[int]]], *faults: AbstractContextManager, num_blocks: int = 64
) -> list[Outcome]:
    """Prompts of a wave arrive together, waves one after another; the pool is empty at the beginning. Greedy."""
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outcomes = []
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        manager = BlockManager(num_blocks, BLOCK_SIZE)
        stack.enter_context(use_manager(llm, manager))
        for wave in waves:
            before, error = engine.stats.num_finished_requests, ""
            texts, cached = [], []
            try:
                outputs = llm.generate(wave, params, use_tqdm=False)
                texts = [output.outputs[0].text for output in outputs]
                cached = [output.num_cached_tokens for output in outputs]
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
            counts = [block.ref_count for block in manager.blocks]
            num_finished = engine.stats.num_finished_requests - before
            outcomes.append(Outcome(texts, cached, num_finished, error, len(manager.free_blocks), counts))
    return outcomes


# -- the faults -------------------------------------------------------------------------------------------------------


@contextmanager
def named(name: Callable[[bytes | None, list[int]], bytes]) -> Iterator[None]:
    """Blocks are named by this function of parent and token ids; a hit is not verified, as where a name is trusted."""
    with replaced(BlockHasher, "name", lambda self, parent, token_ids, extra=(): name(parent, token_ids)), trusting():
        yield


def trusting() -> AbstractContextManager:
    return replaced(Block, "holds", lambda self, content: True)


def without_parent(parent: bytes | None, token_ids: list[int]) -> bytes:
    return xxhash.xxh64_digest(array("I", token_ids))


def as_bytes(parent: bytes | None, token_ids: list[int]) -> bytes:
    return xxhash.xxh64_digest((parent or b"") + bytes(token_ids))


def as_low_bytes(parent: bytes | None, token_ids: list[int]) -> bytes:
    """The first mend that comes to mind when bytes() complains."""
    return xxhash.xxh64_digest((parent or b"") + bytes(token_id % 256 for token_id in token_ids))


def references_stay() -> AbstractContextManager:
    """References to the hits are taken before it is known whether there is room, and not given back if not."""
    ours = BlockManager.allocate_with_prefix

    def allocate_with_prefix(self: BlockManager, seq: Sequence) -> bool:
        if ours(self, seq):
            return True
        for index in range(len(seq.tokens) // self.block_size):
            copies = self.hash_to_block.get(self.name_block(seq, index)[0])
            if copies is None:
                break
            block = next(iter(copies.values()))
            if block.ref_count == 0:
                self.free_blocks.remove(block)
            block.ref_count += 1
        return False

    return replaced(BlockManager, "allocate_with_prefix", allocate_with_prefix)


class HitsStayFree(FreeBlockQueue):
    """A free list from which hits are not taken out."""

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
    return replaced(block_manager, "FreeBlockQueue", HitsStayFree)


@contextmanager
def names_stay() -> Iterator[None]:
    """A block that is taken for new content keeps its old entry in the hash map."""

    def take_fresh(self: BlockManager, seq: Sequence, num_blocks: int) -> None:
        for _ in range(num_blocks):
            block = self.free_blocks.popleft()
            block.block_hash = block.parent_hash = None
            block.token_ids, block.extra_keys = [], ()
            block.ref_count = 1
            seq.block_table.append(block.block_id)

    with replaced(BlockManager, "take_fresh_blocks", take_fresh), trusting():
        yield


@contextmanager
def nothing_left() -> Iterator[None]:
    """A prompt that is found as a whole counts as computed as a whole."""
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
