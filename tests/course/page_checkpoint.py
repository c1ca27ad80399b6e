"""A tiny checkpoint that a page's model can be made of."""

from pathlib import Path
from typing import Any

import gguf

from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf

SIZES = dict(hidden_size=96, head_dim=64, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True)


def make_page_checkpoint(folder: Path) -> Path:
    """A GGUF file with the demo model's heads and formats."""
    make_checkpoint(folder / "checkpoint", "llama", max_position_embeddings=1024, **SIZES)
    return write_gguf(folder / "checkpoint", folder / "tiny.gguf", quantize)


def quantize(name: str, weight: Any) -> tuple[Any, str]:
    """As in the demo model's file: the table has 8 bits, all other matrices 4."""
    kind = "F32" if weight.ndim == 1 else "Q8_0" if "embed_tokens" in name else "Q4_1"
    return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind]), kind
