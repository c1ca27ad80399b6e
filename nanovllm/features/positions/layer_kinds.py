"""What differs from layer to layer, read from config.json (chapter 1): which keys a layer sees, and what it rotates.

Fields that are not there mean what they mean to transformers (DEFAULTS in files/config_json.py).
"""

from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_choice, check_number, shorten, typed

SAY_SO = [f"{name}ForCausalLM" for name in ("Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3")]  # whether the window is used
IN_EVERY_LAYER = ("MistralForCausalLM", "Qwen3MoeForCausalLM")  # if there is a window at all
FULL, SLIDING = "full_attention", "sliding_attention"
MAX_WINDOW = 2**24


def read_layer_kinds(config: dict[str, Any], architecture: str, num_layers: int, path: Path) -> dict[str, Any]:
    """windows and layers_without_rotary of ModelConfig. Raises ValueError for what would be computed wrongly."""
    without_rotary: frozenset[int] = frozenset()
    if architecture == "SmolLM3ForCausalLM":
        without_rotary = _layers_without_rotary(config, num_layers, path)
    window = _window(config, architecture, path)
    slides = [False] * num_layers  # where layer_types does not say it
    if window is not None and architecture in IN_EVERY_LAYER:
        slides = [True] * num_layers
    elif window is not None and architecture == "SmolLM3ForCausalLM":
        slides = [i in without_rotary for i in range(num_layers)]
    elif window is not None:
        first = check_number(f"{path}: max_window_layers", config.get("max_window_layers", 28), Integral, 0)
        slides = [i >= first for i in range(num_layers)]
    kinds = typed(config, "layer_types", [SLIDING if x else FULL for x in slides], path)
    if len(kinds) != num_layers:
        raise ValueError(f"{path}: layer_types must name the attention of {num_layers} layers, found {len(kinds)}")
    for i, kind in enumerate(kinds):
        check_choice(f"{path}: layer_types[{i}]", kind, (FULL, SLIDING))
    if SLIDING in kinds and window is None:
        raise ValueError(
            f"{path}: layer_types has {SLIDING}, and no window is used: sliding_window must be a number of tokens, and "
            "use_sliding_window true where the architecture has it"
        )
    if architecture in IN_EVERY_LAYER and [kind == SLIDING for kind in kinds] != slides:
        raise ValueError(
            f"{path}: layer_types differs from sliding_window, which in a {architecture} holds for every layer; take "
            'one of them away: hf_overrides={"layer_types": None} or {"sliding_window": None, "layer_types": None}'
        )
    windows = {i: window for i, kind in enumerate(kinds) if kind == SLIDING}
    return {"windows": windows, "layers_without_rotary": without_rotary}


def _window(config: dict[str, Any], architecture: str, path: Path) -> int | None:
    """Of the layers that have one. Qwen and SmolLM3 give a size and say beside it whether it is used."""
    says_so = architecture in SAY_SO
    is_mistral = architecture == "MistralForCausalLM"  # whose own code does not know the field that says it
    is_used = is_mistral or typed(config, "use_sliding_window", not says_so, path)
    if not is_used or "sliding_window" not in config:
        return None
    window = config["sliding_window"]
    if not says_so and not is_mistral:
        found = f"sliding_window is {shorten(window)}, and a {architecture} sees all tokens in every layer"
        raise ValueError(f'{path}: {found}; if that is meant, hf_overrides={{"sliding_window": None}}')
    return check_number(f"{path}: sliding_window", window, Integral, 1, MAX_WINDOW)


def _layers_without_rotary(config: dict[str, Any], num_layers: int, path: Path) -> frozenset[int]:
    """Those listed with a 0, or every fourth one."""
    interval = check_number(f"{path}: no_rope_layer_interval", config.get("no_rope_layer_interval", 4), Integral, 1)
    listed = typed(config, "no_rope_layers", [int((i + 1) % interval != 0) for i in range(num_layers)], path)
    if len(listed) < num_layers or any(x not in (0, 1) for x in listed):
        raise ValueError(
            f"{path}: no_rope_layers must have a 1 (rotary embedding) or a 0 (none) for each of {num_layers} layers, "
            f"found {len(listed)}: {shorten(listed)}"
        )
    return frozenset(i for i in range(num_layers) if not listed[i])
