"""What prefix caching would do for a log of requests: the report of `nanovllm analyze`."""

import sys
from numbers import Integral
from pathlib import Path

from rich.progress import track
from rich.table import Table

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import check_number
from nanovllm.files.tokenizer import load_tokenizer
from nanovllm.serving.openai.json_lines import explain, parse_json, read_lines
from nanovllm.tools.screen import Screen
from nanovllm.tools.workload import Workload, hit_rates, parse_requests
from nanovllm.wings import use_processors_template

BAR_WIDTH = 14
MAX_BLOCK_SIZE = 65_536


def run_analyze(log: Path, model: str, block_size: int) -> int:
    check_number("--block-size", block_size, Integral, 1, MAX_BLOCK_SIZE)
    if not log.is_file():
        raise FileNotFoundError(f"{log} is not a file")
    from nanovllm.files.hub import resolve_checkpoint

    directory = resolve_checkpoint(model, load_format="dummy")  # no weights are read
    config = ModelConfig.from_directory(directory)
    tokenizer = load_tokenizer(directory)
    use_processors_template(tokenizer, directory, config)
    workload = Workload(block_size)
    num_bad = 0
    for number, line in read_lines(log):
        try:
            for token_ids, salt in parse_requests(parse_json(line, "a line"), tokenizer):
                workload.add(token_ids, salt)
        except BaseException as error:
            num_bad += 1
            print(f"{log}:{number}: skipped: {explain(error)}", file=sys.stderr)
    if not workload.requests:
        raise ValueError(f"{log} has no request that can be read ({num_bad} lines skipped)")
    draw_report(workload, config, num_bad)
    return 0


def draw_report(workload: Workload, config: ModelConfig, num_bad: int) -> None:
    console = Screen()
    report = workload.report()
    itemsize = 4 if config.dtype == "float32" else 2
    block_bytes = report.block_size * config.kv_bytes_per_token(itemsize)

    def pool(num_blocks: int) -> str:
        return f"{num_blocks:,} blocks, {num_blocks * block_bytes / 1e6:,.1f} MB in {config.dtype}"

    facts = Table(show_header=False, title="Workload", title_justify="left")
    for name, value in (
        ("requests", f"{report.num_requests:,}" + (f" ({num_bad} lines skipped)" if num_bad else "")),
        ("prompt tokens", f"{report.num_tokens:,}"),
        (f"full blocks of {report.block_size} tokens", f"{report.num_blocks:,}"),
        ("  unique", f"{report.num_unique_blocks:,}"),
        ("  shared by two requests or more", f"{report.num_shared_blocks:,}"),
        ("prefill that reuse saves at best", f"{report.best_prefill_savings:.1%}"),
        ("mean shared prefix", f"{report.mean_shared_prefix_tokens:,.0f} tokens a request"),
        ("pool for the working set (+20 %)", pool(report.working_set_blocks)),
    ):
        facts.add_row(name, value)
    console.print(facts)

    chart = Table(title="Hit rate against pool size (one request after another)", title_justify="left")
    chart.add_column("blocks", justify="right", no_wrap=True)
    for name, style in (("LRU (this engine)", "green"), ("by frequency", "cyan"), ("optimum", "magenta")):
        chart.add_column(name, style=style, no_wrap=True, width=BAR_WIDTH + 6)
    sizes = track(workload.pool_sizes(), "simulating", console=Screen(stderr=True), transient=True)
    for size, *rates in hit_rates(workload, sizes):
        chart.add_row(f"{size:,}", *(f"{rate:4.0%} {'█' * round(rate * BAR_WIDTH)}" for rate in rates))
    console.print(chart)
