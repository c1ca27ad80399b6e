"""More requests than a server can answer: who is let in, and how many are answered in time (chapter 14)."""

from collections.abc import Callable
from typing import Any, NamedTuple

from chapters.ch14_many_users.fleet import Job, Replica
from nanovllm.core.scheduler import SchedulerOutput

FADES = 0.95  # how much of what was measured before a step still counts after it


class State(NamedTuple):
    """What an engine knows of itself when a request comes.

    requests_per_s: how fast the queue moves. Requests that got a seat in steps before which somebody had been left
    without one, divided by the seconds of these steps, the latest counted most. 0: nobody has had to wait so far.
    """

    num_waiting: int
    num_running: int
    max_num_seqs: int
    num_free_blocks: int
    num_blocks_needed: int  # by the prompt that asks to be let in
    requests_per_s: float


Gate = Callable[[State], bool]


class Server(Replica):
    """A replica that measures how fast its queue moves, and counts who is there.

    num_in_system_s: requests that have not ended, at the beginning of each step, times the step's seconds.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_started = self._waited_s = self.num_in_system_s = 0.0
        self._somebody_waits = False  # since the step before

    def schedule(self) -> SchedulerOutput:
        before = len(self.scheduler.waiting)
        output = super().schedule()
        after = len(self.scheduler.waiting)
        self.num_in_system_s += len(self.jobs) * self.cost.of(output.num_tokens)
        if self._somebody_waits:  # the step in which the last one gets its seat counts, too
            self._num_started = FADES * self._num_started + max(0, before - after)
            self._waited_s = FADES * self._waited_s + self.cost.of(output.num_tokens)
        self._somebody_waits = after > 0
        return output

    def state(self, job: Job) -> State:
        scheduler, manager = self.scheduler, self.manager
        rate = self._num_started / self._waited_s if self._waited_s else 0.0
        queues = len(scheduler.waiting), len(scheduler.running), scheduler.max_num_seqs
        return State(*queues, len(manager.free_blocks), manager.num_blocks_for(len(job.prompt) + 1), rate)


def serve(jobs: list[Job], gate: Gate = lambda state: True, notices: bool = True, **options: Any) -> Server:
    """Requests come, and those that the gate lets in are served. Some leave; the server notices it, or does not."""
    server = Server(**options)
    leaves = [(job.leaves_s, 1, i, job) for i, job in enumerate(jobs) if job.leaves_s < float("inf")]
    for now, is_leaving, _, job in sorted([(job.arrival_s, 0, i, job) for i, job in enumerate(jobs)] + leaves):
        server.advance(now)
        if is_leaving:
            if notices:
                server.abort(job)
        elif gate(server.state(job)):
            server.add(job)
        else:
            job.refused = True
    server.advance(float("inf"))
    return server


def capacity(jobs: list[Job], **options: Any) -> float:
    """Requests a second if all of them are there at once."""
    return len(jobs) / serve([Job(0.0, job.prompt, job.num_output_tokens) for job in jobs], **options).now


def goodput(jobs: list[Job], deadline_s: float, end_s: float) -> float:
    return sum(job.keeps(deadline_s) for job in jobs) / end_s


def admit_all(state: State) -> bool:
    return True


def at_most(num_waiting: int) -> Gate:
    """A queue of so many places, as `nanovllm serve --max-waiting` has it."""
    return lambda state: state.num_waiting < num_waiting


def in_time(deadline_s: float) -> Gate:
    """Nobody is let in who would wait longer than that for a seat."""

    def gate(state: State) -> bool:
        is_free = state.num_running < state.max_num_seqs and state.num_blocks_needed <= state.num_free_blocks
        if not state.num_waiting and is_free:
            return True
        if not state.requests_per_s:
            return state.num_waiting < state.max_num_seqs
        return (state.num_waiting + 1) / state.requests_per_s <= deadline_s

    return gate
