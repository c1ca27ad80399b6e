"""`nanovllm run-batch`: a file of requests in, a file of answers out, in bounded memory, safe against being killed.

The output file is all the state there is: lines whose records it holds are left out, so the same command continues
where any end has left it.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.features.lora.cli_modules import read_modules
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.jobs.answer_lines import Answer, CustomIds, answer_lines, read_custom_id
from nanovllm.jobs.output_file import OutputFile, fingerprint
from nanovllm.serving.openai.json_lines import parse_json, read_lines
from nanovllm.tools.screen import Forgiving, Screen

REPORT_EVERY_S = 5.0


class InputFile:
    """The lines of a job's input: each record answers a line of the file as it was when the job began."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = self._current_version()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number, bytes) of each line that is not blank. Raises ValueError once the file has changed."""
        for number, raw in read_lines(self.path):
            self.check()
            yield number, raw

    def check(self) -> None:
        if not self.path.exists() or self._current_version() != self._version:
            raise ValueError(f"{self.path} has changed since the job began")

    def _current_version(self) -> tuple[int, ...]:
        stat = self.path.stat()
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def run_batch(
    input_file: Path,
    output_file: Path,
    config: EngineConfig,
    served_names: tuple[str, ...] = (),
    lora_modules: tuple[str, ...] = (),
) -> int:
    """Returns the exit code: 0 all lines succeeded, 1 some are error records, 128 + n stopped by signal n.

    Raises ValueError or OSError; then what has been written is whole, and the same call continues.
    """
    if not input_file.is_file():
        raise FileNotFoundError(f"{input_file} is not a file (the input is read twice, so it cannot be a pipe)")
    if output_file.exists() and (not output_file.is_file() or output_file.samefile(input_file)):
        raise ValueError(f"{output_file} cannot be the output: name a file of its own")
    if not output_file.parent.is_dir():
        raise FileNotFoundError(f"{output_file.parent} is not a folder")
    directory = resolve_checkpoint(config.model, config.revision, config.load_format)
    own_name = Path(config.model).name if Path(config.model).exists() else config.model
    names = tuple(dict.fromkeys([*served_names, own_name, config.model, str(directory)]))
    config, adapters = read_modules(lora_modules, config, names)
    model = fingerprint(directory, config, adapters, served_names, output_file)
    console = Screen(stderr=True)
    with console.working("reading the input"):
        source = InputFile(input_file)
        output = OutputFile(output_file, input_file, model)
    num_skipped = len(output.answered)
    try:
        with _signals(console) as signals:
            if num_skipped < output.num_lines:
                with console.working(f"loading {names[0]}"):
                    llm = LLM(**vars(config))
                for adapter in adapters:
                    llm.engine.known_adapters.check(adapter)
                if fingerprint(directory, config, adapters, served_names, output_file) != model:
                    raise ValueError(f"the checkpoint {directory}, or an adapter, has changed since the job began")
                with _progress(llm, output, console) as report:
                    for answers in _answered(llm, source, output, names, signals):
                        output.append(answers)
                        report()
                if not signals:
                    source.check()
    finally:
        output.close()
        _closing_table(output, num_skipped)
    if signals:
        return 128 + signals[0]
    return 1 if output.num_failed else 0


def _answered(
    llm: LLM, source: InputFile, output: OutputFile, names: tuple[str, ...], signals: list[int]
) -> Iterator[dict[str, Answer]]:
    """Answers of the lines that have none yet, as they are finished, by the ids of their records."""
    ids = CustomIds()
    record_ids: dict[int, str] = {}  # of lines in flight, by their numbers

    def unanswered() -> Iterator[tuple[int, bytes]]:
        for number, raw in source.lines():
            record_id = output.record_id(number, raw)
            if record_id in output.answered:
                with suppress(ValueError):  # that is why it was answered by an error
                    ids.claim(read_custom_id(parse_json(raw, "a line")), number)
                continue
            record_ids[number] = record_id
            yield number, raw

    for answers in answer_lines(llm, unanswered(), names, claim_id=ids.claim, num_signals=lambda: len(signals)):
        yield {record_ids.pop(answer.line_number): answer for answer in answers}


@contextmanager
def _signals(console: Screen) -> Iterator[list[int]]:
    """SIGINT and SIGTERM, as they come. The third of them ends the process at once."""
    received: list[int] = []
    below_bar = "\n" if console.is_terminal else ""

    def handler(signum: int, frame: Any) -> None:
        received.append(signum)
        text = "finishing what has started; once more to drop it" if len(received) == 1 else "stopping"
        with suppress(OSError):  # no print(): the signal may have come in the middle of one, and they do not nest
            os.write(2, f"{below_bar}{signal.Signals(signum).name}: {text}\n".encode())
        if len(received) == 2:
            for number in before:
                signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        if not received:  # or the process is about to end, and one signal more must not change how
            for number, previous in before.items():
                signal.signal(number, previous)


@contextmanager
def _progress(llm: LLM, output: OutputFile, console: Screen) -> Iterator[Callable[[], None]]:
    """A function to call after every step: it moves a bar, or prints a line now and then where there is no terminal."""
    started = reported = time.monotonic()
    total = output.num_lines
    before = len(output.answered)
    stats = llm.engine.stats
    cache = llm.engine.block_manager.stats
    block_size = llm.engine.block_manager.block_size

    def state() -> str:
        seconds = max(time.monotonic() - started, 1e-9)
        done = len(output.answered)
        num_in = stats.num_prefill_tokens + cache.hits * block_size
        num_out = stats.num_output_tokens
        left = f", {timedelta(seconds=round(seconds / (done - before) * (total - done)))} left" if done > before else ""
        rates = f"in {num_in / seconds:,.0f}, out {num_out / seconds:,.0f} tok/s, hits {cache.hit_rate:.0%}"
        return f"{done:,}/{total:,}, {rates}{left}"

    if console.is_terminal:
        with Progress(BarColumn(bar_width=12), TextColumn("{task.description}", markup=False), console=console) as bar:
            task = bar.add_task("", total=total, completed=before)
            yield lambda: bar.update(task, completed=len(output.answered), description=state())
        return

    def report() -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            print(f"run-batch: {state()}", file=sys.stderr, flush=True)

    yield report


def _closing_table(output: OutputFile, num_skipped: int) -> None:
    num_answered = len(output.answered)
    table = Table(title=str(output.path), show_header=False, title_justify="left")
    for name, count in (
        ("succeeded", num_answered - output.num_failed),
        ("failed (error records)", output.num_failed),
        ("of these, skipped: answered by an earlier run", num_skipped),
        ("not answered yet: run the same command again", output.num_lines - num_answered),
    ):
        table.add_row(name, f"{count:,}")
    Screen(Forgiving(sys.stdout)).print(table)  # the records are the result, not this
