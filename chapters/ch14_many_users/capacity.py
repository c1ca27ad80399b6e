"""How many machines does a load need? A plan, and what the simulator says about it (chapter 14).

The simulator plays one machine of the plan: the real scheduler, with its share of the requests. Each request goes to a
machine drawn at random, so the requests of one machine come at random, too.
"""

import random
from functools import cache
from itertools import islice
from math import ceil
from statistics import mean
from typing import Any, NamedTuple

from chapters.ch14_many_users.fleet import BLOCK_SIZE, Cost, Job, Replica, percentile
from chapters.ch14_many_users.workload import arrivals, own_tokens
from nanovllm.core.scheduler import SchedulerOutput

MAX_NUM_BATCHED_TOKENS = 512
SIMULATED_S, FEWEST_REQUESTS, MOST_REQUESTS = 10.0, 60, 400


class Machine(NamedTuple):
    """per_hour: its price. kv_bytes: what the weights leave free in its memory, for K and V."""

    per_hour: float
    kv_bytes: int
    cost: Cost

    def num_blocks(self, kv_bytes_per_token: int) -> int:
        return self.kv_bytes // (BLOCK_SIZE * kv_bytes_per_token)


MACHINES = {
    "small": Machine(1.0, 8 * 10**9, Cost(step_s=0.012, token_s=0.00010)),
    "large": Machine(3.0, 32 * 10**9, Cost(step_s=0.010, token_s=0.00004)),
}


class Load(NamedTuple):
    """What comes. Lengths are means: they vary by half, up and down, except for the beginning that is shared."""

    requests_per_s: float
    num_prompt_tokens: int
    num_shared_tokens: int  # of these, the beginning that is the same in all prompts
    num_output_tokens: int
    kv_bytes_per_token: int  # of the model

    @property
    def num_own_tokens(self) -> int:
        """Of a request's tokens, those that no other request has: the rest of its prompt, and its answer."""
        return self.num_prompt_tokens - self.num_shared_tokens + self.num_output_tokens

    def jobs(self, num_machines: int) -> list[Job]:
        """What comes to one of so many machines."""
        rng, rate = random.Random(14), self.requests_per_s / num_machines
        shared = list(range(self.num_shared_tokens))

        def about(num: int) -> int:
            return rng.randint(num - num // 2, num + num // 2)

        num_jobs = min(max(FEWEST_REQUESTS, round(SIMULATED_S * rate)), MOST_REQUESTS)
        times, num_own = islice(arrivals(rate, rng), num_jobs), self.num_prompt_tokens - self.num_shared_tokens
        return [Job(now, shared + own_tokens(about(num_own)), about(self.num_output_tokens)) for now in times]


class Limits(NamedTuple):
    """Seconds that 99 of 100 requests keep: to the first token, and for each later token, on average over a request."""

    ttft_s: float
    token_s: float


class Plan(NamedTuple):
    """So many machines of one kind. max_num_seqs: seats of each."""

    machine: str
    num_machines: int
    max_num_seqs: int

    @property
    def per_hour(self) -> float:
        return self.num_machines * MACHINES[self.machine].per_hour


class Report(NamedTuple):
    """Of one machine. The times are those of Limits.

    mean_token_s      like token_s, as the mean of all requests
    num_inside        requests that wait or run, on average
    num_preemptions   for each request, on average
    waits_for         what the first in the queue waited for most of the time: seats, tokens or blocks
    """

    ttft_s: float
    token_s: float
    mean_token_s: float
    num_inside: float
    num_preemptions: float
    waits_for: str

    def keeps(self, limits: Limits) -> bool:
        return self.ttft_s <= limits.ttft_s and self.token_s <= limits.token_s


class Watched(Replica):
    """Notes why the first in the queue is not admitted: all seats are taken, or no tokens or no blocks are left."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waited_s = {"tokens": 0.0, "seats": 0.0, "blocks": 0.0}

    def schedule(self) -> SchedulerOutput:
        output, scheduler = super().schedule(), self.scheduler
        if scheduler.waiting:
            no_seat = len(scheduler.running) >= scheduler.max_num_seqs
            no_tokens = output.num_tokens >= scheduler.max_num_batched_tokens
            what = "seats" if no_seat else "tokens" if no_tokens else "blocks"
            self.waited_s[what] += self.cost.of(output.num_tokens)
        return output


@cache
def simulate(load: Load, plan: Plan) -> Report:
    """One machine of the plan, until the last of its requests has ended."""
    machine, jobs = MACHINES[plan.machine], load.jobs(plan.num_machines)
    replica = Watched(
        num_blocks=machine.num_blocks(load.kv_bytes_per_token),
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        cost=machine.cost,
    )
    for job in jobs:
        replica.advance(job.arrival_s)
        replica.add(job)
    replica.advance(float("inf"))
    token_times = [(job.latency_s - job.ttft_s) / (job.num_output_tokens - 1) for job in jobs]
    return Report(
        percentile([job.ttft_s for job in jobs], 99),
        percentile(token_times, 99),
        mean(token_times),
        sum(job.latency_s for job in jobs) / jobs[-1].arrival_s,  # Little's law
        replica.scheduler.num_preemptions / len(jobs),
        max(replica.waited_s, key=lambda what: replica.waited_s[what]),
    )


def what_is_wrong(load: Load, limits: Limits, plan: Plan) -> str:
    """Which limit the plan breaks, and why. Empty if it keeps both."""
    report, machine = simulate(load, plan), MACHINES[plan.machine]
    if report.keeps(limits):
        return ""
    broken = f"have their first token within {in_ms(report.ttft_s)}, and the limit is {in_ms(limits.ttft_s)}"
    if report.token_s > limits.token_s:
        broken = f"wait {in_ms(report.token_s)} from one token to the next, and the limit is {in_ms(limits.token_s)}"
    return f"99 of 100 requests {broken}: {_why(load, limits, plan, report, machine)}"


def _why(load: Load, limits: Limits, plan: Plan, report: Report, machine: Machine) -> str:
    rate, (step_s, token_s) = load.requests_per_s / plan.num_machines, (machine.cost.step_s, machine.cost.token_s)
    longest = 1.5 * (load.num_prompt_tokens - load.num_shared_tokens)
    alone_s = longest * token_s + ceil(longest / MAX_NUM_BATCHED_TOKENS) * step_s
    busy = rate * load.num_own_tokens * token_s
    comes = f"{rate:.1f} requests a second come to a machine, each with {load.num_own_tokens:,} tokens of its own"
    if busy >= 1:
        return f"{comes}; they alone take {busy:.2f} s of each second, and each step takes {in_ms(step_s)} more"
    if alone_s > limits.ttft_s:
        return f"the longest prompts take {in_ms(alone_s)} on a {plan.machine} machine where nobody else is"
    room = f"a machine has {plan.max_num_seqs} seats, and {machine.num_blocks(load.kv_bytes_per_token)} blocks"
    if report.num_preemptions > 0.05:
        return f"{room}, too few for so many: {report.num_preemptions:.1f} preemptions a request"
    if report.token_s > limits.token_s:
        return f"the mean is {in_ms(report.mean_token_s)}; {comes}, and fewer for each would make its steps shorter"
    return {
        "seats": f"requests wait for a seat: {room}",
        "blocks": f"requests wait for blocks: {room}",
        "tokens": f"prompts wait for each other, as a step has {MAX_NUM_BATCHED_TOKENS} tokens: {comes}",
    }[report.waits_for]


def in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"
