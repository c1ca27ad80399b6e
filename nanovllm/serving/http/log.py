"""A line of the log that repeats is written once a minute, with the number of those that were not."""

import logging
import time

PAUSE_S = 60.0
MAX_LINES = 1000  # different ones that are remembered
LOGGERS = ("asyncio", "uvicorn.error", "nanovllm")


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
