"""SnapshotCache: which sequence has which state, and which snapshots of states are kept (chapter 16).

A block's K/V alone does not continue a hybrid model: the state after that block is needed, too. A snapshot is such a
state. It belongs to the block's hash and is dropped when the last block of that hash is evicted. An admission reuses
the cached blocks up to the deepest one that has a snapshot, and computes what comes after it.

The block manager of a hybrid model asks this object at the places where it matters (block_manager.py).

Invariants, asserted by check_integrity():
- a slot is a running sequence's own, a snapshot's, or free;
- there are at most max_snapshots snapshots, each of a hash that is cached;
- a running sequence has a state, a waiting one has none.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.policy import Policy, snapshot_positions
from nanovllm.core.snapshots.state import NOTHING_READ, SequenceState

if TYPE_CHECKING:
    from nanovllm.core.block_manager import Block


@dataclass(slots=True)
class Snapshot:
    """is_wanted: somebody is known to want it. num_uses: admissions that began with it."""

    slot: int
    is_wanted: bool
    num_uses: int = 0


class SnapshotCache:
    """
    max_running     sequences that run at a time: each has a slot
    max_snapshots   slots beside these
    policy          where snapshots are taken (policy.py)
    state_class     SequenceState, or one of an engine, which also knows how it is packed
    by_hash         {block hash: Snapshot}, the least recently used first
    states          {seq_id: state} of running sequences; also seq.parts["state"]
    on_event        called with "snapshot" or "drop_snapshot" and a block hash; the block manager sets it
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_snapshots: int,
        policy: Policy = snapshot_positions,
        state_class: type[SequenceState] = SequenceState,
    ) -> None:
        self.max_running = max_running
        self.max_snapshots = max_snapshots
        self.policy = policy
        self.state_class = state_class
        self.on_event: Callable[[str, bytes], None] = lambda kind, block_hash: None
        self.num_taken = 0
        self.clear()

    def clear(self) -> None:
        """No state is kept, and no snapshot."""
        self.by_hash: dict[bytes, Snapshot] = {}
        self.states: dict[int, SequenceState] = {}
        self.free_slots = list(range(self.max_running + self.max_snapshots))

    # -- what the block manager asks ------------------------------------------------------------------------------

    def can_allocate(self) -> bool:
        """Is there a slot for one sequence more?"""
        return len(self.states) < self.max_running

    def reusable(self, seq: Sequence, blocks: "list[Block]", block_size: int) -> "list[Block]":
        """The sequence's cached blocks up to the deepest one that has a snapshot.

        At least one token is left to be computed. K/V of the blocks after that would help nobody: the state has to
        take in their tokens anyway.
        """
        num_blocks = min(len(blocks), (len(seq.tokens) - 1) // block_size)
        while num_blocks > 0 and blocks[num_blocks - 1].block_hash not in self.by_hash:
            num_blocks -= 1
        return blocks[:num_blocks]

    def allocate(self, seq: Sequence, num_matched_tokens: int, block_size: int) -> None:
        """Give an admitted sequence its state: that of a snapshot, or the one before the first token.

        num_matched_tokens: at its beginning, whose blocks are cached, with a snapshot or without.
        """
        source = NOTHING_READ
        num_cached = seq.num_cached_tokens
        if num_cached > 0:
            block_hash = seq.block_hashes[num_cached // block_size - 1]
            snapshot = self.by_hash.pop(block_hash)
            self.by_hash[block_hash] = snapshot  # the last one now: it was used most recently
            snapshot.num_uses += 1
            source = snapshot.slot
        wanted = self.policy(len(seq.tokens), num_matched_tokens, block_size)
        slot = self.free_slots.pop()
        state = self.state_class(slot, source, num_cached, wanted, prompt_end=len(seq.tokens) - 1)
        seq.parts["state"] = self.states[seq.seq_id] = state

    def take(self, seq: Sequence, block_size: int) -> None:
        """Take snapshots where the newest chunk passes the ends of cached blocks.

        Called when blocks have been registered, for the chunk that fills them while it is being scheduled. It does
        nothing for blocks that were registered later (they hold draft tokens that held) or came from a tier.
        """
        state = seq.parts.get("state")
        if state is None or not state.is_new or self.max_snapshots == 0:
            return
        state.is_new = False
        num_tokens = min(state.num_tokens, seq.num_registered_blocks * block_size)
        for position in self._positions(state, num_tokens // block_size * block_size):
            block_hash = seq.block_hashes[position // block_size - 1]
            if block_hash in self.by_hash:
                continue
            is_output = position > state.prompt_end
            if is_output:
                self._drop_newest(state)
            is_wanted = is_output or state.wanted[position]
            slot = self.take_slot(is_wanted)
            if slot is None:
                continue
            self.add(block_hash, slot, is_wanted)
            self.num_taken += 1
            state.pass_through(position, slot)
            state.newest = block_hash if is_output else None

    def free(self, seq: Sequence) -> None:
        """The sequence does not run any more."""
        seq.parts.pop("state", None)
        state = self.states.pop(seq.seq_id, None)
        if state is not None:
            self.free_slots.append(state.slot)

    def evict(self, block_hash: bytes) -> None:
        """No block of this hash is cached any more."""
        snapshot = self.by_hash.pop(block_hash, None)
        if snapshot is not None:
            self.free_slots.append(snapshot.slot)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def add(self, block_hash: bytes, slot: int, is_wanted: bool) -> None:
        """A slot holds the state after this block, or will when the step has been computed."""
        self.by_hash[block_hash] = Snapshot(slot, is_wanted)
        self.on_event("snapshot", block_hash)

    def take_slot(self, is_wanted: bool) -> int | None:
        """A slot for a snapshot, if need be that of another one; None if there is none.

        Snapshots that nobody is known to want are dropped first, and never replace one that somebody wants; of those
        alike the least recently used is dropped.
        """
        if len(self.by_hash) == self.max_snapshots:
            victims = self._droppable()
            unwanted = [h for h in victims if not self.by_hash[h].is_wanted and self.by_hash[h].num_uses == 0]
            if unwanted:
                self.drop(unwanted[0])
            elif victims and is_wanted:
                self.drop(victims[0])
            else:
                return None
        return self.free_slots.pop()

    def drop(self, block_hash: bytes) -> None:
        """Give a snapshot up, whose block stays cached."""
        self.on_event("drop_snapshot", block_hash)
        self.evict(block_hash)

    def check_integrity(self, cached: Container[bytes]) -> None:
        """cached: the block hashes that can be found. Raises AssertionError."""
        held = [snapshot.slot for snapshot in self.by_hash.values()]
        owned = [state.slot for state in self.states.values()]
        slots = sorted([*held, *owned, *self.free_slots])
        assert slots == list(range(self.max_running + self.max_snapshots)), "a slot has two owners, or none"
        assert len(held) <= self.max_snapshots, f"{len(held)} snapshots of at most {self.max_snapshots}"
        assert all(block_hash in cached for block_hash in self.by_hash), "a snapshot has outlived its block"
        sources = {state.source for state in self.states.values() if state.segments} - {*owned}
        assert sources <= {*held}, "a sequence's state lies in a slot that is nobody's"

    # -- helpers --------------------------------------------------------------------------------------------------

    def _positions(self, state: SequenceState, end: int) -> list[int]:
        """Positions in the newest chunk at which a snapshot is wanted, up to `end`, the end of a block."""
        start = state.segments[-1].start
        positions = [position for position in sorted(state.wanted) if start < position <= end]
        if end > max(start, state.prompt_end):  # of the output, the newest block is always wanted
            positions.append(end)
        return positions

    def _drop_newest(self, state: SequenceState) -> None:
        """After the prompt only the newest snapshot of a sequence is kept, unless somebody has begun with it."""
        newest = state.newest
        if newest is not None and newest in self._droppable() and self.by_hash[newest].num_uses == 0:
            self.drop(newest)

    def _droppable(self) -> list[bytes]:
        """Hashes of the snapshots that no running sequence's state lies in, the least recently used first."""
        sources = {state.source for state in self.states.values()}
        return [block_hash for block_hash, snapshot in self.by_hash.items() if snapshot.slot not in sources]
