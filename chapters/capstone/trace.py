"""Traces: who comes when, with how many tokens. A CSV file, or drawn from a seed.

Columns: arrival_s, prompt_tokens, output_tokens, prefix_id, prefix_tokens, and, if it likes, request_id; others are
left alone. The first prefix_tokens of a prompt are the same in all prompts of that prefix_id (empty: none); the rest is
like no other.
"""

import csv
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "prefix_id", "prefix_tokens")
SECONDS, RATE = 60.0, 5.0  # of a drawn trace: its length, and requests a second in the mean
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
    row = Row(name, arrival_s, prompt_tokens, output_tokens, line["prefix_id"], prefix_tokens)
    if not 0 <= row.arrival_s < math.inf:
        raise ValueError(f"arrival_s is a number of seconds from 0 on, found {row.arrival_s}")
    if not (0 < row.prompt_tokens <= MOST_TOKENS and 0 < row.output_tokens <= MOST_TOKENS):
        raise ValueError(f"a prompt and an answer have 1 to {MOST_TOKENS:,} tokens each, found {row[2:4]}")
    if not 0 <= row.prefix_tokens <= row.prompt_tokens:
        raise ValueError(f"prefix_tokens are some of the prompt's {row.prompt_tokens}, found {row.prefix_tokens}")
    return row


def write_trace(rows: Iterable[Row], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("request_id", *COLUMNS))
        lines.writerows((row.request_id, f"{row.arrival_s:.3f}", *row[2:]) for row in rows)


def draw_trace(seed: int, seconds: float = SECONDS, rate: float = RATE) -> list[Row]:
    """Four kinds of requests, whose mix, prefixes and rush hours depend on the seed."""
    rng = random.Random(f"trace {seed}")
    tag = f"{rng.randrange(10**9)}"  # names of this trace only: what one has learnt of another's says nothing
    phase, peaks = rng.random(), [(rng.uniform(0.1, 0.9) * seconds, rng.uniform(2, 5)) for _ in range(2)]
    kinds = {"assistant": 0.45, "document": 0.2, "code": 0.2, "letter": 0.15}
    weights = [share * rng.uniform(0.7, 1.3) for share in kinds.values()]
    prompts = [rng.randrange(500, 1500) for _ in range(6)]  # tokens of the assistants' common beginnings
    documents: list[tuple[str, int]] = []
    rows: list[Row] = []
    now = 0.0
    while (now := now + rng.expovariate(4 * rate)) < seconds:
        load = 1 + 0.5 * math.sin(2 * math.pi * (2 * now / seconds + phase))
        load += sum(1.5 for start, length in peaks if start <= now < start + length)
        if rng.random() > load / 4:
            continue
        [kind] = rng.choices([*kinds], weights)
        prefix, shared = "", 0
        if kind == "assistant":
            [number] = rng.choices(range(len(prompts)), [1 / k for k in range(1, len(prompts) + 1)])
            prefix, shared, own, output = f"assistant {number} {tag}", prompts[number], (20, 300), (40, 300)
        elif kind == "document":
            if not documents or rng.random() < 0.4:
                documents.append((f"document {len(documents)} {tag}", rng.randrange(1500, 5000)))
            (prefix, shared), own, output = rng.choice(documents[-3:]), (20, 80), (20, 120)
        elif kind == "code":
            prefix, shared, own, output = f"code {tag}", 320, (100, 800), (16, 80)
        else:
            own, output = (30, 300), (150, 500)
        num_own, num_output = rng.randint(*own), rng.randint(*output)
        rows.append(Row(f"{len(rows)} {tag}", now, shared + num_own, num_output, prefix, shared))
    return rows
