"""What a directory of cached prefixes holds: the report of `nanovllm cache`, and how it is made smaller."""

import json
import time
from collections import defaultdict
from contextlib import suppress
from numbers import Integral
from pathlib import Path

from rich.table import Table

from nanovllm.checks.values import check_number, shorten, size_of
from nanovllm.core.tiers.store import STATE
from nanovllm.features.tiers.directory import CacheDirectory, bytes_of, last_use, prepared, segments_in
from nanovllm.features.tiers.segment import HASH_BYTES, space_of
from nanovllm.tools.screen import Screen


def run_cache(path: str, prune: str | None, clear: bool) -> int:
    """prune: bytes that may stay, or text like "2G". clear: nothing stays."""
    if not Path(path).expanduser().is_dir():
        raise FileNotFoundError(f"{shorten(path)} is not a directory; --prefix-cache-dir names one, and makes it")
    limit = None if prune is None else check_number("--prune", size_of("--prune", prune), Integral, 0)
    directory = CacheDirectory(prepared(path), num_bytes=0, is_writable=clear or limit is not None)
    try:
        if clear:
            directory.clear()
            print("It is empty.")
            return 0
        if limit is not None:
            print(f"{directory.prune(limit):,} records removed, the least recently used ones.")
        draw(directory)
        return 0
    finally:
        directory.close()


def draw(directory: CacheDirectory) -> None:
    table = Table(title=str(directory.path), title_justify="left")
    for column in ("model", "what", "records", "size", "last used"):
        table.add_column(column, justify="left" if column in ("model", "what") else "right")
    by_space = defaultdict(list)
    for path in segments_in(directory.path):
        if (space := space_of(path)) is not None and last_use(path) > 0:  # with a list: others are read by nobody
            by_space[space].append(path)
    for space, paths in by_space.items():
        about = {"model": "?", "numbers": []}
        with suppress(ValueError):
            about |= json.loads(space.about)
        what = "states" if space.kind == STATE else f"blocks of {space.num_tokens} tokens"
        name = " ".join([str(about["model"]), *map(str, about["numbers"])])
        num_records = sum(bytes_of(path.with_suffix(".idx")) for path in paths) // HASH_BYTES
        size = f"{sum(map(bytes_of, paths)) / 1e6:,.1f} MB"
        table.add_row(name, what, f"{num_records:,}", size, ago(time.time() - max(map(last_use, paths)) / 1e9))
    Screen().print(table)
    total = f"{directory.used_bytes() / 1e6:,.1f} MB"
    print(f"{total} in all. --prune SIZE keeps what was used last, --clear nothing.")


def ago(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (number := int(seconds // length)) > 0:
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"
