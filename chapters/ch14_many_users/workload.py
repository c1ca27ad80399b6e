"""Who asks what, and when: drawn from a seed, so that whatever is compared is given the same."""

import random
from collections.abc import Iterator
from itertools import accumulate, count

from chapters.ch14_many_users.fleet import BLOCK_SIZE, Job

PREFIX_TOKENS, OWN_TOKENS = 16 * BLOCK_SIZE, 80
GROUPS_PER_REPLICA = 8
_numbers = count(1)


def arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Moments of a Poisson process, `rate` a second: the gaps are exponential, and none knows of another."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def own_tokens(num_tokens: int) -> list[int]:
    """A text like nobody else's."""
    return [10**6 + next(_numbers), *range(1, num_tokens)]  # a block's hash depends on all that comes before it


def alone(rate: float, num_prompt_tokens: int, num_output_tokens: int, num_jobs: int, seed: int = 0) -> list[Job]:
    """Requests that share nothing. Lengths vary around these by half, up and down."""
    rng = random.Random(seed)

    def about(num: int) -> int:
        return rng.randint(-(-num // 2), num + num // 2)

    times = [now for now, _ in zip(arrivals(rate, rng), range(num_jobs), strict=False)]
    return [Job(now, own_tokens(about(num_prompt_tokens)), about(num_output_tokens)) for now in times]


def zipf(num_groups: int, skew: float) -> list[float]:
    """Cumulative weights: the k-th group is asked for 1 / k**skew times as often as the first."""
    return list(accumulate(1 / k**skew for k in range(1, num_groups + 1)))


def shared_prefixes(
    num_replicas: int, rate: float = 7.0, skew: float = 1.0, num_output_tokens: int = 16, seed: int = 0
) -> Iterator[Job]:
    """Requests without end, `rate` a second for each replica. Groups of users have a long beginning in common, some
    groups ask much more often than others, and a larger fleet has more groups."""
    rng = random.Random(seed)
    num_groups = GROUPS_PER_REPLICA * num_replicas
    weights = zipf(num_groups, skew)
    prefixes = [list(range(100 * group, 100 * group + PREFIX_TOKENS)) for group in range(num_groups)]
    for arrival_s in arrivals(rate * num_replicas, rng):
        [group] = rng.choices(range(num_groups), cum_weights=weights)
        yield Job(arrival_s, prefixes[group] + own_tokens(OWN_TOKENS), num_output_tokens, group)
