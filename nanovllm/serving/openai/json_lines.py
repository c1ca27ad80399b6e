"""Lines of JSON: a file of requests in, records out, and what may happen to a line on the way.

Whatever a line does to us is said in its record, or beside its number: explain() is the one place that decides what
counts as that. Only what ends the whole job goes on as an exception.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 16_000_000
MAX_NESTING = 100  # levels of a line
MAX_MESSAGE_CHARS = 2_000  # an error may quote what it found, and that may be megabytes
LEAST_LOGPROB = -9999.0  # OpenAI's and vLLM's "never"; JSON has no infinity
ENDS_THE_JOB = (KeyboardInterrupt, SystemExit, GeneratorExit)  # never a line's doing


def explain(error: BaseException) -> str:
    """The reason that a line's record gives. Raises the error if it is not about a line.

    BaseException, because a panic in a tokenizer's Rust code is one (pyo3's PanicException).
    """
    if isinstance(error, ENDS_THE_JOB):
        raise error
    try:
        text = str(error)
    except Exception:  # it tries to quote what cannot be quoted
        text = ""
    if not text or not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text or 'no reason given'}"
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."


def read_lines(path: Path, offset: int = 0, number: int = 0) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of each line that is not blank; the first has number + 1 and begins at the offset.

    A line that is too long to be a request is cut short. Raises ValueError for a file in UTF-16 or UTF-32.
    """
    with path.open("rb") as file:
        beginning = file.read(64)
        encoding = json.detect_encoding(beginning)
        if not encoding.startswith("utf-8") and b"\0" in beginning:
            name = encoding.upper()
            raise ValueError(f"{path} is {name} text; convert it:  iconv -f {name} -t UTF-8 {path.name} > utf-8.jsonl")
        file.seek(offset)
        while raw := file.readline(MAX_LINE_BYTES):
            number += 1
            if raw.strip():
                yield number, raw
            while len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE_BYTES)


def parse_json(raw: bytes, what: str = "the body") -> dict[str, Any]:
    """Raises ValueError about `what`, also if it is nested so deeply that it could be read here and written nowhere."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, found {type(value).__name__}")
    if raw.count(b"{") + raw.count(b"[") > MAX_NESTING and _is_deeper(value, MAX_NESTING):
        raise ValueError(f"{what} may have {MAX_NESTING} levels of objects and lists, found more")
    return value


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in inside if isinstance(inner, dict | list)]
    return bool(level)


def to_json(record: dict[str, Any]) -> str:
    """A record as a line of JSON, which has neither infinities nor NaN: LEAST_LOGPROB and null stand for them.

    ASCII: an id may have a lone surrogate, a text a line separator that some readers take for an end of line.
    """
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return LEAST_LOGPROB if value == -math.inf else None
    return value
