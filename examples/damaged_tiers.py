"""Records whose data follows from their hash, and what may happen to a directory of them: part 4 of bench_tiers.py.

The tests of the tiers use them, too (tests/features/tiers).
"""

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.tiers.store import NO_EXTRA, Record
from nanovllm.features.tiers import segment
from nanovllm.features.tiers.directory import CacheDirectory, prepared
from nanovllm.features.tiers.segment import Space

SPACE = Space("ab" * 16, 0, 4, 1000, '{"model": "a model"}')


class WrongData(Exception):
    """What was read is not what was written."""


def chain(*token_ids: int, block_size: int = 4) -> list[Record]:
    """A record for each number: a block of tokens, all with this number."""
    hasher, records = BlockHasher(block_size, "sha256"), list[Record]()
    for token_id in token_ids:
        parent_hash = records[-1].block_hash if records else None
        tokens = [token_id] * block_size
        records.append(Record(hasher.hash_block(parent_hash, tokens), parent_hash, tokens, NO_EXTRA))
    return records


def data_of(record: Record, num_bytes: int = 1000) -> np.ndarray:
    """What computing this block would give, in a world where K/V follows from the hash."""
    seed = int.from_bytes(record.block_hash, "little")
    return np.frombuffer(random.Random(seed).randbytes(num_bytes), np.uint8)


def with_data(records: list[Record], num_bytes: int = 1000) -> list[tuple[Record, np.ndarray]]:
    return [(record, data_of(record, num_bytes)) for record in records]


def check_read(directory: CacheDirectory, records: list[Record], num_bytes: int = 1000) -> int:
    """Read records. Returns how many were there. Raises WrongData."""
    found = directory.read(records)
    for record, data in zip(records, found, strict=False):
        if data.tobytes() != data_of(record, num_bytes).tobytes():
            raise WrongData(f"block {record.block_hash.hex()} has been read, and its data is another")
    return len(found)


def opened(path: Path, num_bytes: int, space: Space = SPACE) -> CacheDirectory:
    directory = CacheDirectory(prepared(path), num_bytes)
    directory.use([space])
    return directory


def some_chain(rng: random.Random) -> list[Record]:
    """One of 6 * 3^7 and their beginnings."""
    return chain(rng.randrange(6), *(rng.randrange(3) for _ in range(rng.randrange(8))))


def kills(number: int, path: Path, num_bytes: int = 600_000) -> Iterator[int]:
    """Processes that write in small steps and die at one of them. Yields how many right records each has left."""
    if sys.platform == "win32":
        raise SystemExit("part 4 forks processes and kills them: Linux or macOS; name other --parts")
    else:
        for seed in range(number):
            if (pid := os.fork()) == 0:
                try:
                    write_and_die(random.Random(seed), path, num_bytes)
                finally:
                    os._exit(1)
            _, status = os.waitpid(pid, 0)
            if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                raise RuntimeError(f"process {seed} has ended before it was killed, status {status}")
            directory = opened(path, num_bytes)
            rng = random.Random(seed)
            yield sum(check_read(directory, some_chain(rng)) for _ in range(20))
            directory.close()


def write_and_die(rng: random.Random, path: Path, num_bytes: int) -> None:
    steps_left, write_all = rng.randrange(1, 120), segment._write_all

    class InSteps:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: memoryview) -> int:
            nonlocal steps_left
            steps_left -= 1
            if steps_left <= 0:
                os.kill(os.getpid(), 9)
            return self.file.write(data[:300])

    segment._write_all = lambda file, data: write_all(InSteps(file), data)
    directory = opened(path, num_bytes)
    while True:
        directory.put(with_data(some_chain(rng)))


def damages(number: int, path: Path, num_bytes: int = 600_000, seed: int = 0) -> Iterator[int]:
    """Bytes changed, ends cut off and parts cleared, in every file, open and closed. Yields records read."""
    rng, directory = random.Random(seed), opened(path, num_bytes)
    for _ in range(number):
        directory.put(with_data(some_chain(rng)))
        is_open = rng.random() < 0.5
        if not is_open:
            directory.close()
        damage(rng, rng.choice([file for file in path.iterdir() if file.stat().st_size]))
        if not is_open:
            directory = opened(path, num_bytes)
        yield sum(check_read(directory, some_chain(rng)) for _ in range(4))
    directory.close()


def damage(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    where = rng.randrange(len(data))
    match rng.randrange(3):
        case 0:
            for _ in range(rng.randrange(1, 20)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            del data[where:]
        case _:
            data[where : where + 500] = bytes(len(data[where : where + 500]))
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate(len(data))
