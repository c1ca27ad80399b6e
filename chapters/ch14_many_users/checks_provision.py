"""Grading of `provision`: the simulator plays the plan. One that breaks a limit or costs far too much is refused."""

from collections.abc import Callable
from typing import Any

from chapters.ch14_many_users.capacity import MACHINES, Limits, Load, Machine, Plan, Report, simulate, what_is_wrong
from chapters.expect import Wrong, cases

Provision = Callable[[Load, Limits, dict[str, Machine], Callable[[Plan], Report]], Plan]

MOST_QUESTIONS = 10
MOST = 1.5  # times the price of the plan that is known
EASY, STRICT = Limits(ttft_s=1.0, token_s=0.055), Limits(ttft_s=0.25, token_s=0.055)
GROUPED, FULL = 128 * 1024, 512 * 1024  # K/V bytes a token: 32 layers, 8 or 32 heads of 128, in 16 bits

# What comes, its limits, and a plan that keeps them, as tests/course/test_fleet.py makes sure.
FEW = Load(3, 500, 0, 60, GROUPED), EASY, Plan("small", 1, 40)
ALIKE = Load(167, 1500, 1000, 60, GROUPED), EASY, Plan("small", 14, 60)
UNLIKE = Load(167, 1500, 0, 60, GROUPED), EASY, Plan("small", 40, 26)
LARGE_KV = Load(40, 300, 0, 150, FULL), EASY, Plan("small", 5, 22)
AT_ONCE = Load(60, 1500, 0, 60, GROUPED), STRICT, Plan("large", 24, 60)
KNOWN = FEW, ALIKE, UNLIKE, LARGE_KV, AT_ONCE


def expect_plan(got: Any) -> Plan:
    """A plan that can be carried out, whatever it costs and brings."""
    if not isinstance(got, Plan):
        raise Wrong("return a Plan, and ask for a Plan", expected="Plan(machine, num_machines, max_num_seqs)", got=got)
    if got.machine not in MACHINES:
        raise Wrong("machine must be the name of one of the kinds on offer", expected=" or ".join(MACHINES), got=got)
    if any(type(number) is not int or number < 1 for number in got[1:]):
        raise Wrong("num_machines and max_num_seqs are whole numbers, at least 1", got=got)
    return got


def judge(function: Provision, load: Load, limits: Limits, known: Plan) -> None:
    asked = list[Plan]()

    def ask(plan: Plan) -> Report:
        asked.append(expect_plan(plan))
        if len(asked) > MOST_QUESTIONS:
            hint = f"ask was called more than {MOST_QUESTIONS} times for one load: begin with an estimate"
            raise Wrong(hint, got=", ".join(f"{plan.num_machines} {plan.machine}" for plan in asked))
        return simulate(load, plan)

    plan = function(load, limits, dict(MACHINES), ask)
    if plan is None and asked:
        problem = what_is_wrong(load, limits, asked[-1]) or "that one keeps both limits"
        raise Wrong(f"it returned nothing. Of the last plan that it asked for: {problem} ({load})", got=asked[-1])
    plan = expect_plan(plan)
    if problem := what_is_wrong(load, limits, plan):
        raise Wrong(f"{problem} ({load})", got=plan)
    if plan.per_hour > MOST * known.per_hour:
        hint = f"the plan keeps both limits, for {plan.per_hour:g} an hour. {known}, for {known.per_hour:g}, keeps them"
        raise Wrong(f"{hint}, too ({load})", expected=f"at most {MOST * known.per_hour:g} an hour", got=plan)


CHECKS = cases(
    judge,
    {
        "Three requests a second": [FEW],
        "Ten thousand users, each with a request a minute; all prompts begin alike": [ALIKE],
        "The same users, and no two prompts begin alike": [UNLIKE],
        "A model with four times as many bytes of K/V a token": [LARGE_KV],
        "The first token within 250 ms": [AT_ONCE],
    },
)
