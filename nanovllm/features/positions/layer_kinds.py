"""What differs from layer to layer (chapter 1): which keys a layer sees, and what it rotates."""

from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_choice, check_number, shorten

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_WINDOW = 2**24


def read_layer_kinds(text: Any, path: Path) -> dict[str, Any]:
    """windows and layers_without_rotary of ModelConfig. text: transformers' configuration of the language model.

    Raises ValueError for what would be computed wrongly.
    """
    num_layers = text.num_hidden_layers
    window = text.sliding_window
    if window is not None:
        check_number(f"{path}: sliding_window", window, Integral, 1, MAX_WINDOW)
    kinds = getattr(text, "layer_types", None)
    if kinds is None or text.model_type == "qwen3_moe":  # a window holds for every layer
        kinds = [FULL if window is None else SLIDING] * num_layers
    for i, kind in enumerate(kinds):
        check_choice(f"{path}: layer_types[{i}]", kind, (FULL, SLIDING))
    if SLIDING in kinds and window is None:
        raise ValueError(
            f"{path}: layer_types has {SLIDING}, and no window is used: sliding_window must be a number of tokens, and "
            "use_sliding_window true where the architecture has it"
        )
    windows = {i: window for i, kind in enumerate(kinds) if kind == SLIDING}
    return {"windows": windows, "layers_without_rotary": _layers_without_rotary(text, num_layers, path)}


def _layers_without_rotary(text: Any, num_layers: int, path: Path) -> frozenset[int]:
    """Those that SmolLM3 lists with a 0."""
    if text.model_type != "smollm3":
        return frozenset()
    listed = text.no_rope_layers
    if len(listed) < num_layers or any(x not in (0, 1) for x in listed):
        raise ValueError(
            f"{path}: no_rope_layers must have a 1 (rotary embedding) or a 0 (none) for each of {num_layers} layers, "
            f"found {len(listed)}: {shorten(listed)}"
        )
    return frozenset(i for i in range(num_layers) if not listed[i])
