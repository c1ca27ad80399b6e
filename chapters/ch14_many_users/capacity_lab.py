"""The lab's last part: machines for ten thousand users, estimated and simulated."""

from chapters.ch14_many_users.capacity import MACHINES, Limits, Load, Plan, simulate
from chapters.draw import make_table
from chapters.story import Story

LOAD = Load(167, 1500, 1000, 60, 128 * 1024)
LIMITS = Limits(ttft_s=1.0, token_s=0.055)
NUMS_MACHINES, NUM_SEATS = (11, 12, 14, 18, 24), 60
OTHERS = {
    "as it was": LOAD,
    "a fifth more users": LOAD._replace(requests_per_s=200.0),
    "no shared beginning": LOAD._replace(num_shared_tokens=0),
    "8 times as many K/V bytes": LOAD._replace(kv_bytes_per_token=8 * LOAD.kv_bytes_per_token),
}


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


def tell_capacity(story: Story) -> None:
    cost = MACHINES["small"].cost
    story.part("Machines for ten thousand users")
    story.say(
        f"Each sends a request a minute, {LOAD.requests_per_s:.0f} a second in all. A prompt has "
        f"{LOAD.num_prompt_tokens:,} tokens, of which all prompts share the first {LOAD.num_shared_tokens:,}; an "
        f"answer has {LOAD.num_output_tokens}. A token has {LOAD.kv_bytes_per_token:,} bytes of K and V. 99 of 100 "
        f"shall have their first token within {ms(LIMITS.ttft_s)} ms, and the others at a distance of "
        f"{ms(LIMITS.token_s)} ms at most. The machines on offer:"
    )
    table = make_table("machine", "an hour", "GB for K/V", "step, ms", "token, ms", width=10, first=8)
    for name, kind in MACHINES.items():
        step, token = (f"{1e3 * seconds:g}" for seconds in (kind.cost.step_s, kind.cost.token_s))
        table.add_row(name, f"{kind.per_hour:g}", f"{kind.kv_bytes / 1e9:g}", step, token)
    story.show(table)
    story.say(
        f"Small ones, with {NUM_SEATS} seats each: how busy one is with tokens; the time for a token and the requests "
        "inside, both as estimated (est.) and as simulated, in the mean; what 99 of 100 requests have. Times in ms:"
    )
    names = "busy", "token, est.", "token", "inside, est.", "inside", "TTFT p99", "token p99", "keeps both"
    table = make_table("machines", *names, width=7, first=8)
    for num_machines in NUMS_MACHINES:
        rate, report = LOAD.requests_per_s / num_machines, simulate(LOAD, Plan("small", num_machines, NUM_SEATS))
        busy = rate * LOAD.num_own_tokens * cost.token_s
        mean_s = cost.step_s / (1 - busy)
        inside = f"{rate * LOAD.num_output_tokens * mean_s:.0f}", f"{report.num_inside:.0f}"
        times = ms(report.ttft_s), ms(report.token_s), "yes" if report.keeps(LIMITS) else "no"
        table.add_row(str(num_machines), f"{busy:.0%}", ms(mean_s), ms(report.mean_token_s), *inside, *times)
    story.show(table)
    story.say("And if 14 were bought, but something else comes than was planned:")
    table = make_table("what comes", "TTFT p99", "token p99", "preempted", "waits for", width=10, first=26)
    for name, load in OTHERS.items():
        report = simulate(load, Plan("small", 14, NUM_SEATS))
        waits = "-" if report.keeps(LIMITS) else report.waits_for
        table.add_row(name, ms(report.ttft_s), ms(report.token_s), f"{report.num_preemptions:.1f}", waits)
    story.show(table)
    bytes_each = (LOAD.num_prompt_tokens - LOAD.num_shared_tokens) * LOAD.kv_bytes_per_token
    story.say(
        f"If other machines than those that decode computed the prompts, {bytes_each / 1e6:.1f} MB of K and V would "
        f"travel for each request, {bytes_each * LOAD.requests_per_s / 1e9:.1f} GB a second for all."
    )
