"""The server's log. What goes wrong goes to standard error, a line that repeats once a minute, with the number of those
that were not written. What goes well, a line for each request and a sum every ten seconds, goes to standard output.
"""

import asyncio
import logging
import os
import time
from contextlib import suppress
from queue import Full, Queue
from threading import Thread

from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.http.options import ServeOptions

logger = logging.getLogger("nanovllm.stats")
problems = logging.getLogger("nanovllm")

PAUSE_S = 60.0
MAX_LINES = 1000  # different ones that are remembered
LOGGERS = ("asyncio", "uvicorn.error", "nanovllm")
MAX_UNWRITTEN = 10_000  # lines that wait for somebody to read what was written
STANDARD_OUTPUT = 1
INTERVAL_S = 10.0


WITH_TIME = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")


class Repeated(logging.Filter):
    """Lines are the same if they come from the same logger and differ in numbers, names or tracebacks only."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int, str, type | None], tuple[float, int]] = {}  # when it was written; left out

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = time.monotonic(), record.exc_info[0] if record.exc_info else None
        key = record.name, record.levelno, str(record.msg).partition("\n")[0], kind
        written, num = self._seen.get(key, (-PAUSE_S, 0))
        if now - written < PAUSE_S:
            self._seen[key] = written, num + 1
            return False
        if len(self._seen) >= MAX_LINES:
            self._seen.clear()
        self._seen[key] = now, 0
        if num:
            record.msg = f"{record.msg} (and {num} more like it)"
        return True


def write_repeated_lines_once() -> None:
    repeated = Repeated()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(repeated)


class Unhurried(logging.Handler):
    """Writes to a file descriptor in a thread of its own: if nobody reads there, lines are lost, and nobody waits."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(WITH_TIME)
        self._descriptor = descriptor
        self._lines: Queue[str] = Queue(MAX_UNWRITTEN)
        self._num_lost = 0
        Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except Full:
            self._num_lost += 1

    def flush(self) -> None:
        """Wait for what is unwritten, a second at most."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, 1.0)

    def _run(self) -> None:
        while True:
            text = self._lines.get() + "\n"
            num_lost, self._num_lost = self._num_lost, 0
            if num_lost:
                text += f"({num_lost} lines were lost: nobody read them)\n"
            left = text.encode("utf-8", "backslashreplace")
            with suppress(OSError):  # whoever read it has gone
                while left:
                    left = left[os.write(self._descriptor, left) :]
            self._lines.task_done()


def write_lines(options: ServeOptions) -> logging.Handler:
    """Let lines of what goes well be written, as far as they are wanted, and all lines have the time.

    Returns what writes them.
    """
    for errors in logging.getLogger().handlers:
        errors.setFormatter(WITH_TIME)
    wanted = {"nanovllm.access": not options.disable_log_requests, logger.name: not options.disable_log_stats}
    handler = Unhurried(STANDARD_OUTPUT)
    for name, is_wanted in wanted.items():
        named = logging.getLogger(name)
        named.setLevel(logging.INFO if is_wanted else logging.WARNING)
        named.addHandler(handler)
        named.propagate = False
    return handler


async def sum_up(llm: AsyncLLM) -> None:
    """A line every ten seconds in which there was work, until it is cancelled."""
    before, began = None, 0.0
    while True:
        try:
            now, ended = await llm.stats(), time.monotonic()
            if before is not None and (now["num_steps"] > before["num_steps"] or now["num_waiting"]):
                logger.info("%s", summary(before, now, ended - began))
            before, began = now, ended
        except Exception:
            problems.exception("the sum of ten seconds is not known")
        await asyncio.sleep(INTERVAL_S)


def summary(before: dict, now: dict, seconds: float) -> str:
    """What has happened between two LLM.stats(), in a line."""
    num_in, num_out = (now[name] - before[name] for name in ("num_prefill_tokens", "num_output_tokens"))
    queries, hits = (now["prefix_cache"][name] - before["prefix_cache"][name] for name in ("queries", "hits"))
    return (
        f"{now['num_running']} running, {now['num_waiting']} waiting; prompts {num_in / seconds:,.0f} tokens/s, "
        f"output {num_out / seconds:,.0f} tokens/s; KV cache {now['kv_pool']['usage']:.1%} in use, "
        f"prefix cache hits {hits / max(queries, 1):.1%}"
    )
