"""All experts of a layer in one tensor, as transformers 5 and GGUF files have them: the matrices of single ones."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.files.tensor_parts import Part, check_size

STACKED = re.compile(r"(.*\.experts)\.([a-z_]+_proj)(\.weight)?")


def expert_tensors(files: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """{tensor name: the open file that holds it}, with those of single experts in the place of stacked ones."""
    found = dict[str, Any]()
    for name, file in files.items():
        stacked = STACKED.fullmatch(name)
        if stacked is None:
            found[name] = file
        else:
            found |= expert_parts(stacked[1], stacked[2], Part(file, name), config)
    return found


def expert_parts(path: str, kind: str, whole: Part, config: ModelConfig) -> dict[str, Part]:
    """Matrices of single experts. kind: gate_up_proj [E, 2 * size, hidden], or one projection."""
    size, parts = config.moe_intermediate_size, dict[str, Part]()
    check_size(whole, 0, config.num_experts)
    if kind == "gate_up_proj":
        check_size(whole, 1, 2 * size)
    for expert in range(config.num_experts):
        for half, part in enumerate(("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)):
            rows = torch.arange(half * size, (half + 1) * size, device="cpu") if kind == "gate_up_proj" else None
            parts[f"{path}.{expert}.{part}.weight"] = replace(whole, rows=rows, expert=expert)
    return parts
