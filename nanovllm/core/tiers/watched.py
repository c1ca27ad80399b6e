"""Block managers that tell others what becomes of their names (chapter 7).

on_event shows single moves of blocks to whoever draws them. A watcher wants to know what can be found: when K/V under a
name is there to be read, and when it is about to go.
"""

from typing import Any

from nanovllm.core.block_manager import Block, BlockEvent, BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.manager import HybridBlockManager


class Watcher:
    """What a watcher may be told. It changes nothing of the manager, but for awaits(), which may bring K/V in."""

    def awaits(self, seq: Sequence) -> bool:
        """See BlockManager.awaits."""
        return False

    def admitted(self, seq: Sequence, is_first: bool) -> None:
        """A sequence has got its blocks. is_first: it was not preempted before."""

    def happened(self, event: BlockEvent) -> None:
        """As BlockManager.on_event."""

    def stored(self, blocks: list[Block]) -> None:
        """From now on K/V can be read under the names of these blocks. Parents come before their children."""

    def removed(self, block: Block) -> None:
        """This block is about to lose its name. Its K/V is still there."""

    def snapshots_stored(self, names: list[bytes]) -> None:
        """The states after these blocks are kept (core/snapshots)."""

    def snapshot_removed(self, name: bytes) -> None:
        """The state after this block, which keeps its name, is about to be given up."""

    def committed(self) -> None:
        """A step has succeeded, and all that it has stored or removed was told."""

    def rolled_back(self) -> None:
        """Names that were given in a step that failed have gone. Nothing was told of them."""

    def cleared(self) -> None:
        """The prefix cache was reset, by reset_prefix_cache()."""


class WatchedBlockManager(BlockManager):
    """watchers: who is told, in this order."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.watchers: list[Watcher] = []

    def awaits(self, seq: Sequence) -> bool:
        return any(watcher.awaits(seq) for watcher in self.watchers)

    def allocate_with_prefix(self, seq: Sequence) -> bool:
        is_first = not seq.was_admitted
        if not super().allocate_with_prefix(seq):
            return False
        for watcher in self.watchers:
            watcher.admitted(seq, is_first)
        return True

    def commit(self) -> None:
        named = (self.blocks[block_id] for block_id in self._uncommitted)
        # What a tier has brought in for one sequence may have been evicted for another, in the same step.
        new = sorted((block for block in named if block.block_hash is not None), key=lambda block: block.depth)
        super().commit()
        for watcher in self.watchers if new else ():
            watcher.stored(new)
        for watcher in self.watchers:
            watcher.committed()

    def roll_back(self) -> None:
        super().roll_back()
        for watcher in self.watchers:
            watcher.rolled_back()

    def remove_name(self, block: Block) -> None:
        for watcher in self.watchers if block.block_hash is not None else ():
            watcher.removed(block)
        super().remove_name(block)

    def tell(self, kind: str, block_id: int, seq: Sequence) -> None:
        super().tell(kind, block_id, seq)
        for watcher in self.watchers:
            watcher.happened(BlockEvent(kind, block_id, seq.seq_id))

    def reset_prefix_cache(self) -> bool:
        watchers, self.watchers = self.watchers, []  # they are told once, not of each name
        try:
            was_reset = super().reset_prefix_cache()
        finally:
            self.watchers = watchers
        for watcher in watchers if was_reset else ():
            watcher.cleared()
        return was_reset


class WatchedHybridBlockManager(WatchedBlockManager, HybridBlockManager):
    """The same, of a model that has states. Behind the prompt only the newest snapshot of a sequence that has given its
    blocks back is told of: the ones before it go within a few tokens."""

    def commit(self) -> None:
        passing = {state.newest for state in self.states.values()}
        taken = [name for name in self._new if name not in passing]
        super().commit()
        self._tell_stored(taken)

    def free(self, seq: Sequence) -> None:
        newest = seq.state.newest if seq.state is not None else None
        super().free(seq)
        if self.slot_of(newest) is not None:
            self._tell_stored([newest])  # type: ignore[list-item]

    def slot_of(self, name: bytes | None) -> int | None:
        """Where the state after this block is kept. None if it is not, or if the running step will compute it."""
        return self.snapshots[name].slot if name in self.snapshots and name not in self._new else None

    def forget(self, name: bytes | None) -> None:
        for watcher in self.watchers if name in self.hash_to_block and self.slot_of(name) is not None else ():
            watcher.snapshot_removed(name)  # type: ignore[arg-type]
        super().forget(name)

    def slot_to_write(self) -> int | None:
        """A slot for a snapshot that is written now, if need be of the least recently used one; or None.

        The running step's chunks have their slots and will be computed later: those are not to be touched.
        """
        in_step = {slot for state in self.states.values() for s in state.segments for slot in (s.source, s.target)}
        if len(self.snapshots) == self.max_snapshots:
            victims = (name for name in self.removable() if self.snapshots[name].slot not in in_step)
            if (victim := next(victims, None)) is None:
                return None
            self.forget(victim)
        slot = next((slot for slot in self.free_slots if slot not in in_step), None)
        if slot is not None:
            self.free_slots.remove(slot)
        return slot

    def _tell_stored(self, names: list[bytes]) -> None:
        for watcher in self.watchers if names else ():
            watcher.snapshots_stored(names)
