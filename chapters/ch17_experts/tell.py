"""What the lab of chapter 17 tells: who is visited, what a grouped product saves, memory and time of a large model."""

import random
import tempfile
from pathlib import Path

import torch

from chapters.ch17_experts import large
from chapters.ch17_experts.sparse import KINDS, text_of
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.quantization.formats import BYTES_PER_NUMBER

TEXT_LEN = 240
NUMS_RANKS = (2, 4, 8)
READ_RATE = 100e9  # bytes a second that a laptop reads from memory
BYTES = {"bf16": 2.0, "int8": BYTES_PER_NUMBER["Q8_0"], "int4": BYTES_PER_NUMBER["int4"]}


def texts_of_all_kinds(length: int = TEXT_LEN) -> dict[str, str]:
    rng = random.Random(1)
    return {kind: text_of(kind, length, rng) for kind in KINDS}


def top_two(shares: torch.Tensor) -> float:
    """The share of all choices that the two most popular experts get together. shares: [num_experts]."""
    return float(shares.topk(2).values.sum())


def rows_of(letters: str) -> dict[str, list[int]]:
    """The rows of digits, letters, spaces and of what is left."""
    kinds = {"digits": str.isdigit, "letters": str.isalpha, "spaces": str.isspace}
    found = {name: [i for i, letter in enumerate(letters) if is_kind(letter)] for name, is_kind in kinds.items()}
    return found | {"signs": sorted(set(range(len(letters))) - {i for rows in found.values() for i in rows})}


def large_config() -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(large.QWEN3_30B_A3B, "utf-8")
        return ModelConfig.from_directory(Path(folder))
