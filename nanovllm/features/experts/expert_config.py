"""Experts: what config.json says of layers that have several MLPs, of which each token meets a few (chapter 17)."""

from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checks.values import Bounds, check_number, list_of, numbers_of, shorten, typed

# num_local_experts: transformers writes it so since version 5.
SPELLINGS = {"num_local_experts": "num_experts"}
EXPERTS: dict[str, Bounds] = {"num_experts": (Integral, 1, 2**12), "num_experts_per_tok": (Integral, 1, 2**12)}
EXPERTS |= {"moe_intermediate_size": (Integral, 1, 2**24)}
OF_OTHERS = "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"
SHARED = "shared_expert_intermediate_size"


def read_experts(config: dict[str, Any], architecture: str, num_layers: int, path: Path) -> dict[str, Any]:
    """ModelConfig's fields of a mixture of experts. ValueError for what is missing or cannot be."""
    has_shared_expert = architecture.startswith(("Qwen3_5Moe", "Qwen3Next"))
    config = {SPELLINGS.get(name, name): value for name, value in config.items()}
    if architecture.startswith("Qwen3_5Moe"):  # which has no such fields: every layer is a mixture, weights add up to 1
        config = {name: value for name, value in config.items() if name not in OF_OTHERS}
    if missing := [name for name in EXPERTS if name not in config]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    numbers = numbers_of(config, EXPERTS, path)
    num_experts, num_chosen = numbers["num_experts"], numbers["num_experts_per_tok"]
    if num_chosen > num_experts:
        raise ValueError(f"{path}: num_experts_per_tok is {num_chosen} of only {num_experts} experts")
    step = check_number(f"{path}: decoder_sparse_step", config.get("decoder_sparse_step", 1), Integral, 1)
    dense = list_of(config.get("mlp_only_layers", []), Integral, "numbers of layers", f"{path}: mlp_only_layers")
    if unknown := [i for i in dense if not 0 <= i < num_layers]:
        raise ValueError(f"{path}: mlp_only_layers names {shorten(unknown)}; there are layers 0 to {num_layers - 1}")
    if has_shared_expert:
        numbers |= numbers_of({SHARED: 512} | config, {SHARED: (Integral, 1, 2**24)}, path)
    return numbers | {
        "expert_layers": frozenset(i for i in range(step - 1, num_layers, step) if i not in dense),
        "norm_topk_prob": typed(config, "norm_topk_prob", has_shared_expert, path),
    }
