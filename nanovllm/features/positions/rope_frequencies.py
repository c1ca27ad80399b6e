"""How fast each pair of a head's numbers turns from one position to the next, scaled for long contexts (chapter 1).

Pair i of a head of d numbers turns by theta^(-2i/d) radians a position (arXiv:2104.09864): the first pairs tell
neighbours apart, the last ones turn less than once in a whole context. A longer context than the trained one would lead
the slow pairs to angles that they have never had. So they are slowed down.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig


def scale_frequencies(inv_freq: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """inv_freq: radians a position, float64 [rotary_dim / 2], the fastest first.

    Returns them scaled, and attention_factor().
    """
    scaling = config.rope_scaling
    inv_freq = inv_freq / torch.tensor(scaling.get("divisors", 1.0), dtype=torch.float64, device="cpu")
    if scaling["rope_type"] == "linear":
        inv_freq = inv_freq / scaling["factor"]
    elif scaling["rope_type"] != "default":
        kept = _kept_by_llama3(inv_freq, scaling) if scaling["rope_type"] == "llama3" else _kept_by_yarn(config)
        inv_freq = (1 - kept) * inv_freq / scaling["factor"] + kept * inv_freq
    return inv_freq, attention_factor(scaling)


def attention_factor(scaling: dict[str, Any]) -> float:
    """What cosines and sines are multiplied by. Scores grow by its square: yarn sharpens attention to more keys."""
    if scaling["rope_type"] != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    growth = 0.1 * math.log(scaling["factor"])
    return (1 + above * growth) / (1 + below * growth) if above and below else 1 + growth


def _kept_by_llama3(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by the factor (0), short ones stay (1), those between are blended."""
    original_len = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original_len / (2 * math.pi / inv_freq)  # full turns within the original context
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_yarn(config: ModelConfig) -> Tensor:
    """The same, but blended evenly from pair to pair, between those of beta_fast and beta_slow turns (2309.00071)."""
    scaling, dim = config.rope_scaling, config.rotary_dim

    def pair_of(num_turns: float) -> float:
        """The pair that makes so many full turns within the original context."""
        position = scaling["original_max_position_embeddings"] / (num_turns * 2 * math.pi)
        return dim * math.log(position) / (2 * math.log(config.rope_theta))

    first, last = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    return 1 - ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - first) / (last - first)).clamp(0.0, 1.0)
