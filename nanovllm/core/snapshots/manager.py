"""HybridBlockManager: the block manager of a model that has states beside its K/V (chapter 16).

A block's K/V alone does not continue a hybrid model: its state after that block is needed, too. A snapshot is such a
state. It belongs to the block's name and dies with it. An admission reuses the blocks up to the deepest one that has a
snapshot, and computes what comes after it.

Invariants, asserted by check_integrity():
- a slot is a running sequence's own one, a snapshot's, or free;
- there are at most max_snapshots snapshots, each under a name that is in hash_to_block;
- a running sequence has a state, a waiting one has none.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanovllm.core.block_manager import AllocationPlan, Block, BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.policy import Policy, snapshot_positions
from nanovllm.core.snapshots.state import NOTHING_READ, SequenceState


def make_block_manager(pool: Any, kinds: tuple[Any, Any] | None = None, **options: Any) -> BlockManager:
    """For the pools that a model runner has made: a KVPool of worker/kv_cache.py.

    kinds: of manager, for a pool without states and for one with.
    """
    plain, hybrid = kinds or (BlockManager, HybridBlockManager)
    if pool.states is None:
        return plain(pool.num_blocks, pool.block_size, **options)
    options |= {"max_running": pool.states.max_running, "max_snapshots": pool.states.max_snapshots}
    return hybrid(pool.num_blocks, pool.block_size, **options)


@dataclass(slots=True)
class Snapshot:
    """is_wanted: somebody is known to want it. num_uses: admissions that began with it."""

    slot: int
    is_wanted: bool
    num_uses: int = 0


class HybridBlockManager(BlockManager):
    """
    max_running     sequences that run at a time: each has a slot
    max_snapshots   slots beside these
    snapshots       {name: Snapshot}, the least recently used first
    states          {seq_id: state} of running sequences; also seq.state
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_running: int,
        max_snapshots: int,
        policy: Policy = snapshot_positions,
        **options: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.max_running, self.max_snapshots, self.policy = max_running, max_snapshots, policy
        self.snapshots: dict[bytes, Snapshot] = {}
        self.states: dict[int, SequenceState] = {}
        self.free_slots = list(range(max_running + max_snapshots))
        self.num_snapshots_taken = 0
        self._num_matched = 0
        self._new: set[bytes] = set()  # names of snapshots that the running step takes

    # -- what the scheduler calls ---------------------------------------------------------------------------------

    def allocate_with_prefix(self, seq: Sequence) -> bool:
        """See BlockManager. False, too, when every slot has its sequence."""
        if len(self.states) == self.max_running or not super().allocate_with_prefix(seq):
            return False
        source, num_cached = NOTHING_READ, seq.num_cached_tokens
        if num_cached:
            name = self.blocks[seq.block_table[num_cached // self.block_size - 1]].block_hash
            snapshot = self.snapshots.pop(name)  # type: ignore[arg-type]
            snapshot.num_uses += 1
            self.snapshots[name] = snapshot  # type: ignore[index]  # now the last one
            source = snapshot.slot
        wanted = self.policy(len(seq.tokens), self._num_matched * self.block_size, self.block_size)
        seq.state = SequenceState(self.free_slots.pop(), source, num_cached, wanted, len(seq.tokens) - 1)
        self.states[seq.seq_id] = seq.state
        return True

    def register_prefix(self, seq: Sequence) -> None:
        """See BlockManager. Takes snapshots while the newest chunk passes blocks that have names."""
        super().register_prefix(seq)
        state, size = seq.state, self.block_size
        # Blocks of guesses that held get their names when the chunk has been computed: it passes nothing any more.
        can_pass, state.is_new = state.is_new and self.max_snapshots > 0, False
        end = min(state.num_tokens, seq.num_registered_blocks * size) if can_pass else 0
        for position in self.passed(state, end // size * size):
            name = seq.block_hashes[position // size - 1]
            if name in self.snapshots:
                continue
            is_behind = position > state.prompt_end
            if is_behind and state.newest in self.removable() and not self.snapshots[state.newest].num_uses:
                self.forget(state.newest)
            slot = self.take_slot(is_wanted := is_behind or state.wanted[position])
            if slot is None:
                continue
            self._new.add(name)
            self.snapshots[name] = Snapshot(slot, is_wanted)
            self.num_snapshots_taken += 1
            state.pass_through(position, slot)
            state.newest = name if is_behind else None

    def free(self, seq: Sequence) -> None:
        super().free(seq)
        self.drop_state(seq)

    def clear(self) -> None:
        """See BlockManager."""
        super().clear()
        self._new.clear()
        self.snapshots.clear()
        self.states.clear()
        self.free_slots = list(range(self.max_running + self.max_snapshots))

    # -- snapshots ------------------------------------------------------------------------------------------------

    def plan_allocation(self, seq: Sequence) -> AllocationPlan | None:
        """See BlockManager. Blocks behind the deepest snapshot are not reused: their tokens are computed anyway."""
        plan = super().plan_allocation(seq)
        if plan is None:
            return None
        self._num_matched = len(plan.hits)
        num_usable = self.depth_of_snapshot(plan.hits[: (len(seq.tokens) - 1) // self.block_size])
        num_fresh = plan.num_fresh + len(plan.hits) - num_usable
        num_free_hits = sum(block.ref_count == 0 for block in plan.hits[:num_usable])
        if num_fresh + num_free_hits > len(self.free_blocks):
            return None
        return plan._replace(hits=plan.hits[:num_usable], num_fresh=num_fresh)

    def depth_of_snapshot(self, hits: list[Block]) -> int:
        """How many of these blocks come before the deepest snapshot."""
        return next((n for n in range(len(hits), 0, -1) if hits[n - 1].block_hash in self.snapshots), 0)

    def passed(self, state: SequenceState, end: int) -> Iterable[int]:
        """Positions in the newest chunk at which a snapshot is wanted, up to `end`, which is a block's."""
        start = state.segments[-1].start
        positions = [position for position in sorted(state.wanted) if start < position <= end]
        return [*positions, end] if end > max(start, state.prompt_end) else positions

    def take_slot(self, is_wanted: bool) -> int | None:
        """A slot for a snapshot, if need be of the least recently used one. One that nobody may want gives way first,
        and takes the place of no other kind."""
        if len(self.snapshots) == self.max_snapshots:
            victims = self.removable()
            unwanted = [n for n in victims if not self.snapshots[n].is_wanted and not self.snapshots[n].num_uses]
            if not (victims := unwanted or (victims if is_wanted else [])):
                return None
            self.forget(victims[0])
        return self.free_slots.pop()

    def removable(self) -> list[bytes]:
        """Names of the snapshots that are no running sequence's state, the least recently used first."""
        held = {state.source for state in self.states.values()}
        return [name for name, snapshot in self.snapshots.items() if snapshot.slot not in held]

    def forget(self, name: bytes | None) -> None:
        """Give a snapshot's slot back."""
        if (snapshot := self.snapshots.pop(name, None)) is not None:  # type: ignore[arg-type]
            self._new.discard(name)
            self.free_slots.append(snapshot.slot)

    def remove_name(self, block: Block) -> None:
        name = block.block_hash
        super().remove_name(block)
        if name not in self.hash_to_block:
            self.forget(name)

    def drop_state(self, seq: Sequence) -> None:
        """The sequence does not run any more."""
        seq.state = None
        if (state := self.states.pop(seq.seq_id, None)) is not None:
            self.free_slots.append(state.slot)

    def check_integrity(self) -> None:
        super().check_integrity()
        held = [snapshot.slot for snapshot in self.snapshots.values()]
        owned = [state.slot for state in self.states.values()]
        slots = sorted([*held, *owned, *self.free_slots])
        assert slots == list(range(self.max_running + self.max_snapshots)), "a slot has two owners, or none"
        assert len(held) <= self.max_snapshots, f"{len(held)} snapshots of at most {self.max_snapshots}"
        assert self.snapshots.keys() <= self.hash_to_block.keys(), "a snapshot has outlived its name"
        sources = {state.source for state in self.states.values() if state.segments} - {*owned}
        assert sources <= {*held}, "a sequence's state lies in a slot that is nobody's"
