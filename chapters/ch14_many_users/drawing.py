"""Pictures of a fleet: its replicas, the last requests, and what came out."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from chapters.ch14_many_users.fleet import Fleet
from chapters.ch14_many_users.world import Result
from chapters.draw import make_table

WIDEST, NUM_SHOWN = 24, 16
TOKENS_A_MARK = 200


def draw_replicas(fleet: Fleet) -> Table:
    """A line for each replica, as far as they fit. The bar is what it has to compute."""
    names = "requests", "running", "waiting", "free blocks", "hit rate", "to compute, tokens"
    table = make_table("replica", *names, first=7)
    table.columns[-1].justify = "left"
    for number, replica in enumerate(fleet.replicas[:NUM_SHOWN]):
        scheduler, manager = replica.scheduler, replica.manager
        num_sent = sum(job.replica == number for job in fleet.jobs)
        counts = number, num_sent, len(scheduler.running), len(scheduler.waiting), len(manager.free_blocks)
        length = min(WIDEST, -(-replica.load // TOKENS_A_MARK))
        bar = Text("█" * length, "red" if length > WIDEST / 3 else "green").append(f" {replica.load}", "dim")
        table.add_row(*map(str, counts), f"{manager.stats.hit_rate:.0%}", bar)
    return table


def draw_last(fleet: Fleet, num_jobs: int = 6) -> Table:
    table = make_table("group", "replica", "prompt tokens", "found there", "first token after, ms", first=5)
    for job in fleet.jobs[-num_jobs:]:
        found = len(job.prompt) - job.num_new_tokens
        ttft = f"{1e3 * job.ttft_s:.0f}" if job.token_times else "..."
        table.add_row(str(job.user), str(job.replica), str(len(job.prompt)), str(found), ttft)
    return table


def draw_results(results: Mapping[str, Result]) -> Table:
    table = make_table("router", "requests", "hit rate", "TTFT, mean", "TTFT, p99", "busiest", first=14)
    for name, result in results.items():
        table.add_row(name, str(result.num_jobs), *cells(result))
    return table


def cells(result: Result) -> tuple[str, ...]:
    """Hit rate, TTFT in ms, and what the busiest replica computed as a multiple of the mean."""
    times = f"{1e3 * result.ttft_mean_s:.0f}", f"{1e3 * result.ttft_p99_s:.0f}"
    return f"{result.hit_rate:.0%}", *times, f"{result.imbalance:.1f}"
