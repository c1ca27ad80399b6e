"""The tensors of a hybrid checkpoint under this engine's names, each a part of what the files hold (chapter 16).

What is merged there and not here: q, k and v of one projection. What lies in another order: Qwen3-Next's projections
go key head by key head; in GGUF files neighbours among the value heads belong to different key heads (llama.cpp's graph
repeats the keys that way). GGUF files also hold norms plus 1, and -exp(A_log).
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.hybrid.hybrid_config import HybridConfig
from nanovllm.files.tensor_parts import Part, check_size

logger = logging.getLogger("nanovllm")

HEADS = "heads that predict several tokens at once"
SKIPPED = {  # what the text of one token after another does not need: what it is, and how its names look
    "the vision tower": re.compile(r"(model\.)?visual\.|v\.|mm\."),
    HEADS: re.compile(r"mtp\.|.*\.nextn\."),
}


def hybrid_tensors(files: Mapping[str, Any], config: ModelConfig, is_gguf: bool) -> dict[str, Any]:
    """{name of a parameter of Decoder: what it is read from}. A name that nobody knows stays as it is."""
    found, skipped = dict[str, Any](), set[str]()
    for stored, file in files.items():
        name = stored.replace("model.language_model.", "model.").replace(".linear_attn.", ".self_attn.")
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= config.num_hidden_layers:  # in GGUF files they come after the model's own
            skipped.add(HEADS)
        elif what := next((what for what, pattern in SKIPPED.items() if pattern.match(name)), None):
            skipped.add(what)
        else:
            found |= parts_of(name, Part(file, stored), config, is_gguf)
    for what in sorted(skipped):
        logger.info("The checkpoint has tensors of %s, which this engine does not use", what)
    return found


def parts_of(name: str, whole: Part, config: ModelConfig, is_gguf: bool) -> dict[str, Part]:
    """A stored tensor as the parameters that are made of it."""
    sizes: HybridConfig = config.hybrid
    path, _, kind = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    if is_gguf:
        whole = undo_gguf(whole, module, kind, config)
        for axis, order in enumerate((whole.rows, whole.columns)):
            if order is not None:
                check_size(whole, axis, len(order))
    if module in PROJECTIONS and kind in ("weight", "bias"):  # and not scales of activations, which are not used
        rows = projection_rows(module, sizes)
        check_size(whole, 0, sum(map(len, rows.values())))
        if module == "conv1d" and len(whole.stored_shape()) == 3:
            check_size(whole, whole.unused_axis, 1)
        if is_gguf and whole.rows is not None:
            rows = {part: whole.rows[order] for part, order in rows.items()}
        return {f"{parent}.{part}.{kind}": replace(whole, rows=order) for part, order in rows.items()}
    return {name: whole}


PROJECTIONS = ("in_proj_qkv", "in_proj_qkvz", "in_proj_ba", "conv1d")


def projection_rows(module: str, sizes: HybridConfig) -> dict[str, Tensor]:
    """{a part of a projection: its rows in the checkpoint}."""
    key_heads, group = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    prefix = "conv" if module == "conv1d" else "in_proj"
    if module in ("in_proj_qkv", "conv1d"):
        widths = {"q": sizes.key_size, "k": sizes.key_size, "v": sizes.value_size}
        parts = torch.arange(sizes.conv_size, device="cpu").split(list(widths.values()))
        return {f"{prefix}_{x}": rows for x, rows in zip(widths, parts, strict=True)}
    by_head = {"b": group, "a": group}
    if module == "in_proj_qkvz":
        by_head = {"q": sizes.key_dim, "k": sizes.key_dim} | dict.fromkeys("vz", group * sizes.value_dim)
    rows = torch.arange(key_heads * sum(by_head.values()), device="cpu").view(key_heads, -1)
    parts = rows.split(list(by_head.values()), dim=1)
    return {f"{prefix}_{x}": part.flatten() for x, part in zip(by_head, parts, strict=True)}


def undo_gguf(whole: Part, module: str, kind: str, config: ModelConfig) -> Part:
    """What llama.cpp's converter has changed. Value heads: head j of each key head comes before head j + 1 of any."""
    sizes: HybridConfig = config.hybrid
    key_heads, value_heads = sizes.num_key_heads, sizes.num_value_heads
    # Where each value head is in the file.
    heads = torch.arange(value_heads, device="cpu").view(-1, key_heads).T.flatten()
    if not config.architecture.startswith("Qwen3_5"):
        heads = heads.sort().values
    values = (heads[:, None] * sizes.value_dim + torch.arange(sizes.value_dim, device="cpu")).flatten()
    if kind == "A_log":
        return replace(whole, rows=heads, change=lambda x: (-x.double()).log())
    if kind == "dt_bias" or module in ("in_proj_a", "in_proj_b"):
        return replace(whole, rows=heads)
    if module in ("in_proj_qkv", "conv1d"):
        return replace(
            whole, rows=torch.cat((torch.arange(2 * sizes.key_size, device="cpu"), 2 * sizes.key_size + values))
        )
    if module in ("gate", "shared_expert_gate"):  # never in few bits here: rows would change experts
        return replace(whole, change=lambda x: x if isinstance(x, Tensor) else x.dequantize())
    if module == "in_proj_z":
        return replace(whole, rows=values)
    if module == "out_proj":
        return replace(whole, columns=values)
    is_offset = module.endswith("norm") and ".linear_attn.norm" not in whole.name
    return replace(whole, change=lambda x: x - 1) if is_offset else whole
