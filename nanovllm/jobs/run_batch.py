"""`nanovllm run-batch`: a file of requests in, a file of answers out, in bounded memory, safe against being killed.

The output file is all the state there is. It is only ever appended to, whole records at a time, and a record's id says
which input, which model and which line it answers; so the same command continues where any end has left it, and another
job is refused. What a crash can leave behind is a torn last line, which is cut off.
"""

import fcntl
import json
import os
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import xxhash
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.features.lora.cli_modules import read_modules
from nanovllm.jobs.answer_lines import Answer, answer_lines, read_custom_id
from nanovllm.jobs.fingerprint import Job
from nanovllm.serving.openai.json_lines import parse_json, to_json
from nanovllm.tools.screen import Forgiving, Screen

READ_BYTES = 1_000_000
SYNC_EVERY_S = 1.0  # at most this much work is lost to a power cut
REPORT_EVERY_S = 5.0
SUCCEEDED, FAILED = 1, 2


# -- custom ids ------------------------------------------------------------------------------------------------------


class CustomIds:
    """The ids seen so far, in a temporary file that SQLite keeps out of memory."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # "": on disk, and gone with the connection
        self._db.executescript(
            "PRAGMA journal_mode=OFF; CREATE TABLE seen (id BLOB PRIMARY KEY, line) WITHOUT ROWID; BEGIN"
        )

    def claim(self, custom_id: str, line_number: int) -> None:
        """Raises ValueError if an earlier line has it."""
        key = custom_id.encode("utf-8", "surrogatepass")
        if self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, line_number)).rowcount == 0:
            [first] = self._db.execute("SELECT line FROM seen WHERE id = ?", (key,)).fetchone()
            raise ValueError(f"custom_id {custom_id!r:.80} is that of line {first} already")


# -- the output -------------------------------------------------------------------------------------------------------


class OutputFile:
    """Records of one job, one a line. Opened by one process at a time.

    Raises ValueError, with the file as it was, if it holds anything else than whole records of this job and the
    beginning of one more; and, whenever it notices, if somebody else has written to the file, cut or removed it.

    status          for each input line: 0, SUCCEEDED or FAILED
    num_answered    lines that have a record
    """

    def __init__(self, path: Path, job: Job) -> None:
        self.path, self.job = path, job
        self.status, self.num_answered = bytearray(job.last_line + 1), 0
        self._digest = xxhash.xxh3_64()  # of the whole file
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self._size = self._scan()
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced_size, self._synced_at = self._size, time.monotonic()

    def append(self, answers: list[Answer]) -> None:
        """Write records, all or none. Raises OSError."""
        lines = [to_json(answer.record(f"{self.job.id_prefix}{answer.line_number}")) + "\n" for answer in answers]
        data = "".join(lines).encode()
        self._check_size()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            hint = f"{error.strerror}. The records in it are whole: make room and run the same command again"
            raise OSError(error.errno, hint, str(self.path)) from error
        self._size += len(data)
        self._digest.update(data)
        if self._size > self._synced_size and time.monotonic() - self._synced_at > SYNC_EVERY_S:
            os.fsync(self._fd)
            self._synced_size, self._synced_at = self._size, time.monotonic()
        for answer in answers:
            self._note(answer.line_number, answer.error is not None)

    def close(self) -> None:
        """Raises ValueError or OSError if the file does not hold what was written."""
        try:
            os.fsync(self._fd)
            self._check_size()
            found, offset = xxhash.xxh3_64(), 0
            while data := os.pread(self._fd, READ_BYTES, offset):
                found.update(data)
                offset += len(data)
            if found.digest() != self._digest.digest():
                raise ValueError(f"{self.path} was written to by somebody else while the job ran")
        finally:
            os.close(self._fd)

    def _check_size(self) -> None:
        ours = os.fstat(self._fd)
        try:
            is_there = os.path.samestat(ours, os.stat(self.path))
        except OSError:
            is_there = False
        if not is_there or ours.st_size != self._size:
            what = f"has {ours.st_size:,} bytes instead of {self._size:,}" if is_there else "was removed or replaced"
            raise ValueError(f"{self.path} {what} while the job ran; run the same command again to answer what is lost")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.path} is being written by another run-batch") from error

    def _scan(self) -> int:
        """Note what is done. Returns the size of the whole records."""
        size, start = 0, f'{{"id": "{self.job.id_prefix}'.encode()
        with open(os.dup(self._fd), "rb") as file:
            for number, line in enumerate(file, start=1):
                # Zeros, which no JSON has: a file system had made room and no time to fill it.
                written, zeros, _ = line.partition(b"\0")
                whole = line.endswith(b"\n") and not zeros
                if (
                    not whole
                    and start.startswith(written[: len(start)])
                    and (written or size or not line.strip(b"\0\n"))
                ):
                    break
                self._take(number, line)
                self._digest.update(line)
                size += len(line)
        return size

    def _take(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            found = re.fullmatch(r"batch_req_(\w{16})_(\w{16})_(\d+)", record["id"])
            is_error = record["error"] is not None
        except (ValueError, LookupError, TypeError, RecursionError):
            found = None
        if found is None:
            raise ValueError(f"line {number} of {self.path} was not written by run-batch; choose another output file")
        same_input, same_model = found[1] == self.job.input_hash, found[2] == self.job.model_hash
        if not (same_input and same_model):
            options = "--dtype, --seed, --quantization or --lora-modules"
            what = f"another model, or other {options}" if same_input else "another input"
            raise ValueError(
                f"{self.path} holds answers to {what}: give what it was begun with to continue it, or choose another "
                "output file"
            )
        line_number = int(found[3])
        if line_number >= len(self.status) or self.status[line_number]:
            raise ValueError(f"line {number} of {self.path} answers line {line_number} once more; was it edited?")
        self._note(line_number, is_error)

    def _note(self, line_number: int, is_error: bool) -> None:
        self.status[line_number] = FAILED if is_error else SUCCEEDED
        self.num_answered += 1


# -- the job ----------------------------------------------------------------------------------------------------------


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
    from nanovllm.files.hub import resolve_checkpoint

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
    console = Screen(stderr=True)
    with console.working("reading the input"):
        job = Job.of(input_file, directory, config, adapters)
        output = OutputFile(output_file, job)
    num_skipped = output.num_answered
    try:
        with _signals(console) as signals:
            if num_skipped < job.num_lines:
                with console.working(f"loading {names[0]}"):
                    llm = LLM(**vars(config))
                for adapter in adapters:
                    llm.engine.adapters.check(adapter)
                job.check_model(directory, config, adapters)
                _answer_all(llm, input_file, output, names, signals, console)
                if not signals:
                    job.check_input(input_file)
    finally:
        output.close()
        _closing_table(output, num_skipped)
    return 128 + signals[0] if signals else 1 if FAILED in output.status else 0


def _answer_all(
    llm: LLM, input_file: Path, output: OutputFile, names: tuple[str, ...], signals: list[int], console: Screen
) -> None:
    ids = CustomIds()

    def unanswered() -> Iterator[tuple[int, bytes]]:
        for number, raw in output.job.lines(input_file):
            if output.status[number]:
                _claim(ids, number, raw)
            else:
                yield number, raw

    steps = answer_lines(llm, unanswered(), names, claim_id=ids.claim, num_signals=lambda: len(signals))
    with _progress(llm, output, console) as report:
        for answers in steps:
            output.append(answers)
            report()


def _claim(ids: CustomIds, number: int, raw: bytes) -> None:
    """The id of a line that has been answered."""
    with suppress(ValueError):  # that is why it was answered by an error
        ids.claim(read_custom_id(parse_json(raw)), number)


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
    total, before = output.job.num_lines, output.num_answered
    stats, cache, block_size = llm.engine.stats, llm.engine.block_manager.stats, llm.engine.block_manager.block_size

    def state() -> str:
        seconds, done = max(time.monotonic() - started, 1e-9), output.num_answered
        num_in, num_out = stats.num_prefill_tokens + cache.hits * block_size, stats.num_output_tokens
        left = f", {timedelta(seconds=round(seconds / (done - before) * (total - done)))} left" if done > before else ""
        rates = f"in {num_in / seconds:,.0f}, out {num_out / seconds:,.0f} tok/s, hits {cache.snapshot().hit_rate:.0%}"
        return f"{done:,}/{total:,}, {rates}{left}"

    if console.is_terminal:
        with Progress(BarColumn(bar_width=12), TextColumn("{task.description}", markup=False), console=console) as bar:
            task = bar.add_task("", total=total, completed=before)
            yield lambda: bar.update(task, completed=output.num_answered, description=state())
        return

    def report() -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            print(f"run-batch: {state()}", file=sys.stderr, flush=True)

    yield report


def _closing_table(output: OutputFile, num_skipped: int) -> None:
    failed, answered = output.status.count(FAILED), output.num_answered
    table = Table(title=str(output.path), show_header=False, title_justify="left")
    for name, count in (
        ("succeeded", answered - failed),
        ("failed (error records)", failed),
        ("of these, skipped: answered by an earlier run", num_skipped),
        ("not answered yet: run the same command again", output.job.num_lines - answered),
    ):
        table.add_row(name, f"{count:,}")
    Screen(Forgiving(sys.stdout)).print(table)  # the records are the result, not this
