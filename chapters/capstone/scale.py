"""python -m chapters capstone scale: how far simple rules get on the way from the engine by itself to our policy.

For teachers. The seeds are none of those that reference.py was tuned on (11 to 16; its snapshots: 21 to 23).
"""

from statistics import median

from rich.console import Console
from rich.table import Table

from chapters.capstone import policy, reference, simple
from chapters.capstone.desk import Desk
from chapters.capstone.judge import BASELINE, percent_of, scored
from chapters.capstone.simulation import COST, setup_for, simulate
from chapters.capstone.trace import Row, draw_trace

FIRST_SEED = 101
OURS = "our policy"


AnyPolicy = type[policy.Policy] | type[reference.Policy]


def goodput_of(policy_class: AnyPolicy | None, trace: list[Row], hybrid: bool = False) -> float:
    """In this process: these policies are ours. None: the engine by itself."""
    setup = setup_for()
    asked = None if policy_class is None else Desk(policy_class, list(setup))
    return scored(simulate(trace, setup, asked, hybrid), setup).goodput


def upper_bound(trace: list[Row]) -> float:
    """Good requests a second that no policy exceeds.

    Each has to be given its own prompt's tokens and its answer's, and a token takes token_s. Whatever prompts share
    costs nothing here; nor do the steps' own time, rejected draft tokens, memory and waiting. The cheapest are served
    while there is time, until the last arrival: more time would add dearer requests, and so lower the rate.
    """
    seconds = trace[-1].arrival_s - trace[0].arrival_s
    own_tokens = [row.prompt_tokens - row.prefix_tokens + row.output_tokens - 1 for row in trace]
    left_s = seconds
    num_good = 0.0
    for num_tokens in sorted(own_tokens):
        cost_s = max(num_tokens, 1) * COST.token_s
        num_good += min(left_s / cost_s, 1.0)
        left_s = max(left_s - cost_s, 0.0)
    return num_good / seconds


def print_scale(num_seeds: int, hybrid: bool, console: Console) -> int:
    seeds = range(FIRST_SEED, FIRST_SEED + num_seeds)
    traces = [draw_trace(seed) for seed in seeds]
    others: list[AnyPolicy] = [simple.WITHOUT_SNAPSHOTS] if hybrid else [*simple.SIMPLE, *simple.WITHOUT]
    policies: dict[str, AnyPolicy | None] = {BASELINE: None, OURS: reference.Policy}
    policies |= {each.__name__: each for each in others}
    found = {}
    for name, policy_class in policies.items():
        with console.status(f"{name}: serving {num_seeds} traces"):
            found[name] = [goodput_of(policy_class, trace, hybrid) for trace in traces]
    found["upper bound"] = [upper_bound(trace) for trace in traces]
    table = Table("percent of the way to our policy", "goodput", "median", *map(str, seeds))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, goodputs in found.items():
        ends = zip(goodputs, found[BASELINE], found[OURS], strict=True)
        percents = [percent_of(goodput, baseline, ours) for goodput, baseline, ours in ends]
        table.add_row(name, f"{median(goodputs):.2f}", f"{median(percents):.0f}", *map(str, percents))
    console.print(table)
    console.print("goodput: the median, in good requests a second; the columns are seeds", style="dim")
    return 0
