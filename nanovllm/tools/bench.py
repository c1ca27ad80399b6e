"""`nanovllm bench`: the four numbers of an engine at several batch sizes (chapter 11)."""

import random
import time
from dataclasses import dataclass, field, replace
from statistics import mean

from rich.table import Table

from nanovllm import LLM, SamplingParams
from nanovllm.stats import EngineStats
from nanovllm.tools.screen import Screen

BAR_WIDTH = 16


@dataclass(frozen=True)
class Measurement:
    """One batch. Means over its requests, all submitted at the same moment."""

    batch_size: int
    ttft_s: float  # time to first token: submitted -> first token
    tpot_s: float  # time per output token after the first
    latency_s: float  # submitted -> last token, of the slowest
    output_tokens_per_s: float
    drafts: EngineStats = field(default_factory=EngineStats)  # of this batch


def measure(llm: LLM, batch_size: int, input_len: int, output_len: int, seed: int = 0) -> Measurement:
    """Random prompts that share nothing, greedy, EOS ignored."""
    rng = random.Random(f"{seed},{batch_size}")
    vocab_size = llm.engine.model_config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(batch_size)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    before = replace(llm.engine.stats)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    ttft_s = mean(output.metrics.ttft_s or 0.0 for output in outputs)
    tpot_s = mean(output.metrics.tpot_s or 0.0 for output in outputs)
    drafts = llm.engine.stats - before
    return Measurement(batch_size, ttft_s, tpot_s, seconds, batch_size * output_len / seconds, drafts)


def run_bench(llm: LLM, batch_sizes: list[int], input_len: int, output_len: int) -> int:
    console = Screen()
    rows = []
    limit = llm.engine.scheduler.max_model_len
    if input_len + output_len > limit:
        raise ValueError(f"--input-len and --output-len are {input_len + output_len} tokens; max_model_len is {limit}")
    measure(llm, max(batch_sizes), input_len, 2, seed=1)  # the first steps wait for memory
    with Screen(stderr=True).working("measuring") as status:
        for seed, batch_size in enumerate(batch_sizes, start=2):  # equal sizes, too, send different prompts
            status.update(f"measuring a batch of {batch_size}")
            rows.append(measure(llm, batch_size, input_len, output_len, seed=seed))
    table = Table(title=f"{input_len} prompt tokens, {output_len} output tokens a request", title_justify="left")
    for name in (
        "batch",
        "first token\nafter, ms",
        "then a token\nevery, ms",
        "whole batch\ntakes, s",
        "output\ntokens/s",
    ):
        table.add_column(name, justify="right")
    has_drafts = llm.engine.speculation is not None
    for name in ("drafts\naccepted", "tokens\na step") if has_drafts else ():
        table.add_column(name, justify="right")
    bar_width = BAR_WIDTH // 2 if has_drafts else BAR_WIDTH
    table.add_column("", width=bar_width)
    best = max(row.output_tokens_per_s for row in rows)
    for row in rows:
        interval = f"{row.tpot_s * 1e3:,.1f}" if output_len > 1 else "-"
        times = f"{row.ttft_s * 1e3:,.0f}", interval, f"{row.latency_s:,.2f}"
        bar = "█" * round(row.output_tokens_per_s / best * bar_width)
        share, per_step = row.drafts.acceptance_rate, row.drafts.tokens_per_step
        draft_columns = ("-" if share is None else f"{share:.0%}", f"{per_step:.2f}") if has_drafts else ()
        table.add_row(f"{row.batch_size}", *times, f"{row.output_tokens_per_s:,.0f}", *draft_columns, bar)
    console.print(table)
    return 0
