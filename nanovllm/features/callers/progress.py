"""What a person at a terminal or in a notebook sees of a call: a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from nanovllm.core.cache_stats import PrefixCacheStats
from nanovllm.stats import EngineStats


@contextmanager
def progress_bar(stats: EngineStats, cache: PrefixCacheStats, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number of finished requests. It draws a bar on a terminal or in a notebook.

    stats, cache: the engine's counters, which go on counting; the bar shows what they gain while it is drawn.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield lambda num_done: None
        return
    progress_class = Progress
    width = 40
    if console.is_jupyter:
        from nanovllm.features.callers.notebook import BarBelowCell

        progress_class = BarBelowCell
        width = 20  # a cell is no wider than a hundred columns, and a notebook does not wrap the line
    columns = (TextColumn("requests"), BarColumn(width), MofNCompleteColumn(), TextColumn("{task.description}"))
    before, cache_before = replace(stats), cache.snapshot()
    with progress_class(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=total)

        def advance(num_done: int) -> None:
            gained = stats - before
            seconds = max(gained.step_time_s, 1e-9)
            prefill, decode = gained.num_prefill_tokens / seconds, gained.num_decode_tokens / seconds
            rates = f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"
            hits = f"prefix hits {(cache.snapshot() - cache_before).hit_rate:.0%}"
            share = gained.acceptance_rate
            drafts = "" if share is None else f", drafts {share:.0%} accepted"
            progress.update(task, completed=num_done, description=f"{rates}, {hits}{drafts}")

        yield advance
