"""What lab 5 plays with: the real Scheduler and BlockManager, and the same scheduler fed in static batches.

The stage decides in advance when each sequence will answer EOS, and does not tell the scheduler. Actions only; the
pictures are in drawing.py.
"""

from typing import Any

from chapters.player import actions
from chapters.stage import Stage, Step
from nanovllm.core.block_manager import BlockEvent
from nanovllm.core.sequence import Sequence, SequenceStatus

# (tokens of the prompt, tokens that the stage will answer, EOS included)
REQUESTS = [(6, 3), (4, 12), (9, 5), (5, 2), (7, 9), (3, 4), (8, 10), (5, 3)]
ACTIONS = actions("s|step|step, a|add|add, x|abort|abort, m|take|take, M|give|give, r|reset|reset")


class StaticStage(Stage):
    """The same scheduler, fed as a static batcher feeds a model: a new batch only when the whole last one has ended."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self.held_back: list[Sequence] = []
        self.idle: list[set[int]] = []  # for each step, seq_ids that keep a seat although they have ended
        self._batch: list[Sequence] = []

    def step(self) -> Step:
        if not self.scheduler.has_unfinished():
            batch_size = self.scheduler.max_num_seqs
            self._batch, self.held_back = self.held_back[:batch_size], self.held_back[batch_size:]
            for seq in self._batch:
                self.scheduler.add(seq)
        self.idle.append({seq.seq_id for seq in self._batch if seq.status is SequenceStatus.FINISHED})
        return super().step()

    def queue(self, seq: Sequence) -> None:
        self.held_back.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self.held_back) or super().has_unfinished()

    def abort(self, seq: Sequence) -> None:
        if seq in self.held_back:
            self.held_back.remove(seq)
        super().abort(seq)


def num_computed_tokens(stage: Stage) -> int:
    return sum(step.num_tokens for step in stage.steps)


def idle_share(stage: Stage) -> float:
    """Of the seats of all steps, how many had no work?"""
    num_seats = len(stage.steps) * stage.scheduler.max_num_seqs
    return 1 - sum(len(step.chunks) for step in stage.steps) / num_seats if num_seats else 0.0


def mean_num_steps(stage: Stage) -> float:
    """From a request's arrival to its end, mean over the requests that have ended."""
    spans = [end - stage.arrived[seq_id] for seq_id, end in stage.ended.items()]
    return sum(spans) / max(len(spans), 1)


def letter(stage: Stage, seq: Sequence, number: int) -> str:
    """What a request did in a step: P prefill, d decode, x preempted, - ended with a seat of its own, . waited."""
    step = stage.steps[number]
    if any(chunk.seq is seq for chunk in step.chunks):
        return "P" if seq.seq_id in step.prefilling else "d"
    if seq in step.preempted:
        return "x"
    if isinstance(stage, StaticStage) and seq.seq_id in stage.idle[number]:
        return "-"
    waits = stage.arrived[seq.seq_id] <= number < stage.ended.get(seq.seq_id, number + 1)
    return "." if waits else " "


def summary(title: str, stage: Stage) -> str:
    counts = f"{len(stage.steps)} steps, {idle_share(stage):.0%} of seats idle"
    tokens = num_computed_tokens(stage) / max(len(stage.steps), 1)
    return f"{title}: {counts}, {tokens:.1f} tokens a step, {stage.scheduler.num_preemptions} preempted"


class Comparison:
    """The same requests to a scheduler, and to one that is fed in static batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> str:
        """Start over: three requests wait."""
        limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32}
        self.ours, self.static = Stage(16, **limits), StaticStage(16, **limits)
        self.events: list[BlockEvent] = []  # since the last action, in order; a face that shows them empties the list
        self.ours.manager.on_event = self.events.append
        for request in REQUESTS[:3]:
            self._add_to_both(request)
        return "Three requests wait. Press s."

    def step(self) -> str:
        """One step of both schedulers."""
        said = []
        if self.ours.has_unfinished():
            seated = list(self.ours.scheduler.running)
            said += self._told(self.ours.step(), seated)
        elif self.static.has_unfinished():
            said.append("Only the static batches had work left.")
        if self.static.has_unfinished():
            self.static.step()
        if not self.ours.has_unfinished() and not self.static.has_unfinished():
            said.append("All requests have ended. Press a to add some.")
        return " ".join(said)

    def _told(self, step: Step, seated: list[Sequence]) -> list[str]:
        """What a step of our scheduler did. seated: the sequences that were running before it."""
        said = [f"Step {len(self.ours.steps)}: {step.num_tokens} token{'s' if step.num_tokens > 1 else ''}."]
        admitted = [chunk.seq for chunk in step.chunks if chunk.seq not in seated]
        for what, seqs in (("Admitted", admitted), ("Preempted", step.preempted), ("Ended", step.finished)):
            if seqs:
                said.append(f"{what}: {' '.join(self.ours.names[seq.seq_id] for seq in seqs)}.")
        return said

    def add(self) -> str:
        """One more request to both."""
        request = REQUESTS[len(self.ours.seqs) % len(REQUESTS)]
        name = self.ours.names[self._add_to_both(request).seq_id]
        return f"{name}: its token number {request[1]} will be EOS. The scheduler is not told."

    def abort(self) -> str:
        """The oldest request is given up."""
        oldest = next(iter([*self.ours.scheduler.running, *self.ours.scheduler.waiting]), None)
        if oldest is None:
            return "There is nobody to abort."
        name = self.ours.names[oldest.seq_id]
        for stage in (self.ours, self.static):
            stage.abort(stage.seqs[name])
        return f"{name} is gone, and its blocks are free."

    def take(self) -> str:
        """Take two blocks of the pool away, so that it runs dry."""
        self.ours.take_blocks(2)
        return "A hog holds two more blocks. Step until a request needs a block and there is none."

    def give(self) -> str:
        """Give back all blocks that were taken away."""
        self.ours.give_blocks()
        return "All blocks of the hogs are in the pool again."

    def _add_to_both(self, request: tuple[int, int]) -> Sequence:
        self.static.add(*request)
        return self.ours.add(*request)
