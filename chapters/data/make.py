"""The request logs of this folder, drawn from seeds:  python -m chapters.data.make

Nobody's requests are in them. README.md says what each stands for and what the columns mean.
"""

import csv
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from chapters.ch14_many_users.workload import PREFIX_TOKENS, alone, arrivals, shared_prefixes

FOLDER = Path(__file__).parent
NUM_REQUESTS, SEED = 1200, 14


class Request(NamedTuple):
    """A line of a log. The prompt begins with the first prefix_tokens tokens of the text that prefix_id names."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: str = ""
    prefix_tokens: int = 0
    user: str = ""


def write(requests: Iterable[Request], path: Path) -> None:
    """In the order of arrival, with milliseconds."""
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(Request._fields)
        lines.writerows((f"{r.arrival_s:.3f}", *r[1:]) for r in sorted(requests))


def strangers() -> Iterator[Request]:
    """Chapter 14's requests that share nothing."""
    for number, job in enumerate(alone(rate=6.0, num_prompt_tokens=400, num_output_tokens=120, num_jobs=NUM_REQUESTS)):
        yield Request(job.arrival_s, len(job.prompt), job.num_output_tokens, user=f"u{number}")


def assistants() -> Iterator[Request]:
    """Chapter 14's requests to four machines: each of 32 services puts a text of its own before every question."""
    for job in islice(shared_prefixes(num_replicas=4, rate=2.0, seed=SEED), NUM_REQUESTS):
        name = f"assistant{job.user}"
        yield Request(job.arrival_s, len(job.prompt), job.num_output_tokens, name, PREFIX_TOKENS, name)


def conversations() -> Iterator[Request]:
    """A conversation is one text that grows: each turn sends all that was said before, and the next question."""
    rng = random.Random(SEED)
    beginnings, number = arrivals(1.0, rng), 0
    requests: list[Request] = []
    while len(requests) < NUM_REQUESTS:
        number += 1
        now, prompt_tokens = next(beginnings), 150  # the service's own words
        for _ in range(min(int(rng.expovariate(1 / 5)) + 1, 20)):
            prompt_tokens += min(int(rng.lognormvariate(3.7, 1.0)) + 4, 2000)
            output_tokens = min(int(rng.lognormvariate(4.7, 0.7)) + 4, 800)
            name = f"conversation{number}"
            requests.append(Request(round(now, 3), prompt_tokens, output_tokens, name, prompt_tokens, f"u{number}"))
            prompt_tokens += output_tokens
            now += 0.05 * output_tokens + rng.expovariate(1 / 30)  # it is written and read; then one thinks
    yield from requests[:NUM_REQUESTS]


LOGS = {"strangers": strangers, "assistants": assistants, "conversations": conversations}


def main(folder: Path = FOLDER) -> None:
    for name, draw in LOGS.items():
        write(draw(), folder / f"{name}.csv")


if __name__ == "__main__":
    main()
