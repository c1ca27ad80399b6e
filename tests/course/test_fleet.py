"""The played time of chapter 14: a fleet ends with nothing left over, and its numbers fit together."""

from itertools import islice
from statistics import mean, median

import pytest

from chapters.ch14_many_users.capacity import Plan, what_is_wrong
from chapters.ch14_many_users.capacity_lab import BOUGHT, LIMITS, LOAD, num_seats
from chapters.ch14_many_users.checks_admit import TRACES
from chapters.ch14_many_users.checks_provision import FEW, KNOWN
from chapters.ch14_many_users.fleet import Cost, Fleet, Job, Replica
from chapters.ch14_many_users.overload import State, at_most, capacity, in_time, serve
from chapters.ch14_many_users.queues import SERVICES, expected_wait_s, simulate
from chapters.ch14_many_users.routing import POLICIES
from chapters.ch14_many_users.sharing import impatient
from chapters.ch14_many_users.workload import alone, own_tokens, shared_prefixes


def assert_empty(replica: Replica) -> None:
    replica.scheduler.check_integrity()
    assert not replica.jobs and not replica.scheduler.has_unfinished()
    assert replica.load == 0 and len(replica.manager.free_blocks) == len(replica.manager.blocks)


@pytest.mark.parametrize("policy", POLICIES)
def test_fleet_answers_all_the_same_way_each_time(policy):
    fleets = [Fleet(4, POLICIES[policy]()).run(islice(shared_prefixes(4, rate=9.0), 80)) for _ in range(2)]
    for fleet in fleets:
        assert all(job.is_complete for job in fleet.jobs)
        for replica in fleet.replicas:
            assert_empty(replica)
    first, second = ([(job.replica, job.token_times) for job in fleet.jobs] for fleet in fleets)
    assert first == second


def test_time_is_what_the_steps_cost():
    cost, job = Cost(1.0, 0.5), Job(3.0, own_tokens(10), 3)
    replica = Replica(cost=cost, max_num_batched_tokens=6)
    replica.add(job)
    assert replica.load == 10
    replica.advance(8.0)  # 6 tokens take until 7, the other 4 until 10
    assert not job.token_times and replica.load == 10
    replica.advance(20.0)
    assert job.token_times == [10.0, 11.5, 13.0] and replica.busy_s == 10.0
    assert_empty(replica)


def test_who_leaves_is_dropped_after_the_step_in_flight():
    job, other = (Job(0.0, own_tokens(100), 50) for _ in range(2))
    replica = Replica()
    replica.add(job)
    replica.add(other)
    replica.advance(0.2)
    replica.abort(job)
    assert job.seq in replica.scheduler.running, "a step is under way, and it is part of it"
    replica.advance(0.25)
    assert job.seq not in replica.scheduler.running and other.seq in replica.scheduler.running
    replica.advance(float("inf"))
    assert not job.is_complete and other.is_complete
    assert_empty(replica)


def test_server_loses_nothing_and_littles_law_holds():
    jobs = alone(12.0, 300, 60, 200)
    server = serve(jobs)
    assert_empty(server)
    in_system = sum(job.latency_s for job in jobs) / server.now
    assert server.num_in_system_s / server.now == pytest.approx(in_system, rel=0.03)
    jobs = impatient(12.0, 100)
    assert_empty(serve(jobs, at_most(4)))
    assert all(job.refused or job.is_complete or job.leaves_s < float("inf") for job in jobs)


@pytest.mark.parametrize("share", [0.3, 0.65, 1.0])
def test_a_strict_gate_measures_the_same_rate(share):
    """A queue of one, which a strict gate keeps, moves no slower than a long one."""
    make, deadline_s = TRACES["as much as the server can do"]
    rates = []

    def gate(state: State) -> bool:
        rates.append(state.requests_per_s)
        return in_time(share * deadline_s)(state)

    serve(make(), gate)
    assert median(filter(None, rates)) == pytest.approx(capacity(make()), rel=0.15)


@pytest.mark.parametrize("name", SERVICES)
def test_a_queue_waits_as_long_as_the_formula_says(name):
    waits = [simulate(0.6, name, 20_000, seed) for seed in range(5)]
    assert mean(waits) == pytest.approx(expected_wait_s(0.6, name), rel=0.06)


@pytest.mark.parametrize(("load", "limits", "plan"), KNOWN)
def test_plans_that_others_are_measured_by_keep_the_limits(load, limits, plan):
    assert what_is_wrong(load, limits, plan) == ""


def test_a_table_shows_that_the_cheapest_plan_needs_all_its_machines():
    plans = [Plan(name, num_machines, num_seats(name)) for name, num_machines in BOUGHT]
    cheapest = min((p for p in plans if not what_is_wrong(LOAD, LIMITS, p)), key=lambda plan: plan.per_hour)
    assert cheapest._replace(num_machines=cheapest.num_machines - 1) in plans


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"requests_per_s": 30}, "they alone take 1.68 s of each second"),
        ({"requests_per_s": 6, "kv_bytes_per_token": 2**21}, "wait for blocks: a machine has 40 seats, and 59 blocks"),
    ],
)
def test_why_a_plan_breaks_its_limits(changed, why):
    """The other reasons are what wrong solutions are told."""
    load, limits, plan = FEW
    assert why in what_is_wrong(load._replace(**changed), limits, plan)
