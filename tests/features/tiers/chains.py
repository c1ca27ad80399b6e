"""Records whose data follows from their name: what is read back can be computed anew."""

import hashlib
import random

import numpy as np

from nanovllm.core.tiers.names import NO_EXTRA, TierNames
from nanovllm.core.tiers.store import Record
from nanovllm.features.tiers.segment import Space

NAMES = TierNames(b"a model")
TOKENS, DATA = 4, 1000  # of a block
SPACE = Space("ab" * 16, 0, TOKENS, DATA, '{"model": "a model"}')
OTHER = Space("cd" * 16, 0, TOKENS, 3 * DATA, "another model")


def chain(*token_ids: int, names: TierNames = NAMES) -> list[Record]:
    """A record for each number: a block of tokens that are all this number."""
    records: list[Record] = []
    for token_id in token_ids:
        parent = records[-1].name if records else None
        block = [token_id] * TOKENS
        records.append(Record(names.name(parent, block, NO_EXTRA), parent, block, NO_EXTRA, len(records)))
    return records


def data_of(record: Record, num_bytes: int = DATA) -> np.ndarray:
    """What its data must be."""
    seed = int.from_bytes(hashlib.sha256(record.name).digest()[:8], "little")
    return np.frombuffer(random.Random(seed).randbytes(num_bytes), np.uint8)


def items(records: list[Record], num_bytes: int = DATA) -> list:
    return [(record, data_of(record, num_bytes)) for record in records]


def check_read(directory, records: list[Record], num_bytes: int = DATA) -> int:
    """What is read is right. How many of them were there."""
    found = directory.read(records)
    for record, data in zip(records, found, strict=False):
        assert data.tobytes() == data_of(record, num_bytes).tobytes(), "wrong data"
    return len(found)
