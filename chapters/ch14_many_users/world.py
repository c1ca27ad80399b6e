"""The object that the lab of chapter 14 plays with: a fleet, the router before it, and requests that keep coming."""

from collections.abc import Iterator
from statistics import mean
from typing import NamedTuple

from chapters.ch14_many_users.fleet import Fleet, Job, percentile
from chapters.ch14_many_users.routing import POLICIES
from chapters.ch14_many_users.workload import shared_prefixes

NUMS_REPLICAS = (8, 16, 64, 1, 4)
SKEWS = (1.0, 0.0, 1.5)
RATES = (7.0, 9.0, 4.0)
BURST = 24


class Result(NamedTuple):
    num_jobs: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p99_s: float
    imbalance: float


def result_of(fleet: Fleet) -> Result:
    """Of the requests that have their first token."""
    ttfts = [job.ttft_s for job in fleet.jobs if job.token_times]
    if not ttfts:
        return Result(0, 0.0, 0.0, 0.0, 1.0)
    return Result(len(ttfts), fleet.hit_rate, mean(ttfts), percentile(ttfts, 99), fleet.imbalance)


class World:
    """A fleet, and what came out with each policy under the same requests."""

    def __init__(self) -> None:
        self.reset()

    # -- actions --------------------------------------------------------------------------------------------------

    def reset(self) -> str:
        self.policy, self.num_replicas, self.skew, self.rate = "round robin", NUMS_REPLICAS[0], SKEWS[0], RATES[0]
        return self.begin("n sends one request, e two hundred; p switches to another router.")

    def send(self, num_jobs: int = 1) -> str:
        for _ in range(num_jobs):
            self.fleet.send(next(self.jobs))
        self.results[self.policy] = result_of(self.fleet)
        return self.say_last()

    def send_many(self) -> str:
        return self.send(200)

    def burst(self) -> str:
        """One beginning is in the news."""
        first = next(self.jobs)
        for i in range(BURST):
            tokens = [*first.prompt[:-1], 10**7 + i]
            self.fleet.send(Job(first.arrival_s + 0.001 * i, tokens, first.num_output_tokens, first.user))
        self.results[self.policy] = result_of(self.fleet)
        chosen = sorted({job.replica for job in self.fleet.jobs[-BURST:]})
        return f"{BURST} requests of group {first.user} at once. They went to replicas {', '.join(map(str, chosen))}."

    def next_policy(self) -> str:
        names = list(POLICIES)
        self.policy = names[(names.index(self.policy) + 1) % len(names)]
        return self.begin(f"{self.policy}. Caches are empty, and n and e send the same requests again.", self.results)

    def next_number(self) -> str:
        self.num_replicas = NUMS_REPLICAS[(NUMS_REPLICAS.index(self.num_replicas) + 1) % len(NUMS_REPLICAS)]
        return self.begin(f"{self.num_replicas} replicas, and users and groups to match.")

    def next_skew(self) -> str:
        self.skew = SKEWS[(SKEWS.index(self.skew) + 1) % len(SKEWS)]
        return self.begin(f"The k-th group asks 1 / k**{self.skew:g} times as often as the first.")

    def next_rate(self) -> str:
        self.rate = RATES[(RATES.index(self.rate) + 1) % len(RATES)]
        return self.begin(f"{self.rate:g} requests a second for each replica.")

    # -- what there is ----------------------------------------------------------------------------------------------

    def begin(self, said: str, results: dict[str, Result] | None = None) -> str:
        self.fleet = Fleet(self.num_replicas, POLICIES[self.policy]())
        self.jobs: Iterator[Job] = shared_prefixes(self.num_replicas, self.rate, self.skew)
        self.results = results or {}
        return said

    def say_last(self) -> str:
        job = self.fleet.jobs[-1]
        found = len(job.prompt) - job.num_new_tokens
        return f"Group {job.user} to replica {job.replica}, which had {found} of its {len(job.prompt)} tokens."
