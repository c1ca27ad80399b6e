"""PoolNames: under which names of TierNames the blocks of a pool and of its prompts are known below it (chapter 7)."""

from nanovllm.core.block_manager import Block, BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.names import NO_EXTRA, TierNames
from nanovllm.core.tiers.store import STATE, Record


class PoolNames:
    """Each block of the pool is hashed once. What is kept of that goes with the block's name: forget(), clear()."""

    def __init__(self, manager: BlockManager, names: TierNames) -> None:
        self.manager, self.names = manager, names
        self._known: dict[bytes, bytes] = {}  # the pool's name -> the tiers' one

    def records_of(self, seq: Sequence) -> list[Record]:
        """Of all full blocks of a sequence."""
        records: list[Record] = []
        for index in range(len(seq.tokens) // self.manager.block_size):
            _, (_, token_ids, extra_keys) = self.manager.name_block(seq, index)
            parent, extra = records[-1].name if records else None, self.names.digest(extra_keys)
            records.append(Record(self.names.name(parent, token_ids, extra), parent, token_ids, extra, index))
        return records

    def record_of(self, block: Block) -> Record:
        """Of a named block."""
        name, extra = self.name_of(block), self.names.digest(block.extra_keys)
        parent = None if block.parent_hash is None else self._known[block.parent_hash]
        return Record(name, parent, block.token_ids, extra, block.depth)

    def state_record(self, block: Record) -> Record:
        """Of the state after a block."""
        return Record(self.names.name_of_state(block.name), block.name, (), NO_EXTRA, block.depth + 1, STATE)

    def name_of(self, block: Block) -> bytes:
        """Of a named block. All before it are named, too."""
        path, known = [block], self._known
        while path[-1].block_hash not in known and path[-1].parent_hash is not None:
            path.append(next(iter(self.manager.hash_to_block[path[-1].parent_hash].values())))
        for block in reversed(path):
            if block.block_hash not in known:
                parent = None if block.parent_hash is None else known[block.parent_hash]
                content = block.parent_hash, block.token_ids, block.extra_keys
                known[block.block_hash] = self.names.name_of(parent, content)  # type: ignore[index]
        return known[block.block_hash]  # type: ignore[index]

    def forget(self, block: Block) -> None:
        """It is about to lose its name."""
        if len(self.manager.hash_to_block[block.block_hash]) == 1:  # type: ignore[index]
            self._known.pop(block.block_hash, None)  # type: ignore[arg-type]

    def clear(self) -> None:
        """Names have gone without a word, and may come to stand for other content."""
        self._known.clear()
