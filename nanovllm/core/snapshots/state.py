"""SequenceState: how far the state of a running sequence has come, and in which slot it is (chapter 16).

Some layers of a hybrid model keep a state of fixed size instead of keys and values (features/hybrid). The states of all
these layers lie together in one slot of a pool. A slot belongs to a running sequence, or it holds a snapshot: the state
after the last token of a cached block.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.core.sequence import SequencePart

NOTHING_READ = -1  # in place of a slot: the state before the first token, all zeros


class StateSlots(NamedTuple):
    """What the control plane needs to know of a state pool. num_bytes: over all ranks.

    max_running: slots for running sequences; max_snapshots: those beside them.
    """

    max_running: int
    max_snapshots: int
    num_bytes: int


class Segment(NamedTuple):
    """A step takes the state in slot `source` over the tokens [start, end) of a sequence, and leaves it in `target`.

    Segments of a step are computed in their order: one may begin where an earlier one, of another sequence, has ended.
    """

    start: int
    end: int
    source: int
    target: int


@dataclass
class SequenceState(SequencePart):
    """
    slot         its own one
    source       the slot that the state is in: its own one, or a snapshot's until a token after that is computed
    num_tokens   that the state has taken in when the running step is done; more draft tokens may have held
    segments     of the sequence's newest chunk
    wanted       positions at which a snapshot is to be taken, and whether somebody is known to want it
    prompt_end   after it, only the newest snapshot is kept
    newest       that snapshot's block hash
    is_new       the newest chunk is being scheduled: nothing of it has been computed
    """

    slot: int
    source: int
    num_tokens: int
    wanted: dict[int, bool]
    prompt_end: int
    needs_blocks = True
    segments: list[Segment] = field(default_factory=list)
    newest: bytes | None = None
    is_new: bool = False

    def advance(self, end: int) -> None:
        """The next chunk takes in all tokens up to `end`."""
        self.segments = [Segment(self.num_tokens, end, self.source, self.slot)]
        self.num_tokens, self.source, self.is_new = end, self.slot, True

    def pass_through(self, position: int, slot: int) -> None:
        """On its way through the chunk the state is left in another slot, too."""
        last = self.segments.pop()
        self.segments.append(Segment(last.start, position, last.source, slot))
        self.source = slot
        if position < last.end:
            self.segments.append(Segment(position, last.end, slot, self.slot))
            self.source = self.slot
