"""Adapters on the linear layers of a hybrid model: under a checkpoint's names, and under this engine's (chapter 16)."""

from typing import Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.hybrid.tensors import projection_rows

Shape = tuple[int, int]
MERGED = {True: ("in_proj_qkvz", "in_proj_ba"), False: ("in_proj_qkv",)}  # in a checkpoint: of Qwen3-Next, of others


def attention_shapes(config: ModelConfig, index: int) -> dict[str, Shape]:
    """{name of a linear layer of this engine's, in the attention half of a layer: (out, in)}."""
    sizes, hidden = config.hybrid, config.hidden_size
    if index not in sizes.linear_layers:
        return {"q_proj": (2 * config.num_attention_heads * config.head_dim, hidden)}
    widths = {"q": sizes.key_size, "k": sizes.key_size, "v": sizes.value_size, "z": sizes.value_size}
    widths |= dict.fromkeys("ba", sizes.num_value_heads)
    return {f"in_proj_{x}": (width, hidden) for x, width in widths.items()} | {"out_proj": (hidden, sizes.value_size)}


def stored_shapes(shapes: dict[str, Shape], config: ModelConfig) -> dict[str, Shape]:
    """shapes: of this engine's layers by path. The same as a checkpoint has them."""
    stored = dict(shapes)
    for i in config.hybrid.linear_layers:
        path = f"model.layers.{i}"
        ours = {name: stored.pop(name) for name in shapes if name.startswith(f"{path}.self_attn.")}
        stored |= {name.replace(".self_attn.", ".linear_attn."): shape for name, shape in ours.items()}
        for module in MERGED[config.architecture.startswith("Qwen3Next")]:
            parts = [f"{path}.linear_attn.{part}" for part in projection_rows(module, config.hybrid)]
            sizes = [stored.pop(part) for part in parts]
            stored[f"{path}.linear_attn.{module}"] = sum(out for out, _ in sizes), sizes[0][1]
    return stored


def split_matrices(matrices: dict[str, tuple[Any, Any]], config: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """An adapter's A and B by the checkpoint's paths -> by this engine's: parts of one projection share A."""
    found = dict[str, tuple[Any, Any]]()
    for stored, (a, b) in matrices.items():
        path, _, module = stored.replace(".linear_attn.", ".self_attn.").rpartition(".")
        if module.startswith("in_proj") and module in sum(MERGED.values(), ()):
            rows = projection_rows(module, config.hybrid)
            found |= {f"{path}.{part}": (a, b[order]) for part, order in rows.items()}
        else:
            found[f"{path}.{module}" if path else module] = a, b
    return found
