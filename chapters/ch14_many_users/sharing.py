"""Requests that are in each other's way: long prompts, a user with many requests, clients that leave."""

import random
from collections import Counter
from typing import Any

from chapters.ch14_many_users.fleet import Job
from chapters.ch14_many_users.overload import Server
from chapters.ch14_many_users.workload import alone, own_tokens
from nanovllm.core.scheduler import SchedulerOutput

GREEDY = 0


class FairServer(Server):
    """Before each step the queue is sorted: whose user has got the fewest tokens so far comes first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.served: Counter[int] = Counter()  # user -> tokens computed

    def add(self, job: Job) -> None:
        active = [self.served[other.user] for other in self.jobs.values()]
        self.served[job.user] = max(self.served[job.user], min(active, default=0))  # a pause gives no credit
        super().add(job)

    def schedule(self) -> SchedulerOutput:
        ordered = sorted(self.scheduler.waiting, key=lambda seq: self.served[self.jobs[seq.seq_id].user])
        self.scheduler.waiting.clear()
        self.scheduler.waiting.extend(ordered)
        output = super().schedule()
        for chunk in output.chunks:
            self.served[self.jobs[chunk.seq.seq_id].user] += chunk.end - chunk.start
        return output


def long_and_short() -> tuple[list[Job], Job, list[Job]]:
    """Six that are being answered, then a long prompt, then four short ones after it."""
    talking = [Job(0.0, own_tokens(40), 120) for _ in range(6)]
    long = Job(0.3, own_tokens(8000), 20)
    return talking, long, [Job(0.4 + 0.05 * i, own_tokens(40), 20) for i in range(4)]


def greedy_and_others(num_requests: int = 60) -> list[Job]:
    """One user sends many requests at once. Four others send one now and then."""
    greedy = [Job(0.0, own_tokens(400), 60, GREEDY) for _ in range(num_requests)]
    rng = random.Random(5)
    others = [Job(rng.uniform(0.5, 5.0), own_tokens(200), 60, 1 + i % 4) for i in range(16)]
    return sorted([*greedy, *others], key=lambda job: job.arrival_s)


def impatient(rate: float, num_jobs: int, seed: int = 7) -> list[Job]:
    """Long answers, and two of five clients go away after half a second."""
    jobs, rng = alone(rate, 300, 120, num_jobs, seed), random.Random(seed)
    for job in jobs:
        if rng.random() < 0.4:
            job.leaves_s = job.arrival_s + 0.5
    return jobs
