"""A step that fails, for tests of the control plane alone: what LLMEngine.restart does to the scheduler."""

from nanovllm.core.scheduler import Scheduler, SchedulerOutput


def fail_step(scheduler: Scheduler, output: SchedulerOutput | None = None) -> None:
    """All sequences wait, with the tokens from before the step. output: None if schedule() has not returned."""
    chunks = [] if output is None else output.chunks
    seqs = dict(scheduler.seqs) | {chunk.seq.seq_id: chunk.seq for chunk in chunks}  # update() may have ended some
    for chunk in chunks:
        if chunk.reaches_end:
            chunk.seq.truncate(chunk.known_end)
    scheduler.restart(seqs.values())
