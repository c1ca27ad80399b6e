"""Traces: who comes when, with how many tokens. A CSV file, or drawn from a seed.

Columns: arrival_s, prompt_tokens, output_tokens, prefix_id, prefix_tokens, and, if it likes, request_id; others are
left alone. The first prefix_tokens of a prompt are the same in all prompts of that prefix_id (empty: prefix_tokens is
0); the rest is like no other.
"""

import csv
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "prefix_id", "prefix_tokens")
SECONDS, RATE = 60.0, 7.0  # of a drawn trace: its length, and events a second; a chat or a document is one event
QUIET, RUSH = 0.5, 2.0  # multiples of the rate
NUM_APPS = 12
MOST_TOKENS, MOST_REQUESTS = 1_000_000, 1_000_000


class Row(NamedTuple):
    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: str
    prefix_tokens: int


def read_trace(path: Path) -> list[Row]:
    """In the order of arrival. Raises ValueError, with the line, for what is no trace."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (lines.fieldnames or [])]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; a trace has {', '.join(COLUMNS)}")
        try:
            rows = [_row(line, number) for number, line in enumerate(lines)]
        except (ValueError, TypeError, csv.Error) as error:
            raise ValueError(f"{path}, line {lines.line_num}: {error}") from None
    if not 0 < len(rows) <= MOST_REQUESTS:
        raise ValueError(f"a trace has 1 to {MOST_REQUESTS:,} requests, {path} has {len(rows):,}")
    return sorted(rows, key=lambda row: row.arrival_s)


def _row(line: dict[str, str], number: int) -> Row:
    prompt_tokens, output_tokens, prefix_tokens = (
        int(line[name] or 0) for name in ("prompt_tokens", "output_tokens", "prefix_tokens")
    )
    name, arrival_s = line.get("request_id") or str(number), float(line["arrival_s"])
    row = Row(name, arrival_s, prompt_tokens, output_tokens, line["prefix_id"] or "", prefix_tokens)
    if not 0 <= row.arrival_s < math.inf:
        raise ValueError(f"arrival_s is a number of seconds from 0 on, found {row.arrival_s}")
    if not (0 < row.prompt_tokens <= MOST_TOKENS and 0 < row.output_tokens <= MOST_TOKENS):
        raise ValueError(f"a prompt and an answer have 1 to {MOST_TOKENS:,} tokens each, found {row[2:4]}")
    if not 0 <= row.prefix_tokens <= row.prompt_tokens:
        raise ValueError(f"prefix_tokens are some of the prompt's {row.prompt_tokens}, found {row.prefix_tokens}")
    if row.prefix_tokens and not row.prefix_id:
        raise ValueError(f"prefix_tokens are those of a prefix_id, found {row.prefix_tokens} and no prefix_id")
    return row


def write_trace(rows: Iterable[Row], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("request_id", *COLUMNS))
        lines.writerows((row.request_id, f"{row.arrival_s:.3f}", *row[2:]) for row in rows)


class App(NamedTuple):
    """A program whose requests begin alike. own, output: the usual number of tokens of a question, and of an answer."""

    name: str
    prefix_tokens: int
    own: float
    output: float


def draw_trace(seed: int, seconds: float = SECONDS, rate: float = RATE) -> list[Row]:
    """Apps, documents, chats and letters, whose mix, lengths and rush hours depend on the seed."""
    rng = random.Random(f"trace {seed}")
    tag = f"{rng.randrange(10**9)}"  # names of this trace only: what one has learnt of another's says nothing
    rushes = _draw_rushes(rng, seconds)
    apps = [_draw_app(rng, f"app {i} {tag}", is_writer=i % 3 == 0) for i in range(NUM_APPS)]
    popularity = [rng.uniform(0.5, 1.5) for _ in apps]
    kinds = {"app": 0.8, "document": 0.05, "chat": 0.07, "letter": 0.08}
    weights = [share * rng.uniform(0.7, 1.3) for share in kinds.values()]
    rows: list[Row] = []
    number = 0
    now = 0.0
    while (now := now + rng.expovariate(RUSH * rate)) < seconds:
        is_rush = any(start <= now < end for start, end in rushes)
        if not is_rush and rng.random() > QUIET / RUSH:
            continue
        [kind] = rng.choices([*kinds], weights)
        number += 1
        name = f"{number} {tag}"
        if kind == "app":
            [app] = rng.choices(apps, popularity)
            prompt_tokens = app.prefix_tokens + _around(rng, app.own)
            rows.append(Row(name, now, prompt_tokens, _around(rng, app.output), app.name, app.prefix_tokens))
        elif kind == "document":
            rows += _document(rng, name, now)
        elif kind == "chat":
            rows += _chat(rng, name, now)
        else:
            rows.append(Row(name, now, _around(rng, 100), _around(rng, 250), "", 0))
    return sorted((row for row in rows if row.arrival_s < seconds), key=lambda row: row.arrival_s)


def _draw_app(rng: random.Random, name: str, is_writer: bool) -> App:
    """Of a writer one asks little, and it answers at length."""
    if is_writer:
        return App(name, round(_between(rng, 64, 200)), _between(rng, 30, 80), _between(rng, 300, 1000))
    return App(name, round(_between(rng, 100, 2000)), _between(rng, 40, 500), _between(rng, 12, 200))


def _draw_rushes(rng: random.Random, seconds: float) -> list[tuple[float, float]]:
    """(start, end) of the rush hours."""
    rushes = []
    now = rng.uniform(1.0, 6.0)
    while now < seconds:
        end = now + rng.uniform(4.0, 10.0)
        rushes.append((now, end))
        now = end + rng.uniform(4.0, 10.0)
    return rushes


def _between(rng: random.Random, low: float, high: float) -> float:
    """As often below the geometric mean of the two as above it."""
    return low * (high / low) ** rng.random()


def _around(rng: random.Random, usual: float) -> int:
    """Half as many to twice as many."""
    return round(_between(rng, usual / 2, usual * 2))


def _document(rng: random.Random, name: str, now: float) -> list[Row]:
    """It is asked about a few times, and never again."""
    length = rng.randrange(1200, 4000)
    rows = []
    for i in range(rng.randint(1, 4)):
        rows.append(
            Row(f"{name} {i}", now, length + rng.randint(20, 80), rng.randint(20, 120), f"document {name}", length)
        )
        now += rng.uniform(1.0, 5.0)
    return rows


def _chat(rng: random.Random, name: str, now: float) -> list[Row]:
    """Each turn's prompt is the whole conversation so far."""
    length = 0
    rows = []
    for i in range(rng.randint(2, 7)):
        length += rng.randint(60, 400)
        output = _around(rng, 120)
        rows.append(Row(f"{name} {i}", now, length, output, f"chat {name}", length))
        length += output
        now += output * 0.02 + rng.uniform(2.0, 8.0)
    return rows
