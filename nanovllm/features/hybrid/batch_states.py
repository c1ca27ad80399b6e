"""What a step's batch says of states: the segments through which it takes them (chapter 16)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.snapshots.segments import step_segments
from nanovllm.core.snapshots.state import SequenceState
from nanovllm.worker.batch import Batch, BatchPart


@dataclass(frozen=True)
class BatchStates(BatchPart):
    """segments: [S, 8], what step_segments() says. They stay in the CPU's memory."""

    segments: Tensor
    in_recorded_steps = True


class PackedState(SequenceState):
    """A SequenceState of an engine, whose steps are packed into batches."""

    @staticmethod
    def add_to_batch(batch: Batch, output: SchedulerOutput) -> Batch:
        segments = torch.tensor(step_segments(output.chunks), dtype=torch.int64, device="cpu")
        batch.parts["state"] = BatchStates(segments)
        return batch


def segments_of(batch: Batch) -> Tensor | None:
    """The batch's segments; None if its sequences begin and end with this step, and nobody keeps their states."""
    states = batch.parts.get("state")
    return states.segments if isinstance(states, BatchStates) else None
