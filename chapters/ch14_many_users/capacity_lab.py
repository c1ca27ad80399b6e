"""The lab's last part: machines for ten thousand users, estimated and simulated."""

from chapters.ch14_many_users.capacity import MACHINES, Limits, Load, Plan, simulate
from chapters.ch14_many_users.fleet import BLOCK_SIZE
from chapters.draw import make_table
from chapters.story import Story

LOAD = Load(167, 1500, 1000, 60, 128 * 1024)
LIMITS = Limits(ttft_s=1.0, token_s=0.055)
BOUGHT = (("small", 11), ("small", 12), ("small", 14), ("small", 18), ("large", 5), ("large", 6))
OTHERS = {
    "as it was": LOAD,
    "a fifth more users": LOAD._replace(requests_per_s=200.0),
    "no shared beginning": LOAD._replace(num_shared_tokens=0),
    "8 times as many K/V bytes": LOAD._replace(kv_bytes_per_token=8 * LOAD.kv_bytes_per_token),
}


def room(name: str) -> int:
    """Tokens whose K and V the memory of such a machine holds."""
    return MACHINES[name].num_blocks(LOAD.kv_bytes_per_token) * BLOCK_SIZE


def num_seats(name: str) -> int:
    """So many requests fit even if all are as long as one can be."""
    return int((room(name) - LOAD.num_shared_tokens) / (1.5 * LOAD.num_own_tokens))


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


def tell_capacity(story: Story) -> None:
    story.part("Machines for ten thousand users")
    story.say(
        f"Each sends a request a minute, {LOAD.requests_per_s:.0f} a second in all. A prompt has "
        f"{LOAD.num_prompt_tokens:,} tokens, of which all prompts share the first {LOAD.num_shared_tokens:,}; an "
        f"answer has {LOAD.num_output_tokens}. A token has {LOAD.kv_bytes_per_token:,} bytes of K and V. 99 of 100 "
        f"requests should have their first token within {ms(LIMITS.ttft_s)} ms, and then a token every "
        f"{ms(LIMITS.token_s)} ms, on average over a request. These machines are on offer:"
    )
    names = "an hour", "step, ms", "token, ms", "GB for K/V", "K/V tokens", "seats"
    table = make_table("machine", *names, width=10, first=8)
    for name, machine in MACHINES.items():
        step, token = (f"{1e3 * seconds:g}" for seconds in (machine.cost.step_s, machine.cost.token_s))
        memory = f"{machine.kv_bytes / 1e9:g}", f"{room(name):,}", str(num_seats(name))
        table.add_row(name, f"{machine.per_hour:g}", step, token, *memory)
    story.show(table)
    story.say(
        "Estimated: ρ, the share of the time in which a machine computes tokens; τ, ms of a step; N, requests inside. "
        "Simulated: ms from one token to the next, the mean of all requests and what 99 of 100 keep; requests inside, "
        "on average; ms to the first token, what 99 of 100 keep."
    )
    simulated = "an hour", "ρ", "τ", "token", "p99", "N", "inside", "TTFT p99"
    table = make_table("machines", *simulated, width=8, first=8)
    for name, num_machines in BOUGHT:
        plan, cost = Plan(name, num_machines, num_seats(name)), MACHINES[name].cost
        rate, report = LOAD.requests_per_s / num_machines, simulate(LOAD, plan)
        busy = rate * LOAD.num_own_tokens * cost.token_s
        step_s = cost.step_s / (1 - busy)
        times = ms(step_s), ms(report.mean_token_s), ms(report.token_s)
        inside = f"{rate * LOAD.num_output_tokens * step_s:.0f}", f"{report.num_inside:.0f}"
        table.add_row(f"{num_machines} {name}", f"{plan.per_hour:g}", f"{busy:.0%}", *times, *inside, ms(report.ttft_s))
    story.show(table)
    story.say("What if 14 small ones were bought, and the load is not the planned one?")
    table = make_table("what comes", "token p99", "TTFT p99", "preempted", "waits for", width=10, first=26)
    for name, load in OTHERS.items():
        report = simulate(load, Plan("small", 14, num_seats("small")))
        waits = "-" if report.keeps(LIMITS) else report.waits_for
        table.add_row(name, ms(report.token_s), ms(report.ttft_s), f"{report.num_preemptions:.1f}", waits)
    story.show(table)
    bytes_each = (LOAD.num_prompt_tokens - LOAD.num_shared_tokens) * LOAD.kv_bytes_per_token
    story.say(
        f"If separate machines computed the prompts, {bytes_each / 1e6:.1f} MB of K and V would "
        f"travel for each request, {bytes_each * LOAD.requests_per_s / 1e9:.1f} GB a second for all."
    )
