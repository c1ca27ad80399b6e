"""Experts: layers that have several MLPs, of which each token meets a few (chapter 17)."""

from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checks.values import Bounds, check_number, list_of, numbers_of, shorten

EXPERTS: dict[str, Bounds] = {"num_experts": (Integral, 1, 2**12), "num_experts_per_tok": (Integral, 1, 2**12)}
EXPERTS |= {"moe_intermediate_size": (Integral, 1, 2**24)}
SHARED: dict[str, Bounds] = {"shared_expert_intermediate_size": (Integral, 1, 2**24)}


def read_experts(text: Any, family: str, path: Path) -> dict[str, Any]:
    """ModelConfig's fields of a mixture of experts. text: transformers' configuration of the language model.

    Raises ValueError for what cannot be.
    """
    bounds = EXPERTS if family == "Qwen3Moe" else EXPERTS | SHARED
    numbers = numbers_of({name: getattr(text, name) for name in bounds}, bounds, path)
    num_experts, num_chosen = numbers["num_experts"], numbers["num_experts_per_tok"]
    if num_chosen > num_experts:
        raise ValueError(f"{path}: num_experts_per_tok is {num_chosen} of only {num_experts} experts")
    num_layers = text.num_hidden_layers
    if family == "Qwen3_5Moe":  # every layer is a mixture, and weights add up to 1
        return numbers | {"expert_layers": frozenset(range(num_layers)), "norm_topk_prob": True}
    step = check_number(f"{path}: decoder_sparse_step", text.decoder_sparse_step, Integral, 1)
    dense = list_of(text.mlp_only_layers, Integral, "numbers of layers", f"{path}: mlp_only_layers")
    if unknown := [i for i in dense if not 0 <= i < num_layers]:
        raise ValueError(f"{path}: mlp_only_layers names {shorten(unknown)}; there are layers 0 to {num_layers - 1}")
    return numbers | {
        "expert_layers": frozenset(i for i in range(step - 1, num_layers, step) if i not in dense),
        "norm_topk_prob": bool(text.norm_topk_prob),
    }
