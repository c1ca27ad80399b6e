"""A fleet in virtual time: each replica is the engine's Scheduler and BlockManager, with a simulated clock.

No model, no waiting: a step takes so many seconds, and so many more for each of its tokens (Cost). Everything else,
from the queue to the prefix cache, is the engine's own. Standard library and nanovllm/core only.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.features.cache_reports.events import KVEventBatch
from nanovllm.features.cache_reports.kv_events import KVEvents
from nanovllm.sampling_params import SamplingParams
from nanovllm.serving.routing import Announced

BLOCK_SIZE, NUM_BLOCKS = 64, 160
TOKEN = 10  # what is "sampled"; it ends nothing


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: so many, whatever it computes, and so many for each token."""

    step_s: float = 0.010
    token_s: float = 0.0001

    def of(self, num_tokens: int) -> float:
        return self.step_s + self.token_s * num_tokens


@dataclass(eq=False)
class Job:
    """A request as its client sees it: when it comes, what it asks, when its tokens arrive.

    leaves_s: then its client goes away, unless the answer is complete. num_new_tokens: of its prompt, not in the cache
    when it came. refused: it was sent away.
    """

    arrival_s: float
    prompt: list[int]
    num_output_tokens: int
    user: int = 0
    leaves_s: float = float("inf")
    replica: int = 0
    num_new_tokens: int = 0
    refused: bool = False
    token_times: list[float] = field(default_factory=list)

    @cached_property
    def seq(self) -> Sequence:
        return Sequence(self.prompt, SamplingParams(max_tokens=self.num_output_tokens, ignore_eos=True))

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.arrival_s

    @property
    def latency_s(self) -> float:
        return self.token_times[-1] - self.arrival_s

    @property
    def longest_pause_s(self) -> float:
        """Between two of its tokens."""
        return max((b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)), default=0.0)

    @property
    def is_complete(self) -> bool:
        return len(self.token_times) == self.num_output_tokens and self.token_times[-1] <= self.leaves_s

    def keeps(self, deadline_s: float) -> bool:
        """Its first token came in time, and the others came, too."""
        return self.is_complete and self.ttft_s <= deadline_s


class Replica:
    """One engine. now: when its last step ended, or when a request came to it that had nothing to do.

    load: tokens that are still to be computed, as far as one knows: of the prompts that have no first token yet, what
    was not in the cache when they came, and one for each request that is being answered.
    """

    def __init__(
        self,
        num_blocks: int = NUM_BLOCKS,
        *,
        block_size: int = BLOCK_SIZE,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 1024,
        cost: Cost = Cost(),
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=num_blocks * block_size,
        )
        self.cost, self.now, self.busy_s = cost, 0.0, 0.0
        self.jobs: dict[int, Job] = {}  # seq_id -> those that have not ended
        self.load = self.num_steps = self.num_computed_tokens = 0
        self._in_flight: tuple[SchedulerOutput, float] | None = None  # the step, and when it ends
        self._leaving: list[Job] = []

    def add(self, job: Job) -> None:
        """At job.arrival_s, up to which the replica has been advanced. It takes part from the next step on."""
        cached = self.manager.get_computed_blocks(job.seq).blocks if self.manager.can_allocate(job.seq) else []
        job.num_new_tokens = len(job.prompt) - len(cached) * self.manager.block_size
        self.load += job.num_new_tokens
        self.jobs[job.seq.seq_id] = job
        self.scheduler.add(job.seq)
        if self._in_flight is None:
            self.now = max(self.now, job.arrival_s)

    def abort(self, job: Job) -> None:
        """Its client has left: it is dropped before the next step."""
        if job.seq.seq_id in self.jobs:
            self._leaving.append(job)
            if self._in_flight is None:
                self._drop_leaving()

    def advance(self, until_s: float) -> None:
        """Steps, as far as they end by this time. One that is under way then stays so."""
        while self._in_flight is not None or self.scheduler.has_unfinished():
            if self._in_flight is None:
                output = self.schedule()
                self._in_flight = output, self.now + self.cost.of(output.num_tokens)
            if self._in_flight[1] > until_s:
                return
            self._end_step(*self._in_flight)

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule()

    def _end_step(self, output: SchedulerOutput, end_s: float) -> None:
        self.busy_s += end_s - self.now
        self._in_flight, self.now = None, end_s
        self.num_steps += 1
        self.num_computed_tokens += output.num_tokens
        sampling = [chunk.seq for chunk in output.chunks if chunk.reaches_end]
        finished = self.scheduler.update(output, output.per_chunk([TOKEN] * len(sampling)))
        for seq in sampling:
            job = self.jobs[seq.seq_id]
            if not job.token_times:
                self.load += 1 - job.num_new_tokens
            job.token_times.append(end_s)
        for seq in finished:
            self._forget(seq.seq_id)
        self._drop_leaving()

    def _drop_leaving(self) -> None:
        left = [job.seq.seq_id for job in self._leaving if job.seq.seq_id in self.jobs]
        self.scheduler.abort(*left)
        for seq_id in left:
            self._forget(seq_id)
        self._leaving = []

    def _forget(self, seq_id: int) -> None:
        job = self.jobs.pop(seq_id)
        self.load -= 1 if job.token_times else job.num_new_tokens


# Hashes of the prompt's full blocks, {replica: load}, what replicas have announced -> which replica.
Router = Callable[[list[bytes], dict[int, int], Announced], int]


class Fleet:
    """Replicas and the router before them. A replica's events come to the router when its step has ended.

    load_of: what the router is told of each replica.
    """

    def __init__(
        self,
        num_replicas: int,
        route: Router,
        *,
        load_of: Callable[[Replica], int] = lambda replica: replica.load,
        **options: Any,
    ) -> None:
        self.replicas = [Replica(**options) for _ in range(num_replicas)]
        self.route, self.load_of = route, load_of
        self.announced = Announced(self.replicas[0].manager.block_size)
        self.jobs: list[Job] = []
        for index, replica in enumerate(self.replicas):
            events = KVEvents(replica.manager)
            events.on_batch = partial(self.hear, index)
            replica.manager.on_event = events.on_event

    def hear(self, index: int, batch: KVEventBatch) -> None:
        self.announced.take(index, batch.events)

    def send(self, job: Job) -> None:
        for replica in self.replicas:
            replica.advance(job.arrival_s)
        loads = {index: self.load_of(replica) for index, replica in enumerate(self.replicas)}
        job.replica = self.route(self.announced.block_hashes_of(job.prompt), loads, self.announced)
        self.replicas[job.replica].add(job)
        self.jobs.append(job)

    def run(self, jobs: Iterable[Job]) -> "Fleet":
        for job in jobs:
            self.send(job)
        for replica in self.replicas:
            replica.advance(float("inf"))
        return self

    @property
    def hit_rate(self) -> float:
        """Of all blocks that were looked for."""
        stats = [replica.manager.stats for replica in self.replicas]
        return sum(s.hits for s in stats) / max(1, sum(s.queries for s in stats))

    @property
    def imbalance(self) -> float:
        """Tokens computed by the busiest replica, as a multiple of the mean."""
        counts = [replica.num_computed_tokens for replica in self.replicas]
        return max(counts) * len(counts) / max(1, sum(counts))


def percentile(values: Iterable[float], p: int) -> float:
    """Nearest rank (chapter 11)."""
    ordered = sorted(values)
    return ordered[-(-p * len(ordered) // 100) - 1]
