"""Public request logs in this folder's columns:  python -m chapters.data.convert azure FILE OUT

azure: the CSV files of Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens).
mooncake: the lines of Mooncake's traces (JSON: timestamp in ms, input_length, output_length, hash_ids of 512 tokens).
"""

import argparse
import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from chapters.data.make import Request, write

BLOCK = 512  # tokens that one of Mooncake's hash_ids stands for
MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?")  # UTC, with more digits than datetime reads


def azure(path: Path) -> Iterator[Request]:
    """They say nothing of what prompts have in common. Raises ValueError and KeyError for other files."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = list(csv.DictReader(file))
    moments = [seconds_of(line["TIMESTAMP"]) for line in lines]
    for moment, line in zip(moments, lines, strict=True):
        yield Request(moment - min(moments), int(line["ContextTokens"]), int(line["GeneratedTokens"]))


def seconds_of(text: str) -> float:
    match = MOMENT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no moment like 2024-05-10 00:00:00.0099")
    return datetime.fromisoformat(f"{match[1]} {match[2]}+00:00").timestamp() + float(match[3] or 0)


def mooncake(path: Path) -> Iterator[Request]:
    """A hash_id stands for a block of a prompt and all before it, so two prompts with the same one begin alike.

    Blocks that more than one prompt has form a tree. A line of ours has one prefix_id, so the tree is cut into ways:
    at a fork, the block that most prompts have goes on with its parent's way, and each other one begins a new way.
    What a prompt has in common with those on another way is lost.
    """
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    uses = Counter(block for line in lines for block in line["hash_ids"])
    ways = ways_of(lines, uses)
    first = min((line["timestamp"] for line in lines), default=0)
    for line in lines:
        shared = [block for block in line["hash_ids"] if uses[block] > 1]
        prefix = (f"text{ways[shared[-1]]}", min(BLOCK * len(shared), line["input_length"])) if shared else ("", 0)
        yield Request((line["timestamp"] - first) / 1000, line["input_length"], line["output_length"], *prefix)


def ways_of(lines: list[dict[str, Any]], uses: Counter[int]) -> dict[int, int]:
    """The way of each block, named by its first block."""
    ways: dict[int, int] = {}
    went_on: set[int | None] = {None}  # blocks after which their way goes on
    chains = sorted((line["hash_ids"] for line in lines), key=lambda chain: [-uses[block] for block in chain])
    for chain in chains:
        way = chain[0] if chain else 0
        for at, block in enumerate(chain):
            parent = chain[at - 1] if at else None
            if block in ways:
                way = ways[block]
                continue
            if parent in went_on:
                way = block
            went_on.add(parent)
            ways[block] = way
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chapters.data.convert", description=__doc__)
    parser.add_argument("kind", choices=("azure", "mooncake"))
    parser.add_argument("file", type=Path, help="the public log")
    parser.add_argument("out", type=Path, help="the CSV file to write")
    args = parser.parse_args()
    try:
        write({"azure": azure, "mooncake": mooncake}[args.kind](args.file), args.out)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{args.file}: {error}")


if __name__ == "__main__":
    main()
