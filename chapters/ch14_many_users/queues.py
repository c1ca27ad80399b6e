"""A queue before one server, without any engine: how long one waits, and how long theory says (chapter 14)."""

import random
from collections.abc import Callable, Iterator
from statistics import mean

from chapters.ch14_many_users.workload import arrivals

SERVICES: dict[str, Callable[[random.Random], float]] = {  # seconds of work; the mean is always 1
    "all alike": lambda rng: 1.0,
    "exponential": lambda rng: rng.expovariate(1.0),
    "1 in 10 long": lambda rng: 5.5 if rng.random() < 0.1 else 0.5,
}
SECOND_MOMENTS = {"all alike": 1.0, "exponential": 2.0, "1 in 10 long": 0.1 * 5.5**2 + 0.9 * 0.5**2}


def waits(rate: float, service: Callable[[random.Random], float], num_customers: int, seed: int) -> Iterator[float]:
    """Seconds that each customer waits before it is served, in the order of arrival (Lindley's recursion)."""
    rng, wait, before = random.Random(seed), 0.0, 0.0
    for _, now in zip(range(num_customers), arrivals(rate, rng), strict=False):
        wait = max(0.0, wait - (now - before))  # what is left of the work that was there
        yield wait
        wait, before = wait + service(rng), now


def simulate(rate: float, name: str, num_customers: int = 40_000, seed: int = 14) -> float:
    """The mean wait, in seconds."""
    return mean(waits(rate, SERVICES[name], num_customers, seed))


def expected_wait_s(rate: float, name: str) -> float:
    """Pollaczek and Khinchine: rate * E[S**2] / (2 * (1 - utilization)). The mean of S is 1, so that is the rate."""
    return rate * SECOND_MOMENTS[name] / (2 * (1 - rate))
